"""The command line: one function a verb; nothing else knows the CLI library. Errors are one
sentence, exit code 2.
"""

from revela.cli import export, index, learn, measure, probe, search, serve
from revela.cli.main import app, main

__all__ = ["app", "export", "index", "learn", "main", "measure", "probe", "search", "serve"]
