"""Documents -> an index, batch by batch: cut, encoded, and added whole; what is there already and
unchanged is passed over.

So a run that was killed goes on where it was when it is started again, and adding a corpus that has
changed a little costs little.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from tqdm import tqdm

from revela.corpus.arrow_list import ArrowList
from revela.corpus.chunk import chunk
from revela.corpus.parallel import batches
from revela.errors import RevelaError
from revela.index.manifest import Info, writing
from revela.index.rerank import encode_packed
from revela.index.store import Index
from revela.index.table import OWN
from revela.settings import Indexing
from revela.types import Document, TokenEncoder, Value

BATCH = 2**19  # characters in a commit: some hundred chunks, so that a kill costs seconds
MOST = 1000  # documents in a commit
NUMBERS = {bool: "bool", int: "int64", float: "double"}


@dataclass(frozen=True)
class Added:
    """What is in the index for good: documents that are new, that took another's place, that were
    there already; chunks written.
    """

    new: int = 0
    replaced: int = 0
    unchanged: int = 0
    chunks: int = 0

    def __add__(self, other: Added) -> Added:
        return Added(
            *(mine + others for mine, others in zip(astuple(self), astuple(other), strict=True))
        )


def build(
    folder: Path,
    documents: ArrowList[Document],
    encoder: TokenEncoder,
    *,
    model: str,
    fingerprint: str,
    settings: Indexing,
    metadata: Sequence[str] = (),
    progress: bool = False,
) -> tuple[Index, Added]:
    """A new index of these documents; one that a killed run has begun in this folder is finished.

    Args:
        folder: where; it holds nothing else.
        documents: with ids of their own.
        encoder: that of ``model``.
        model: the folder that the encoder came from.
        fingerprint: of that folder.
        settings: how to cut documents and to hold vectors.
        metadata: the documents' fields that results can be filtered by.
        progress: show a bar.

    Raises:
        RevelaError: the folder holds something else, an id or a metadata field is wrong, or the
            model gives no numbers.
    """
    width = encoder.encode_passages(["."]).shape[1]
    info = Info(
        model,
        fingerprint,
        min(width, settings.dimensions or width),
        settings,
        metadata_columns(documents, metadata),
    )
    with writing(folder):
        index = Index.create(folder, info)
        return index, _filled(index, documents, encoder, progress)


def extend(
    index: Index, documents: ArrowList[Document], encoder: TokenEncoder, progress: bool = False
) -> Added:
    """Add documents to an index; those whose id is there already are replaced. The encoder is that
    of the index's model.
    """
    with writing(index.folder):
        return _filled(index, documents, encoder, progress)


def _filled(
    index: Index, documents: ArrowList[Document], encoder: TokenEncoder, progress: bool
) -> Added:
    refuse_repeated(name for names in documents.arrays("id") for name in names.to_pylist())
    total = Added()
    with tqdm(total=len(documents), unit="document", disable=not progress) as bar:
        for added in add_documents(index, documents, encoder):
            total += added
            bar.update(added.new + added.replaced + added.unchanged)
    index.finish()
    return total


def add_documents(
    index: Index, documents: Iterable[Document], encoder: TokenEncoder
) -> Iterator[Added]:
    """Add documents, or put them in the place of those with the same id; each batch is yielded once
    it is safe on disk.

    Raises:
        RevelaError: a metadata field does not fit its column, or the encoder gives no numbers.
    """
    words, columns = index.info.settings.chunk_words, index.info.columns
    for some in batches(documents, lambda document: max(len(document.text), BATCH // MOST), BATCH):
        digests = {document.id: _digest(document, words) for document in some}
        present = index.digests(list(digests))
        changed = [
            document for document in some if present.get(document.id) != digests[document.id]
        ]
        rows: dict[str, list[Value | None]] = {
            name: [] for name in (*OWN, *columns) if name not in ("vector", "tokens")
        }
        for document in changed:
            values = {
                name: _fitted(document, name, kind, index.folder) for name, kind in columns.items()
            }
            title = document.title.strip()
            pieces = [piece.text for piece in chunk(document, 0, words)] or [""]
            for number, text in enumerate(pieces):
                row = (
                    document.id,
                    number,
                    title,
                    f"{title} {text}" if title else text,
                    digests[document.id],
                    *values.values(),
                )
                for column, value in zip(rows.values(), row, strict=True):
                    column.append(value)
        replaced = [document.id for document in changed if document.id in present]
        if changed:
            passages = [str(text) for text in rows["passage"]]
            if index.info.settings.keep_tokens:
                index.put(rows, *encode_packed(encoder, passages), replaced)
            else:
                index.put(rows, encoder.encode_passages(passages), None, replaced)
        yield Added(
            len(changed) - len(replaced), len(replaced), len(some) - len(changed), len(rows["id"])
        )


def refuse_repeated(ids: Iterable[str]) -> None:
    """Refuse documents that share an id: only one of them could be found."""
    seen = set[str]()
    for name in ids:
        if name in seen:
            raise RevelaError(
                f'two documents have the id "{name}": give each its own, or index the folder that holds both files'
            )
        seen.add(name)


def metadata_columns(documents: Iterable[Document], fields: Sequence[str]) -> dict[str, str]:
    """The Arrow type of each metadata field: of numbers if all its values are, of text otherwise.

    Raises:
        RevelaError: a field is in no document, or has the name of a column that every index has.
    """
    kinds: dict[str, set[type]] = {name: set() for name in fields}
    if taken := [name for name in fields if name in OWN or name.startswith("_")]:
        raise RevelaError(
            f"--metadata {taken[0]}: columns of this name are the index's own; rename the field"
        )
    for document in documents if fields else ():
        for name in fields:
            if (value := document.metadata.get(name)) is not None:
                kinds[name].add(
                    type(value) if not isinstance(value, int) or -(2**63) <= value < 2**63 else str
                )
    if missing := [name for name, found in kinds.items() if not found]:
        raise RevelaError(
            f'no document has a field "{missing[0]}": name others with --metadata, or leave it away'
        )
    return {name: _column_type(found) for name, found in kinds.items()}


def _column_type(kinds: set[type]) -> str:
    if kinds == {int, float}:
        return "double"
    return NUMBERS.get(next(iter(kinds)), "string") if len(kinds) == 1 else "string"


def _fitted(document: Document, name: str, kind: str, folder: Path) -> Value | None:
    """A metadata value as its column holds it."""
    value = document.metadata.get(name)
    if value is None or NUMBERS.get(type(value)) == kind:
        return value
    if kind == "string":
        return value if isinstance(value, str) else json.dumps(value)
    if kind == "double" and type(value) is int:
        return float(value)
    raise RevelaError(
        f"{name} of document {document.id} is {value!r}, where {folder} holds {kind}: mend the field, or index all of it again"
    )


def _digest(document: Document, chunk_words: int) -> str:
    """16 hex digits that change whenever what is stored of a document does."""
    metadata: Mapping[str, Value] = document.metadata
    content = json.dumps(
        [chunk_words, document.title, document.text, document.kind, dict(metadata)], sort_keys=True
    )
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
