"""The command line: every command, its JSON, and one clear sentence for each kind of bad input."""
