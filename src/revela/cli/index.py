"""``revela index``: make an index, add to it, delete from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from revela.cli.flags import PROMPTS, Flat, Out, PromptFlags, Several, Switch, names_of
from revela.cli.printing import print_report
from revela.encoders.prompts import GivenPrompts
from revela.errors import RevelaError
from revela.searching.index import Index
from revela.searching.manifest import Indexing
from revela.terminal import counted
from revela.text.load import READING, Reading, read_corpus
from revela.types import Precision

if TYPE_CHECKING:
    from revela.searching.ingest import Counts
    from revela.types import Document

INDEXING = Indexing()


def index(
    corpus: Annotated[list[Path] | None, Parameter(negative=())] = None,
    *,
    out: Out,
    model: str | None = None,
    append: Switch = False,
    delete: Annotated[list[str] | None, Several] = None,
    sync: Switch = False,
    yes: Switch = False,
    metadata: Annotated[list[str] | None, Several] = None,
    prompts: Annotated[PromptFlags, Flat] = PROMPTS,
    settings: Annotated[Indexing, Flat] = INDEXING,
    reading: Annotated[Reading, Flat] = READING,
    precision: Precision = "auto",
) -> None:
    """Make an index of a corpus; update it, add to it, or delete from it. The same command resumes
    a run that was killed.

    Parameters
    ----------
    corpus:
        As for train.
    out:
        Folder of the index.
    model:
        The retriever: a Sentence-Transformers folder, a hub id or an embedded model. By default
        embedded:minilm-l6 for English text, and embedded:e5-small for other languages and
        mixtures; with --append the one that made the index.
    append:
        Add to the index; documents whose id is there already are replaced.
    delete:
        Ids of documents to delete.
    sync:
        Make the index, or update it from the corpus: add new and changed documents, delete those
        that no longer exist. Without a corpus: use the one of the last run.
    yes:
        With --sync, delete documents even if half of them or more no longer exist.
    metadata:
        Fields or columns to keep with each document, for filters of revela search --where.
    precision:
        Numeric precision. auto: the fastest of int8, bf16 and fp32 on this CPU or GPU.
    """
    if delete:
        others = corpus, append, sync, yes, model, metadata, any(prompts.given)
        if any(others) or settings != INDEXING or reading != READING:
            raise RevelaError(
                "--delete takes ids and --out alone: first delete, then add with --append"
            )
        return _delete(out, delete)
    from revela.searching.state import read_info, unfinished_in
    from revela.text.analyzer import check_language

    check_language(settings.language)
    _check_sync(sync, yes, append)
    is_recorded = sync and (info := read_info(out)) is not None and info.finished
    if not corpus and not is_recorded:
        raise RevelaError("give a corpus to index, or ids of documents to --delete")
    if not (append or is_recorded):
        begun = unfinished_in(out)  # refuses a folder that is taken
        model = model or (begun.model if begun else None)
    fields = names_of(metadata)
    job = Job(corpus or [], reading, out, model, fields, prompts.given, settings, precision)
    if is_recorded:
        opened, changed = follow_recorded(job, yes)
    elif append or (reading.join_titles and not sync):
        opened, changed = write_at_once(job, append)
    else:
        opened, changed = write_by_file(job)
    print(f"language {opened.info.language}; {opened.calibration.describe()}")
    if any(opened.prompts):
        print(opened.prompts.describe())
    print(f"{changed.describe(sync)}; {out} holds {counted(len(opened), 'passage')}")
    if changed.cut:
        cut = counted(changed.cut, "chunk was", "chunks were")
        print(f"{cut} longer than the model's maximum length, and split again")


def _check_sync(sync: bool, yes: bool, append: bool) -> None:
    if yes and not sync:
        raise RevelaError("--yes has no effect without --sync: give both, or leave --yes out")
    if sync and append:
        raise RevelaError("--sync already adds and deletes documents: leave --append out")


@dataclass(frozen=True)
class Job:
    """A command line: a corpus and how to read it, an index and how to make it."""

    corpus: list[Path]
    reading: Reading
    out: Path
    model: str | None
    metadata: list[str]
    prompts: GivenPrompts
    settings: Indexing
    precision: Precision

    def existing(self) -> Index:
        """The index to append to.

        Raises:
            RevelaError: it was made with other settings than the flags.
        """
        from revela.searching.filters import OWN_COLUMNS

        opened = Index.open(self.out, self.model, precision=self.precision, prompts=self.prompts)
        asked = {*self.metadata} - OWN_COLUMNS.keys()
        other_columns = asked and asked != set(opened.info.columns)
        if self.settings not in (INDEXING, opened.info.settings) or other_columns:
            raise RevelaError(
                f"{self.out} was made with other settings or metadata: omit those flags, or make a "
                "new index"
            )
        return opened

    def create(self, documents: Sequence[Document]) -> Index:
        """A new index by the given model, or by the one for the languages of the documents."""
        from revela.encoders.default_model import installed_model, suited_model
        from revela.encoders.load import keep_graph, load_encoder, resolve
        from revela.searching.rows import metadata_columns
        from revela.text.spool import LazyTexts

        columns = metadata_columns(documents, self.metadata)
        texts = LazyTexts(documents, lambda document: document.full_text)
        folder = resolve(self.model or installed_model(*suited_model(texts)))
        keep_graph(folder)
        encoder = load_encoder(folder, self.precision, prompts=self.prompts)
        return Index.create(
            self.out, folder, columns, self.settings, encoder=encoder, prompts=self.prompts
        )


# Each of these scans the corpus, chooses a model for it if the index is new, and writes it.


def write_by_file(job: Job) -> tuple[Index, Counts]:
    """Make an index that records its files."""
    from revela.searching.sync import Scan, sync

    scan = Scan(job.corpus, job.reading, job.metadata)
    scan.check_report()
    print_report(scan.report)
    index = job.create(scan.documents)
    with index.changes() as changes:
        return index, sync(changes, scan, progress=True)


def write_at_once(job: Job, append: bool) -> tuple[Index, Counts]:
    """Add documents to an index, without a record of their files."""
    index = job.existing() if append else None
    documents, report = read_corpus(
        job.corpus,
        job.reading,
        distinct=False,
        min_words=1,
        metadata=job.metadata if index is None else list(index.info.columns),
        for_search=True,
        rename_repeated=True,
    )
    print_report(report)
    if index is None:
        index = job.create(documents)
    return index, index.add(documents, progress=True)


def follow_recorded(job: Job, yes: bool) -> tuple[Index, Counts]:
    """Update an index from the corpus, or from the sources that it was made of."""
    from revela.searching.sync import HALF, NONE, rescan, sync

    index, reading = job.existing(), None if job.reading == READING else job.reading
    with index.changes() as changes:
        scan = rescan(changes, job.corpus, reading)
        changed = sync(changes, scan, NONE if yes else HALF, progress=True)
    print_report(scan.report)
    return index, changed


def _delete(out: Path, ids: list[str]) -> None:
    opened = Index.open(out)
    deleted = opened.delete(ids)
    both = f"{counted(len(set(ids)), 'document')}, {counted(deleted, 'passage')}"
    print(f"deleted {both}; {out} holds {counted(len(opened), 'passage')}")
