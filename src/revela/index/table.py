"""What an index asks of LanceDB: its table, its indices, its filters and its errors. The only file
that imports it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from revela.errors import RevelaError
from revela.index.bm25 import STOP_WORDS
from revela.index.manifest import Info
from revela.settings import VectorForm

SHOWN = ("id", "chunk", "title", "passage")  # columns; those of metadata follow
OWN = (*SHOWN, "digest", "vector", "tokens")
TOKENS: dict[str, Any] = dict(
    language="English",
    stem=True,
    remove_stop_words=True,
    custom_stop_words=STOP_WORDS,
    ascii_folding=False,
    max_token_length=None,
)


def connect(folder: Path) -> Any:
    """The database in this folder."""
    os.environ.setdefault(
        "LANCEDB_LOG", "error"
    )  # its warnings are for programmers; read when the library is loaded
    import lancedb

    return lancedb.connect(folder, read_consistency_interval=timedelta(0))


def schema_of(info: Info) -> Any:
    """Columns of an index's table."""
    import pyarrow as pa

    own = {
        "id": pa.string(),
        "chunk": pa.int32(),
        "title": pa.string(),
        "passage": pa.string(),
        "digest": pa.string(),
    }
    metadata = {name: pa.type_for_alias(kind) for name, kind in info.columns.items()}
    kept = {"tokens": pa.binary()} if info.settings.keep_tokens else {}
    return pa.schema({**own, "vector": pa.list_(pa.float32(), info.width), **kept, **metadata})


def query_of_words(text: str) -> Any:
    """A query for passages that hold these words, by BM25."""
    from lancedb.query import MatchQuery

    return MatchQuery(text, "passage")


def make_indices(table: Any, info: Info, approximate: bool) -> None:
    """Make the indices that the table lacks: of ids, of words, and, where search is to be
    ``approximate``, of metadata and vectors.
    """
    from lancedb.index import FTS, Bitmap, BTree

    present = {column for index in table.list_indices() for column in index.columns}
    if "id" not in present:
        table.create_index("id", config=BTree())
    if "passage" not in present:
        table.create_index("passage", config=FTS(**TOKENS))
    if "vector" not in present and approximate:
        for name, kind in info.columns.items():
            table.create_index(name, config=Bitmap() if kind == "bool" else BTree())
        table.create_index("vector", config=_vector_index(info.settings.vectors))


def _vector_index(form: VectorForm) -> Any:
    """Inner products of unit vectors throughout, so that scores are cosines."""
    from lancedb.index import HnswFlat, HnswSq, IvfRq

    if form == "binary":
        return IvfRq(distance_type="dot")
    return {"float32": HnswFlat, "int8": HnswSq}[form](distance_type="dot")


@contextmanager
def damage(folder: Path, where: str = "", columns: Iterable[str] = ()) -> Iterator[None]:
    """What LanceDB raises, as a sentence. With a filter it is the filter's fault, unless files are
    at fault.
    """
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        said = " ".join(re.sub(r",? ?/\S+\.rs:\d+:\d+.*", "", str(error), flags=re.DOTALL).split())[
            :300
        ]
        if where and not isinstance(error, OSError) and not re.search(r"\(IO\)|Not found:", said):
            why = _PREAMBLE.split(said)[-1].split(". Valid fields")[0].rstrip(".)")
            names = ", ".join([*SHOWN, *columns])
            raise RevelaError(
                f'the filter "{where[:80]}" cannot be used ({why}): compare columns of this index, which are {names}'
            ) from error
        raise RevelaError(
            f"{folder} is damaged or out of reach ({said}): mend that, or make it again with revela index"
        ) from error


_PREAMBLE = re.compile(r"(?:Schema error|sql parser error|Invalid user input|Invalid input)[:,] ")


def among(documents: Iterable[str]) -> str:
    """The filter that leaves these documents only."""
    return "id in ({})".format(
        ", ".join("'{}'".format(name.replace("'", "''")) for name in documents)
    )
