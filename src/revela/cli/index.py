"""``revela index``: make an index, add to it, delete from it."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from revela import on_ray
from revela.cli.flags import ENGINE, Engine, Flat, Out, Several, reader_of_parts
from revela.cli.main import app
from revela.cli.printing import print_report
from revela.corpus.reading import READING, Reading
from revela.errors import RevelaError
from revela.on_ray import Cluster
from revela.retriever.static import is_static
from revela.settings import Indexing, Precision, Recipe
from revela.weights import named_by_auto

if TYPE_CHECKING:
    from revela.index.encode_corpus import Added
    from revela.index.store import Index
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
    metadata: Annotated[list[str] | None, Several] = None,
    context: str | None = None,
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
        The retriever: a Sentence-Transformers folder, a hub id or embedded:minilm-l6. With
        --append, by default the one that made the index. auto: the one that suits the text, as it
        is found without labels, of the installed ones and of those that auto:NAME,NAME names;
        what is made of a language model is saved beside the index, in OUT-model.
    append:
        Add to the index; documents whose id is there already are replaced.
    delete:
        Ids of documents to delete.
    metadata:
        Fields or columns to keep with each document, for filters of revela search --where.
    context:
        What a retriever trained with --context reads before every text: documents drawn from the
        corpus (the default), the saved ones of its training, none, or a file with a text per line.
    precision:
        Arithmetic; auto is bf16 where the hardware has it.
    commit_every:
        Chunks per commit of --engine ray, which are encoded again after a kill.
    """
    if delete:
        others = (append, model, metadata, context, settings, reading, precision, engine)
        defaults = (False, None, None, None, INDEXING, READING, "auto", ENGINE)
        if corpus or others != defaults or commit_every != COMMIT_EVERY:
            raise RevelaError(
                "--delete takes ids and no corpus or option but --out: first delete, then add with "
                "--append"
            )
        _delete(out, delete)
        return
    from revela.index.language import check_language

    check_language(settings.language)
    if not corpus:
        raise RevelaError("give a corpus to index, or ids of documents to --delete")
    opened = _existing(out, append, model, settings, metadata or (), context, precision)
    fields = metadata or () if opened is None else list(opened.info.columns)
    made: Any = dict(settings=settings, context=context, precision=precision)
    using: str | Choose = str(model)
    if opened is None and (names := named_by_auto(str(model))) is not None:
        using = _by_auto(names, corpus, out, settings, reading, precision, engine)
    create = functools.partial(_create, out, using, **made)
    if engine.engine == "ray":
        opened, added = _by_ray(
            corpus, reading, fields, opened, create, engine.cluster, commit_every, precision
        )
    else:
        opened, added = _here(corpus, reading, fields, opened, create)
    if opened.info.language is not None:
        print(f"language {opened.info.language}; {opened.calibration.describe()}")
    print(
        f"{added.new:,} documents are new, {added.replaced:,} replaced, "
        f"{added.unchanged:,} unchanged; {out} holds {len(opened):,} passages"
    )
    if added.cut:
        were = "chunk was" if added.cut == 1 else "chunks were"
        print(f"{added.cut:,} {were} longer than the model reads, and cut by its tokenizer")
    if added.chunks and engine.engine == "local":
        _keep_copy(opened)


def _keep_copy(opened: Index) -> None:
    """Let ``revela search`` read this retriever without torch."""
    if opened.context is None and not is_static(opened.model_folder):
        from revela.retriever.onnx import keep_copy

        keep_copy(opened.encoder, opened.info.fingerprint)


def _here(
    corpus: list[Path],
    reading: Reading,
    fields: Sequence[str],
    opened: Index | None,
    create: Callable[..., Index],
) -> tuple[Index, Added]:
    """Add a corpus to an index, or to a new one that ``create`` makes."""
    from revela.corpus.read import read_corpus
    from revela.index.encode_corpus import metadata_columns

    kept: Any = dict(distinct=False, min_words=1, metadata=fields)
    documents, report = read_corpus(corpus, reading, **kept)
    print_report(report)
    if opened is None:
        opened = create(documents=documents, columns=metadata_columns(documents, fields))
    return opened, opened.add(documents, progress=True)


def _by_ray(
    corpus: list[Path],
    reading: Reading,
    fields: Sequence[str],
    opened: Index | None,
    create: Callable[..., Index],
    cluster: Cluster,
    commit_every: int,
    precision: Precision,
) -> tuple[Index, Added]:
    """``_here``, by a cluster."""
    from revela.index import build_on_ray

    reader = reader_of_parts(reading, fields)
    with on_ray.connected(cluster):
        documents = build_on_ray.SurveyedCorpus(corpus, reader, reading.max_bad_share)
        print_report(documents.report)
        if opened is None:
            opened = create(documents=documents, columns=documents.metadata_columns())
        kept: Any = dict(wave=commit_every, precision=precision, progress=True)
        return opened, build_on_ray.add(opened, documents, cluster, **kept)


def _by_auto(
    names: Sequence[str],
    corpus: list[Path],
    out: Path,
    settings: Indexing,
    reading: Reading,
    precision: Precision,
    engine: Engine,
) -> str | Choose:
    """What chooses a model, and fits it where it is a language model; or the model that a killed
    run has chosen.

    Raises:
        RevelaError: no model is at hand, or the place of a fitted one is taken.
    """
    from revela.api import fit
    from revela.evaluation.choosing import KINDS, candidates_of, choose_model
    from revela.index.manifest import unfinished_in

    if begun := unfinished_in(out):
        return begun.model
    if engine.engine == "ray":
        raise RevelaError(
            "--model auto reads the text in this process: leave --engine out, or choose by "
            "revela fit TEXT --model auto --out RETRIEVER"
        )
    folder = out.with_name(f"{out.name}-model")
    if folder.exists():
        raise RevelaError(
            f"{folder} exists, where a fitted model would go: give it as --model, or remove it"
        )
    kinds = [kind for kind in KINDS if kind != "table" or not settings.keep_tokens]
    candidates_of(names, kinds)
    recipe = Recipe.of(language=settings.language, precision=precision, **vars(reading))
    how: Any = dict(kinds=kinds, recipe=recipe, chunk_words=settings.chunk_words)

    def choose(documents: Sequence[Document]) -> str:
        chosen = choose_model(documents, names, **how).candidate
        if chosen.kind == "embedder":
            return chosen.model
        static = chosen.kind == "table"
        its = recipe.but(model=chosen.model, precision="auto" if static else precision)
        fit(corpus, folder, its, static=static, command="revela " + shlex.join(sys.argv[1:]))
        print(f"{chosen} is saved in {folder}, where the index finds it")
        return str(folder)

    return choose


def _create(
    out: Path,
    using: str | Choose,
    documents: Sequence[Document],
    columns: Mapping[str, str],
    settings: Indexing,
    context: str | None,
    precision: Precision,
) -> Index:
    """A new index whose context, of a model that reads one, is chosen or drawn from documents."""
    from revela.index.contexts import chosen_for
    from revela.index.store import Index
    from revela.retriever.load import load_encoder
    from revela.weights import resolve

    model = using if isinstance(using, str) else using(documents)
    encoder = load_encoder(resolve(model), precision)
    known = chosen_for(encoder, context, documents, settings.chunk_words)
    return Index.create(out, model, columns, settings, context=known, encoder=encoder)


def _existing(
    out: Path,
    append: bool,
    model: str | None,
    settings: Indexing,
    metadata: Sequence[str],
    context: str | None,
    precision: Precision,
) -> Index | None:
    """The index to append to; None if a new one is asked for and ``out`` is free for it.

    Raises:
        RevelaError: the folder or the flags do not allow what is asked for.
    """
    from revela.index.contexts import Context
    from revela.index.manifest import unfinished_in
    from revela.index.store import Index

    chosen = None if context is None else Context.of(context)  # refuses a file that is none
    if not append:
        unfinished_in(out)  # refuses a folder that is taken
        if model is None:
            raise RevelaError("give the retriever that makes the vectors as --model")
        return None
    opened = Index.open(out, model, precision=precision)
    other_columns = metadata and set(metadata) != set(opened.info.columns)
    other_context = chosen is not None and not chosen.is_of(opened.info.context)
    if settings not in (INDEXING, opened.info.settings) or other_columns or other_context:
        raise RevelaError(
            f"{out} was made with other settings, metadata or context: omit those flags, or make a "
            "new index"
        )
    return opened


def _delete(out: Path, ids: list[str]) -> None:
    from revela.index.store import Index

    opened = Index.open(out)
    deleted = opened.delete(ids)
    print(f"deleted {len(set(ids)):,} documents, {deleted:,} passages; {out} holds {len(opened):,}")
