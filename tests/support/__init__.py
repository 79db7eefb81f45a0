"""Shared test helpers: real servers, jobs and processes that always end, and synthetic images. One noun per file."""
