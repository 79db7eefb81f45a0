"""What tests share: real servers, jobs and processes with a sure end, and made-up images. One noun a file."""
