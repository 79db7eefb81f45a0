"""What the pages say is there and works: files, names, commands, links, figures."""
