"""The command line: a file per verb; nothing else knows the CLI library."""

from revela.cli import (
    carry,
    compare,
    eval,
    find,
    groups,
    heads,
    probe,
    queries,
    report,
    serve,
    train,
)
from revela.cli.main import app, main

__all__ = [
    "app",
    "carry",
    "compare",
    "eval",
    "find",
    "groups",
    "heads",
    "main",
    "probe",
    "queries",
    "report",
    "serve",
    "train",
]
