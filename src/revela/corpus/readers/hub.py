"""Datasets of the Hugging Face hub, streamed: nothing is downloaded whole. Written
hub:owner/name[:configuration[:split]].
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from revela.corpus.readers.opened import Unsuited
from revela.corpus.readers.rows import Fields, columns_of
from revela.corpus.readers.tables import documents_of
from revela.corpus.report import Report
from revela.errors import RevelaError
from revela.types import Document

PREFIX = "hub:"
BATCH = 256  # rows asked for at a time


def read_hub(source: str, fields: Fields, report: Report) -> Iterator[Document]:
    """The rows of one split, ``train`` if none is named, as documents.

    Args:
        source: hub:owner/name, hub:owner/name:configuration or hub:owner/name:configuration:split;
            an empty configuration is the default one. A local folder does as well as owner/name.
        fields: which columns hold what.
        report: told of bad rows.

    Raises:
        RevelaError: there is no such dataset, configuration, split or column, or the hub is out of
            reach.
    """
    with _one_sentence(source):
        stream = _stream(source)
        if stream.column_names:
            stream = stream.select_columns(columns_of(stream.column_names, fields))
        yield from documents_of(
            stream.with_format("arrow").iter(batch_size=BATCH),
            source.removeprefix(PREFIX).split(":")[0],
            fields,
            report,
        )


def hub_rows(source: str) -> Iterator[dict[str, Any]]:
    """The rows of one split as they are; ``source`` and what is raised as for ``read_hub``."""
    with _one_sentence(source):
        yield from _stream(source)


def _stream(source: str) -> Any:
    name, configuration, split, *more = [*source.removeprefix(PREFIX).split(":"), "", ""]
    if not name or any(more):
        raise RevelaError(
            f"{source} is no dataset: write hub:owner/name, hub:owner/name:configuration or hub:owner/name:configuration:split"
        )
    import datasets

    datasets.disable_progress_bars()
    for library in ("datasets", "huggingface_hub", "httpx"):
        logging.getLogger(library).setLevel(logging.ERROR)
    return datasets.load_dataset(
        name, configuration or None, split=split or "train", streaming=True
    )


@contextmanager
def _one_sentence(source: str) -> Iterator[None]:
    """Whatever goes wrong with a dataset, said to the user."""
    try:
        yield
    except RevelaError:
        raise
    except Unsuited as error:
        raise RevelaError(f"{source}: {error}") from error
    except Exception as error:  # whatever datasets, the hub client or its HTTP library raise
        raise RevelaError(f"{source} cannot be read: {_why(error)}") from error


def _why(error: Exception) -> str:
    """What went wrong and what to do, from the first line or two of a library's message."""
    said = " ".join(str(error).split())
    if isinstance(error, ConnectionError) or "Couldn't reach" in said:
        return "the hub is out of reach; connect, or give a local folder of Parquet files"
    if "Config name is missing" in said or "BuilderConfig" in said:
        choices = (
            said[said.index("[") : said.index("]") + 1] if "[" in said and "]" in said else said
        )
        return f"name one of its configurations {choices}, as hub:owner/name:configuration"
    if isinstance(error, ValueError) and "split" in said.lower():
        return f"{said[:200]}; name a split as hub:owner/name:configuration:split"
    return f"{said[:300] or type(error).__name__}; check the name, and that you may read it (hf auth login)"
