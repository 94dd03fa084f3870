"""`verl-like`: one command, thin subcommands. Each calls the package that does the work."""
