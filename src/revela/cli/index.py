"""``revela index``: make an index, add to it, delete from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from revela.cli.main import app
from revela.cli.printing import command_line, print_report
from revela.corpus.load import READING, Reading
from revela.encoder.prompts import Given as GivenPrompts
from revela.errors import RevelaError
from revela.model_files import named_by_auto
from revela.settings import Indexing, Precision, Recipe

if TYPE_CHECKING:
    from revela.index.follow import Synced
    from revela.index.index import Index
    from revela.index.ingest import Added
    from revela.types import Document

INDEXING, COMMIT_EVERY = Indexing(), 10**6
Choose = Callable[[Sequence["Document"]], str]
"Chooses a model for documents."


@app.command
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
    """Index a corpus for search; add to an index, or delete documents from it. The same command
    resumes a run that was killed.

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
        Make the index, or bring it in step with the corpus: new and changed documents are added,
        those that are gone are deleted. Without a corpus, with that of the last time.
    yes:
        With --sync, delete documents even if the corpus has lost half of them, or more.
    metadata:
        Fields or columns to keep with each document, for filters of revela search --where.
    context:
        What a retriever trained with --context reads before every text: documents drawn from the
        corpus (the default), the saved ones of its training, none, or a file with a text per line.
    precision:
        Arithmetic; auto is int8, bf16 or fp32, whichever this processor or GPU is fast in.
    commit_every:
        Chunks per commit of --engine ray, which are encoded again after a kill.
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
    from revela.index.state import is_index

    check_language(settings.language)
    _check_sync(sync, yes, append, engine)
    if not corpus and not (sync and is_index(out)):
        raise RevelaError("give a corpus to index, or ids of documents to --delete")
    made: Any = dict(metadata=metadata or [], context=context, settings=settings, reading=reading)
    made |= dict(prompts=prompts.given, precision=precision, engine=engine)
    job = Job(corpus or [], out, model, **made)
    if sync:
        opened, synced = job.sync(yes)
        added, counted = synced.added, synced.describe()
    else:
        opened, added = job.run(append, commit_every)
        counted = added.describe()
    print(f"language {opened.info.language}; {opened.calibration.describe()}")
    if opened.info.prompts and any(opened.info.prompts):
        print(opened.info.prompts.describe())
    print(f"{counted}; {out} holds {len(opened):,} passages")
    if added.cut:
        were = "chunk was" if added.cut == 1 else "chunks were"
        print(f"{added.cut:,} {were} longer than the model reads, and cut by its tokenizer")


def _check_sync(sync: bool, yes: bool, append: bool, engine: Engine) -> None:
    if yes and not sync:
        raise RevelaError("--yes lets --sync delete documents: give both, or leave it out")
    if sync and append:
        raise RevelaError("--sync adds and deletes what it has to: leave --append out")
    if sync and engine != ENGINE:
        raise RevelaError("--sync reads in this process: leave --engine and its options out")


@dataclass(frozen=True)
class Job:
    """What the command line asks for."""

    corpus: list[Path]
    out: Path
    model: str | None
    metadata: list[str]
    context: str | None
    prompts: GivenPrompts
    settings: Indexing
    reading: Reading
    precision: Precision
    engine: Engine

    def run(self, append: bool, commit_every: int) -> tuple[Index, Added]:
        """Add the corpus to an index, or to a new one."""
        opened = self.existing() if append else None
        choose = self.chooser() if opened is None else None
        if self.engine.engine == "ray":
            with on_ray.connected(self.engine.cluster):
                return self.add_by_ray(opened, choose, commit_every)
        if choose is not None and not self.reading.join_titles:
            opened, made = self.make(choose)
            return opened, made.added
        from revela.corpus.load import read_corpus
        from revela.index.ingest import metadata_columns

        fields = self.metadata if opened is None else list(opened.info.columns)
        kept: Any = dict(distinct=False, min_words=1, metadata=fields)
        documents, report = read_corpus(self.corpus, self.reading, **kept)
        print_report(report)
        if choose is not None:
            opened = self.create(choose, documents, metadata_columns(documents, fields))
        assert opened is not None
        return opened, opened.add(documents, progress=True)

    def make(self, choose: Choose) -> tuple[Index, Synced]:
        """A new index, which knows its sources."""
        from revela.index.folder_index import make
        from revela.index.follow import Scan
        from revela.index.ingest import metadata_columns

        scan = Scan(self.corpus, self.reading, self.metadata)

        def create(documents: Sequence[Document]) -> Index:
            print_report(scan.report)
            return self.create(choose, documents, metadata_columns(documents, self.metadata))

        return make(scan, create, progress=True)

    def sync(self, yes: bool) -> tuple[Index, Synced]:
        """Bring an index in step with the corpus, or make it."""
        from revela.index.follow import follow
        from revela.index.state import is_finished

        if not is_finished(self.out):
            return self.make(self.chooser())
        opened, reading = self.existing(), None if self.reading == READING else self.reading
        with opened.changes() as changes:
            synced, report = follow(changes, self.corpus, reading, yes=yes, progress=True)
        print_report(report)
        return opened, synced

    def add_by_ray(
        self, opened: Index | None, choose: Choose | None, commit_every: int
    ) -> tuple[Index, Added]:
        """``run``, by a cluster."""
        from revela.index import build_on_ray

        reader = reader_of_parts(
            self.reading, list(opened.info.columns) if opened else self.metadata
        )
        documents = build_on_ray.SurveyedCorpus(self.corpus, reader)
        print_report(documents.report)
        if choose is not None:
            opened = self.create(choose, documents, documents.metadata_columns())
        assert opened is not None
        kept: Any = dict(wave=commit_every, precision=self.precision, progress=True)
        return opened, build_on_ray.add(opened, documents, self.engine.cluster, **kept)

    def existing(self) -> Index:
        """The index to append to.

        Raises:
            RevelaError: it was made otherwise than the flags say.
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

    def chooser(self) -> Choose:
        """What names the model of a new index: the one that is given or that a killed run has
        begun with; or the one that suits the documents, by their languages or as auto finds it.

        Raises:
            RevelaError: the folder is taken, or no model can be named.
        """
        from revela.index.contexts import Context
        from revela.index.state import unfinished_in

        if self.context is not None:
            Context.of(self.context)  # refuses a file that is none
        begun = unfinished_in(self.out)  # refuses a folder that is taken
        names = named_by_auto(self.model) if self.model else None
        if self.model and names is None:
            model = self.model
        elif begun is not None:
            model = begun.model
        else:
            return by_language if names is None else self.chooser_of(names)
        return lambda _: model

    def chooser_of(self, names: Sequence[str]) -> Choose:
        """What chooses a model, and fits it where it is a language model."""
        from revela.evaluation.choose_model import KINDS, candidates_of, choose_model
        from revela.fitting import FitOptions, fit

        if self.engine.engine == "ray":
            raise RevelaError(
                "--model auto reads the text in this process: leave --engine out, or choose by "
                "revela fit TEXT --model auto --out RETRIEVER"
            )
        folder = self.out.with_name(f"{self.out.name}-model")
        if folder.exists():
            raise RevelaError(
                f"{folder} exists, where a fitted model would go: give it as --model, or remove it"
            )
        settings, reading = self.settings, self.reading
        kinds = [kind for kind in KINDS if kind != "table" or not settings.keep_tokens]
        candidates_of(names, kinds)
        how: Any = dict(language=settings.language, precision=self.precision, max_bad_share=1.0)
        recipe = Recipe.of(**how, **vars(reading))
        how = dict(kinds=kinds, recipe=recipe, chunk_words=settings.chunk_words)

        def choose(documents: Sequence[Document]) -> str:
            chosen = choose_model(documents, names, **how).candidate
            if chosen.kind == "embedder":
                return chosen.model
            static = chosen.kind == "table"
            its = recipe.replace(model=chosen.model, precision="auto" if static else self.precision)
            fit(self.corpus, folder, its, FitOptions(static=static), command_line())
            print(f"{chosen} is saved in {folder}, where the index finds it")
            return str(folder)

        return choose

    def create(
        self, choose: Choose, documents: Sequence[Document], columns: Mapping[str, str]
    ) -> Index:
        """A new index, with the context of a model that reads one."""
        from revela.index.contexts import chosen_for
        from revela.index.index import Index
        from revela.model_files import resolve
        from revela.retriever.load import keep_graph, load_encoder

        folder = resolve(choose(documents))
        keep_graph(folder)
        encoder = load_encoder(folder, self.precision, prompts=self.prompts)
        known = chosen_for(encoder, self.context, documents, self.settings.chunk_words)
        given: Any = dict(context=known, encoder=encoder, prompts=self.prompts)
        return Index.create(self.out, folder, columns, self.settings, **given)


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
    print(f"deleted {len(set(ids)):,} documents, {deleted:,} passages; {out} holds {len(opened):,}")
