"""``revela index``: make an index, add to it, delete from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from revela import on_ray
from revela.cli.flags import (
    ENGINE,
    PROMPTS,
    Engine,
    Flat,
    Out,
    PromptFlags,
    Several,
    reader_of_parts,
)
from revela.cli.main import SEARCH, app
from revela.cli.printing import command_line, print_report
from revela.corpus.load import READING, Reading
from revela.encoder.prompts import Given as GivenPrompts
from revela.errors import RevelaError
from revela.model_files import named_by_auto
from revela.on_ray import Cluster
from revela.settings import Indexing, Recipe
from revela.silence import counted
from revela.types import Precision

if TYPE_CHECKING:
    from revela.evaluation.choose_model import Kind
    from revela.index.follow import Synced
    from revela.index.index import Index
    from revela.index.ingest import Added
    from revela.types import Document

INDEXING, COMMIT_EVERY = Indexing(), 10**6


@app.command(group=SEARCH, sort_key=4)
def index(
    corpus: Annotated[list[Path] | None, Parameter(negative=())] = None,
    *,
    out: Out,
    model: str | None = None,
    append: Annotated[bool, Parameter(negative=())] = False,
    delete: Annotated[list[str] | None, Several] = None,
    sync: Annotated[bool, Parameter(negative=())] = False,
    yes: Annotated[bool, Parameter(negative=())] = False,
    metadata: Annotated[list[str] | None, Several] = None,
    context: str | None = None,
    prompts: Annotated[PromptFlags, Flat] = PROMPTS,
    settings: Annotated[Indexing, Flat] = INDEXING,
    reading: Annotated[Reading, Flat] = READING,
    precision: Precision = "auto",
    engine: Annotated[Engine, Flat] = ENGINE,
    commit_every: int = COMMIT_EVERY,
) -> None:
    """Make an index of a corpus; add to it, delete from it, or bring it in step. The same command
    goes on with a run that was killed.

    Parameters
    ----------
    corpus:
        As for train.
    out:
        Folder of the index.
    model:
        The retriever: a Sentence-Transformers folder, a hub id or an embedded model. By default
        embedded:minilm-l6 for English text, and embedded:e5-small for other languages and
        mixtures; with --append the one that made the index. auto: the one that suits the text, as
        it is found without labels, of the installed ones and of those that auto:NAME,NAME names;
        what is made of a language model is saved beside the index, in OUT-model.
    append:
        Add to the index; documents whose id is there already are replaced.
    delete:
        Ids of documents to delete.
    sync:
        Bring the index in step with the corpus, or make it: add what is new or has changed, delete
        what is gone. Without a corpus: that of the last time.
    yes:
        With --sync, delete documents even if half of them or more are gone.
    metadata:
        Fields or columns to keep with each document, for filters of revela search --where.
    context:
        What a retriever trained with --context reads before every text: documents drawn from the
        corpus (the default), the saved ones of its training, none, or a file with a text per line.
    precision:
        Arithmetic; auto is int8, bf16 or fp32, whichever this processor or GPU is fast in.
    commit_every:
        With --engine ray: chunks per commit; a kill loses at most these.
    """
    if delete:
        others: tuple[Any, ...] = (append, sync, yes, model, metadata, context, precision)
        others += (prompts, settings, reading, engine)
        defaults: tuple[Any, ...] = (False, False, False, None, None, None, "auto")
        defaults += (PROMPTS, INDEXING, READING, ENGINE)
        if corpus or others != defaults or commit_every != COMMIT_EVERY:
            raise RevelaError(
                "--delete takes ids and no corpus or option but --out: first delete, then add with "
                "--append"
            )
        _delete(out, delete)
        return
    from revela.index.language import check_language
    from revela.index.state import is_finished, is_index

    check_language(settings.language)
    _check_sync(sync, yes, append, engine)
    if not corpus and not (sync and is_index(out)):
        raise RevelaError("give a corpus to index, or ids of documents to --delete")
    made: Any = dict(metadata=metadata or [], context=context, prompts=prompts.given)
    made |= dict(settings=settings, precision=precision)
    job = Job(corpus or [], reading, out, model, **made)
    synced: Synced | None = None
    if sync and is_finished(out):
        opened, synced = follow_recorded(job, yes)
    elif engine.engine == "ray":
        opened, added = write_by_ray(job, append, engine.cluster, commit_every)
    elif append or (reading.join_titles and not sync):
        opened, added = write_at_once(job, append)
    else:
        opened, synced = write_by_file(job)
    added = synced.added if synced else added
    changed = synced.describe() if synced and sync else added.describe()
    print(f"language {opened.info.language}; {opened.calibration.describe()}")
    if any(opened.info.prompts):
        print(opened.info.prompts.describe())
    print(f"{changed}; {out} holds {counted(len(opened), 'passage')}")
    if added.cut:
        cut = counted(added.cut, "chunk was", "chunks were")
        print(f"{cut} longer than the model reads, and cut by its tokenizer")


def _check_sync(sync: bool, yes: bool, append: bool, engine: Engine) -> None:
    if yes and not sync:
        raise RevelaError("--yes lets --sync delete documents: give both, or leave it out")
    if sync and append:
        raise RevelaError("--sync adds and deletes what it has to: leave --append out")
    if sync and engine != ENGINE:
        raise RevelaError("--sync reads in this process: leave --engine and its options out")


@dataclass(frozen=True)
class Job:
    """A command line: a corpus and how to read it, an index and how to make it."""

    corpus: list[Path]
    reading: Reading
    out: Path
    model: str | None
    metadata: list[str]
    context: str | None
    prompts: GivenPrompts
    settings: Indexing
    precision: Precision

    def existing(self) -> Index:
        """The index to append to.

        Raises:
            RevelaError: it was made with other settings than the flags.
        """
        from revela.index.contexts import Context
        from revela.index.index import Index

        context = None if self.context is None else Context.of(self.context)
        how: Any = dict(precision=self.precision, prompts=self.prompts)
        opened = Index.open(self.out, self.model, **how)
        other_columns = self.metadata and set(self.metadata) != set(opened.info.columns)
        other_context = context is not None and not context.is_of(opened.info.context)
        if self.settings not in (INDEXING, opened.info.settings) or other_columns or other_context:
            raise RevelaError(
                f"{self.out} was made with other settings, metadata or context: omit those flags, "
                "or make a new index"
            )
        return opened

    def opened(self, append: bool, by_ray: bool = False) -> tuple[Index | None, list[str]]:
        """The index to append to, None for a new one, and the fields of its metadata."""
        if append:
            index = self.existing()
            return index, list(index.info.columns)
        self.check_new(by_ray)
        return None, self.metadata

    def check_new(self, by_ray: bool = False) -> None:
        """Refuse a folder that is taken, a file that is no context, and a choice of a model that
        cannot be made.
        """
        from revela.index.contexts import Context
        from revela.index.state import unfinished_in

        if self.context is not None:
            Context.of(self.context)
        begun = unfinished_in(self.out)
        if begun is not None or not self.model or (names := named_by_auto(self.model)) is None:
            return
        from revela.evaluation.choose_model import candidates_of

        if by_ray:
            raise RevelaError(
                "--model auto reads the text in this process: leave --engine out, or choose by "
                "revela fit TEXT --model auto --out RETRIEVER"
            )
        if self.fitted.exists():
            raise RevelaError(
                f"{self.fitted} exists, where a fitted model would go: give it as --model, or "
                "remove it"
            )
        candidates_of(names, self.kinds)

    @property
    def fitted(self) -> Path:
        """Where ``--model auto`` saves what it makes of a language model."""
        return self.out.with_name(f"{self.out.name}-model")

    @property
    def kinds(self) -> list[Kind]:
        """What ``--model auto`` chooses from."""
        from revela.evaluation.choose_model import KINDS

        return [kind for kind in KINDS if kind != "table" or not self.settings.keep_tokens]

    def choose(self, documents: Sequence[Document]) -> str:
        """The model of a new index: the one that is given or that a killed run has begun with; or
        the one that suits the documents, by their languages or as auto finds it.
        """
        from revela.index.state import unfinished_in

        names = named_by_auto(self.model) if self.model else None
        if self.model and names is None:
            return self.model
        if (begun := unfinished_in(self.out)) is not None:
            return begun.model
        return by_language(documents) if names is None else self.choose_by_auto(names, documents)

    def choose_by_auto(self, names: Sequence[str], documents: Sequence[Document]) -> str:
        """The best of some models; one that is made of a language model is fitted and saved."""
        from revela.evaluation.choose_model import choose_model
        from revela.fitting import FitOptions, fit

        settings, how = self.settings, {**vars(self.reading), "max_bad_share": 1.0}
        recipe = Recipe.of(language=settings.language, precision=self.precision, **how)
        given: Any = dict(kinds=self.kinds, recipe=recipe, chunk_words=settings.chunk_words)
        chosen = choose_model(documents, names, **given).candidate
        if chosen.kind == "embedder":
            return chosen.model
        static = chosen.kind == "table"
        its = recipe.replace(model=chosen.model, precision="auto" if static else self.precision)
        fit(self.corpus, self.fitted, its, FitOptions(static=static), command_line())
        print(f"{chosen} is saved in {self.fitted}, where the index finds it")
        return str(self.fitted)

    def create(self, documents: Sequence[Document], columns: Mapping[str, str]) -> Index:
        """A new index for documents, by the model that is chosen for them, with the context of one
        that reads a context.
        """
        from revela.encoder.load import keep_graph, load_encoder
        from revela.index.contexts import chosen_for
        from revela.index.index import Index
        from revela.model_files import resolve

        folder = resolve(self.choose(documents))
        keep_graph(folder)
        encoder = load_encoder(folder, self.precision, prompts=self.prompts)
        known = chosen_for(encoder, self.context, documents, self.settings.chunk_words)
        given: Any = dict(context=known, encoder=encoder, prompts=self.prompts)
        return Index.create(self.out, folder, columns, self.settings, **given)


# Each of these scans the corpus, chooses a model for it if the index is new, and writes it.


def write_by_file(job: Job) -> tuple[Index, Synced]:
    """Make an index that records its files."""
    from revela.index.follow import Scan, follow
    from revela.index.ingest import metadata_columns

    job.check_new()
    scan = Scan(job.corpus, job.reading, job.metadata)
    scan.check_report()
    print_report(scan.report)
    index = job.create(scan.documents, metadata_columns(scan.documents, job.metadata))
    with index.changes() as changes:
        return index, follow(changes, scan=scan, progress=True)[0]


def write_at_once(job: Job, append: bool) -> tuple[Index, Added]:
    """Add documents to an index, without a record of their files."""
    from revela.corpus.load import read_corpus
    from revela.index.ingest import metadata_columns

    index, fields = job.opened(append)
    kept: Any = dict(distinct=False, min_words=1, metadata=fields, rename_repeated=True)
    documents, report = read_corpus(job.corpus, job.reading, **kept)
    print_report(report)
    if index is None:
        index = job.create(documents, metadata_columns(documents, fields))
    return index, index.add(documents, progress=True)


def write_by_ray(
    job: Job, append: bool, cluster: Cluster, commit_every: int
) -> tuple[Index, Added]:
    """``write_at_once``, by a cluster."""
    from revela.index import build_on_ray

    index, fields = job.opened(append, by_ray=True)
    with on_ray.connected(cluster):
        reader = reader_of_parts(job.reading, fields, rename_repeated=True)
        survey = build_on_ray.SurveyedCorpus(job.corpus, reader)
        print_report(survey.report)
        if index is None:
            index = job.create(survey, survey.metadata_columns())
        how: Any = dict(wave=commit_every, precision=job.precision, progress=True)
        return index, build_on_ray.add(index, survey, cluster, **how)


def follow_recorded(job: Job, yes: bool) -> tuple[Index, Synced]:
    """Bring an index in step with the corpus, or with what it was made of."""
    from revela.index.follow import HALF, NONE, follow

    index, reading = job.existing(), None if job.reading == READING else job.reading
    with index.changes() as changes:
        refused = NONE if yes else HALF
        how: Any = dict(refused=refused, progress=True)
        synced, report = follow(changes, job.corpus, reading, **how)
    print_report(report)
    return index, synced


def by_language(documents: Sequence[Document]) -> str:
    """The embedder that suits the languages of documents."""
    from revela.corpus.spool import LazyTexts
    from revela.index.build_on_ray import SurveyedCorpus
    from revela.index.default_model import installed_model, suited_model

    if isinstance(documents, SurveyedCorpus):
        texts: Sequence[str] = documents.first_texts()
    else:
        texts = LazyTexts(documents, lambda document: document.full_text)
    return installed_model(*suited_model(texts))


def _delete(out: Path, ids: list[str]) -> None:
    from revela.index.index import Index

    opened = Index.open(out)
    deleted = opened.delete(ids)
    both = f"{counted(len(set(ids)), 'document')}, {counted(deleted, 'passage')}"
    print(f"deleted {both}; {out} holds {len(opened):,}")
