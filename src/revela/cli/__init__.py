"""The command line: a file per verb; nothing else knows the CLI library."""

# ruff: noqa: F401  (a verb is there once its file is imported)

from revela.cli import (
    cache,
    compare,
    encoding,
    eval,
    export,
    fitting,
    groups,
    heads,
    index,
    mcp,
    probe,
    queries,
    report,
    search,
    serve,
    train,
)
from revela.cli.main import app, main

__all__ = ["app", "main"]
