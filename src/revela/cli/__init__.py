"""The command line: one function a verb; nothing else knows the CLI library. Errors are one
sentence, exit code 2.
"""

from revela.cli import carry, eval, find, learn, probe, report, serve
from revela.cli.main import app, main

__all__ = ["app", "carry", "eval", "find", "learn", "main", "probe", "report", "serve"]
