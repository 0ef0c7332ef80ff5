"""The command line: `main` has the list of commands, the other files one group of commands each, or what they share."""
