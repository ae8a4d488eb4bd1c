"""The command line. `main` turns errors into one line on stderr and an exit code."""

from kv8.cli.app import main

__all__ = ["main"]
