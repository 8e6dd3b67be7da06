"""The command line: a file per verb; nothing else knows the CLI library."""

from revela.cli import (
    carry,
    compare,
    find,
    groups,
    heads,
    measure,
    probe,
    queries,
    serve,
    train,
)
from revela.cli.main import app, main

__all__ = [
    "app",
    "carry",
    "compare",
    "find",
    "groups",
    "heads",
    "main",
    "measure",
    "probe",
    "queries",
    "serve",
    "train",
]
