"""The command line and what is beneath it: configuration, control, mount table, checks."""
