"""Stream datasets of the Hugging Face hub: hub:owner/name[:configuration[:split]]."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from revela.errors import RevelaError, extra
from revela.text.readers.common import ReadReport, UnsupportedFile
from revela.text.readers.rows import Fields, columns_of
from revela.text.readers.tables import documents_of
from revela.types import Document

PREFIX = "hub:"
BATCH = 256  # rows per request


def read_hub(source: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read the rows of a split (default: train) as documents; owner/name may be a local folder."""
    with _as_revela_error(source):
        stream = _stream(source)
    yield from read_dataset(stream, source, fields, report)


def read_dataset(data: Any, source: str, fields: Fields, report: ReadReport) -> Iterator[Document]:
    """Read the rows of a dataset of the library datasets as documents."""
    with _as_revela_error(source):
        if data.column_names:
            data = data.select_columns(columns_of(data.column_names, fields))
        batches = data.with_format("arrow").iter(batch_size=BATCH)
        name = source.removeprefix(PREFIX).split(":")[0]
        yield from documents_of(batches, name, fields, report)


def hub_rows(source: str) -> Iterator[dict[str, Any]]:
    """The rows of a split; ``source`` as for ``read_hub``."""
    with _as_revela_error(source):
        yield from _stream(source)


def _stream(source: str) -> Any:
    name, configuration, split, *more = [*source.removeprefix(PREFIX).split(":"), "", ""]
    if not name or any(more):
        raise RevelaError(
            f"{source} is not a dataset: write hub:owner/name, hub:owner/name:configuration "
            "or hub:owner/name:configuration:split"
        )
    with extra("hub", source):
        import datasets
    datasets.disable_progress_bars()
    for library in ("datasets", "huggingface_hub", "httpx"):
        logging.getLogger(library).setLevel(logging.ERROR)
    return datasets.load_dataset(
        name, configuration or None, split=split or "train", streaming=True
    )


@contextmanager
def _as_revela_error(source: str) -> Iterator[None]:
    """Turn errors of the datasets libraries into a RevelaError of one sentence."""
    try:
        yield
    except RevelaError:
        raise
    except UnsupportedFile as error:
        raise RevelaError(f"{source}: {error}") from error
    except Exception as error:  # datasets, the hub client and its HTTP library raise many
        raise RevelaError(f"{source} cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ConnectionError) or "Couldn't reach" in message:
        return "the hub cannot be reached; check the connection, or give a folder of Parquet files"
    if "Config" in message and (choices := re.search(r"\[.*?\]", message)):
        return f"choose one of its configurations {choices[0]}, as hub:owner/name:configuration"
    return (
        f"{message[:300]}; check hub:owner/name:configuration:split, and that you have access "
        "(hf auth login)"
    )
