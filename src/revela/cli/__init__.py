"""The command line, the only place that knows the CLI library: a file per verb."""

from revela.cli.main import app, main

__all__ = ["app", "main"]
