"""The documentation is true: files, names, commands, links and figures in it exist and work."""
