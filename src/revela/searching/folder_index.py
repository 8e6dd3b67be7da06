"""Search a folder of files, or a file, as if it were an index. The index is in the user's cache
folder, by path, model and settings; it is made or updated first.

If no model is named, the languages of the text decide (default_model.py). The choice is kept by
path in the cache, and made again when the index has doubled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from revela.encoders import load
from revela.encoders.default_model import installed_model, suited_model
from revela.encoders.load import resolve
from revela.encoders.model_files import fingerprint, gives_tokens
from revela.encoders.prompts import OWN, GivenPrompts, Prompts, named_prompts, prompts_of
from revela.errors import RevelaError, first_line
from revela.files import atomic_write, bytes_of, cache_folder, remove_whole, writing
from revela.ranking.fusion import check_weight
from revela.searching.index import Index
from revela.searching.ingest import Counts
from revela.searching.manifest import Indexing
from revela.searching.state import STATE, State, is_index, read_info, unfinished_in
from revela.searching.sync import ALL, Scan, absolute, rescan, sync
from revela.searching.word_search import Words
from revela.terminal import counted, duration, megabytes
from revela.text.load import READING
from revela.text.spool import LazyTexts
from revela.types import Document, Hits

log = logging.getLogger(__name__)
SOON = 2**19  # characters; vectors of such a text take some six seconds
OnPartialIndex = Callable[[Words | Index], None]


def open_any(
    path: str | Path,
    model: str | Path | None = None,
    *,
    progress: bool = False,
    prompts: GivenPrompts = OWN,
    on_partial_index: OnPartialIndex | None = None,
    **options: Any,
) -> Index:
    """Open an index, or the index of a folder of files or a file, which is made or updated first.

    Args:
        path: an index, a folder of files or a file.
        model: the retriever; by default that of the index, or for text embedded:minilm-l6 if it is
            English, and embedded:e5-small if it is not.
        progress: show a bar.
        prompts: prefixes of queries and of passages; None keeps the model's own.
        on_partial_index: called before more than ``SOON`` characters are encoded, with what can be
            searched meanwhile: the words of a text without an index, or the index as it was. Its
            ``notice`` says what is missing.
        options: as for ``Index.open``.

    Raises:
        RevelaError: the path is none of these, or holds no document, or as for ``Index.open``.
    """
    check_weight(options.get("weight"))
    path = Path(path)
    if is_index(path):
        return Index.open(path, model, prompts=prompts, **options)
    if not path.exists():
        raise RevelaError(
            f"{path} is not an index, and no folder or file of text either: give the path of one"
        )
    text = _Text(path, progress, prompts, on_partial_index, options)
    return text.by_language() if model is None else text.opened(str(model))


@dataclass(frozen=True)
class _Text:
    """A text whose index is opened, made or brought up to date; fields as for ``open_any``."""

    path: Path
    progress: bool
    prompts: GivenPrompts
    on_partial_index: OnPartialIndex | None
    options: Mapping[str, Any]

    @cached_property
    def scan(self) -> Scan:
        """All documents of the text, for an index that is not there yet."""
        scan = Scan([self.path])
        scan.check_report()
        return scan

    def by_language(self) -> Index:
        """The updated index by the embedder for the text's languages."""
        file, why = choice_file(absolute(self.path)), ""
        model, passages = _kept_choice(file)
        if not model:
            texts = LazyTexts(self.scan.documents, lambda document: document.full_text)
            model, why = suited_model(texts)
        index = self.opened(installed_model(model, why))
        if has_doubled := 0 < 2 * passages <= len(index):
            former, (model, why) = model, suited_model(index.sample())
            if model != former:
                index = self.opened(installed_model(model, why))
        if has_doubled or not passages:
            with atomic_write(file) as temporary:
                temporary.write_text(json.dumps({"model": model, "passages": len(index)}))
        return index

    def opened(self, model: str) -> Index:
        """The updated index by a model. Words are counted before waiting for its lock."""
        start, folder = time.perf_counter(), resolve(model)
        settings = Indexing(keep_tokens=gives_tokens(folder))
        prompts = prompts_of(folder, self.prompts)
        rerank = "late-interaction" if settings.keep_tokens else None
        options = {**self.options, "default_rerank": rerank, "prompts": prompts}
        place = _place(self.path.resolve(), folder, settings, prompts)
        words = self._words(place, settings)
        with writing(place.parent, wait=True):
            scan, index = None, _opened_in(place, folder, options)
            if is_new := index is None:
                scan = self.scan
                load.keep_graph(folder)
                precision = self.options.get("precision", "auto")
                encoder = load.load_encoder(folder, precision, prompts=prompts)
                index = Index.create(
                    place, folder, settings=settings, encoder=encoder, prompts=prompts
                )
            with index.changes(wait=True) as changes:
                scan = scan or rescan(changes, [self.path], READING)
                answer = partial(self._answer_before, index)
                tell = words.tell if words else None
                changed = sync(changes, scan, ALL, self.progress, answer, tell)
            index.notice = ""
            if is_new:
                index = Index.open(place, folder, encoder=encoder, **options)
        for line in scan.report.lines()[not scan.report.bytes_unread :] if changed.any else []:
            log.info(line)
        log.info(_summary(self.path, place, changed, time.perf_counter() - start))
        os.utime(place / STATE)  # when it was used last
        return index

    def _words(self, place: Path, settings: Indexing) -> Words | None:
        """The words of a text without an index, if they are wanted and its vectors take long."""
        if not self.on_partial_index or (stored := _stored_in(place)) is None:
            return None
        documents = self.scan.documents
        if not _takes_long(documents):
            return None
        words = Words(documents, settings.chunk_words, [self.path])
        lengths = [len(document.text) for document in documents]
        words.tell(sum(lengths[:stored]) / sum(lengths))
        self.on_partial_index(words)
        return words

    def _answer_before(self, index: Index, documents: Sequence[Document]) -> None:
        if self.on_partial_index and index.info.finished and _takes_long(documents):
            one, many = "new or changed document is", "new or changed documents are"
            index.notice = f"{counted(len(documents), one, many)} not searched yet."
            self.on_partial_index(index)


def _takes_long(documents: Sequence[Document]) -> bool:
    return sum(len(document.text) for document in documents) > SOON


def _kept_choice(file: Path) -> tuple[str, int]:
    """The embedder that was chosen for a text, installed or not, and the number of passages then;
    "" and 0 if there was none.
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        return str(kept["model"]), int(kept["passages"])
    return "", 0


def choice_file(source: str) -> Path:
    """The file of a text's choice of embedder; ``source`` is a path from ``absolute``."""
    digest = hashlib.blake2b(os.fsencode(source), digest_size=8)
    return cache_folder() / "indices" / f"{digest.hexdigest()}.json"


def search(
    path: str | Path,
    query: str,
    k: int = 10,
    model: str | Path | None = None,
    prompts: GivenPrompts = OWN,
    **options: Any,
) -> Hits:
    """Search a folder of files, a file or an index (``open_any``): the k best documents.

    Args:
        path, model, prompts: as for ``open_any``.
        query, k, options: as for ``Index.search``.
    """
    return open_any(path, model, prompts=prompts).search(query, k, **options)


def _place(path: Path, model: Path, settings: Indexing, prompts: Prompts) -> Path:
    """The folder for a text's index in the cache."""
    made: list[Any] = [os.fsencode(path).hex(), fingerprint(model), asdict(settings)]
    if prompts != named_prompts(model):
        made.append(prompts)
    digest = hashlib.blake2b(json.dumps(made, sort_keys=True).encode(), digest_size=8)
    return cache_folder() / "indices" / digest.hexdigest() / "index"


def _stored_in(place: Path) -> int | None:
    """How many documents a stopped run has put into the index in this folder; None: all."""
    if is_index(place):
        with suppress(RevelaError), closing(State(place)) as state:
            return None if state.info.finished else state.documents()
    return 0


def _opened_in(place: Path, model: Path, options: Mapping[str, Any]) -> Index | None:
    """The finished index in a folder of the cache; None if there is none. An index that cannot be
    opened, or was made by another version, is removed.
    """
    try:
        if (info := read_info(place)) and info.finished:
            return Index.open(place, model, **options)
        unfinished_in(place)
    except RevelaError as error:
        log.warning(f"{first_line(error)}; rebuilding it")
        remove_whole(place)
    return None


def _summary(path: Path, place: Path, changed: Counts, seconds: float) -> str:
    kept = f"its index is {place} ({megabytes(bytes_of(place))})"
    if not changed.any:
        return f"{path} is unchanged, {counted(changed.unchanged, 'document')}; {kept}"
    return f"{path}: {changed.describe()}; {duration(seconds / 60)}; {kept}"
