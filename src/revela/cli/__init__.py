"""The command line: a file per verb; nothing else knows the CLI library."""

from revela.cli import (
    compare,
    encoding,
    eval,
    export,
    fitting,
    groups,
    heads,
    index,
    probe,
    push,
    queries,
    report,
    search,
    serve,
    train,
)
from revela.cli.main import app, main

__all__ = [
    "app",
    "compare",
    "encoding",
    "eval",
    "export",
    "fitting",
    "groups",
    "heads",
    "index",
    "main",
    "probe",
    "push",
    "queries",
    "report",
    "search",
    "serve",
    "train",
]
