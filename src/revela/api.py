"""``Retriever``: a trained retriever, from loading it to searching an index that it has made."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from revela.corpus.spool import LazyTexts, arrow_list
from revela.errors import RevelaError
from revela.index.contexts import Choice, chosen_for
from revela.index.index import Index
from revela.index.ingest import metadata_columns
from revela.model_files import named_by_auto, resolve
from revela.retriever.load import load_encoder
from revela.settings import OFFLINE_MODEL, Indexing, Precision, Recipe
from revela.types import Document, Vectors

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from revela.evaluation.choose_model import Kind
    from revela.evaluation.label_free import HeldOutCheck
    from revela.groups.dataset import TrainingSet
    from revela.retriever.card import Card
    from revela.training.train import Outcome

log = logging.getLogger(__name__)
FITTED_BY = (
    *("text_field", "title_field", "join_titles", "max_bad_share", "near_duplicates", "language"),
    *("chunk_words", "held_out"),
    *("layers", "pooling", "max_tokens", "lower_case", "query_prompt", "passage_prompt"),
    *("token_weighting", "whitening", "lexical", "seed", "precision"),
)
"The settings that a fit reads, beside the model."
OF_LAYERS = (
    *("layers", "pooling", "max_tokens", "query_prompt", "passage_prompt"),
    *("token_weighting", "whitening", "lexical", "precision"),
)
"Those of them that a table of words has no use for."
TRAINABLE: tuple[Kind, ...] = ("embedder", "fit")
MAY_LOSE = 0.005  # nDCG@10 of the check, by training a table


class Retriever:
    """A retriever, loaded once for everything that it is used for.

    Args:
        model: a folder made by ``revela train``, any Sentence-Transformers folder, a hub id or
            embedded:minilm-l6.
        precision: arithmetic; "auto" is bf16 where the hardware has it.
        lm: language model that re-ranks by its heads, loaded when it is first needed.

    Examples:
        >>> from revela import Retriever
        >>> retriever = Retriever("my-retriever")
        >>> texts = ["Invoices are kept for ten years.", "The garden opens at nine."]
        >>> index = retriever.index(texts, "my-notes")
        >>> [hit.text for hit in index.search("are invoices kept for ten years", k=1)]
        ['Invoices are kept for ten years.']
        >>> retriever.open("my-notes").search("when does the garden open")[0].id
        '1'
    """

    def __init__(
        self,
        model: str | Path,
        precision: Precision = "auto",
        lm: str | Path = OFFLINE_MODEL,
    ) -> None:
        self.folder, self.lm = resolve(str(model)), str(lm)
        self.encoder = load_encoder(self.folder, precision)

    @classmethod
    def train(
        cls,
        corpus: str | Path | Sequence[str | Path],
        out: str | Path,
        preset: str = "",
        *,
        resume: bool = False,
        **settings: Any,
    ) -> Retriever:
        """Train a retriever on raw text, save it and load it.

        Args:
            corpus: folders, files or datasets of the hub (hub:owner/name), or a folder of groups.
            out: folder for the retriever, which does not exist yet.
            preset: settings to start from; empty: those of ``objective``, else "gated".
            resume: continue the run in ``out`` from its last checkpoint.
            settings: any setting by its flag's name (docs/settings.md); ``objective`` may also be
                an objective of your own (docs/objectives.md).

        Examples:
            >>> Retriever.train("docs/", "out", preset="pairs", max_minutes=5)  # doctest: +SKIP
        """
        train(_paths(corpus), Path(out), Recipe.of(preset, **settings), resume=resume)
        return cls(out)

    @classmethod
    def fit(
        cls,
        corpus: str | Path | Sequence[str | Path],
        out: str | Path,
        *,
        model: str | Path,
        prune: bool = False,
        static: bool = False,
        steps: int | None = None,
        **settings: Any,
    ) -> Retriever:
        """Make a retriever of a raw language model by a fit to text, save it and load it: minutes,
        without labels and without training.

        Args:
            corpus, out: as for ``train``.
            model: the language model: a hub id, a folder or embedded:smollm2-135m; "auto" or
                "auto:NAME,NAME" chooses one, and whether it becomes a table of words
                (``choose_model``).
            prune: leave out the tokens that the corpus has no use for.
            static: make a table of the corpus's words, without any layer.
            steps: of training its rows, or those of the lexical half; None: by the size of the
                corpus, 0: none.
            settings: those of ``revela.api.FITTED_BY``, by their flags' names (docs/settings.md).

        Examples:
            >>> Retriever.fit("docs/", "out", model="embedded:smollm2-135m")  # doctest: +SKIP
        """
        if unread := settings.keys() - set(FITTED_BY):
            raise RevelaError(
                f"a fit reads no setting {min(unread)}: give some of {', '.join(FITTED_BY)}"
            )
        recipe = Recipe.of(model=str(model), **settings)
        fit(_paths(corpus), Path(out), recipe, FitOptions(prune, static, steps))
        return cls(out, recipe.training.precision)

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Encode texts as queries: (N, D) float32 vectors of length one."""
        return self.encoder.encode_queries(texts)

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """Encode texts as passages, likewise; dot products with queries are cosines."""
        return self.encoder.encode_passages(texts)

    def index(
        self,
        documents: Iterable[str | Document],
        folder: str | Path,
        metadata: Sequence[str] = (),
        chunk_words: int = Indexing.chunk_words,
        keep_tokens: bool = Indexing.keep_tokens,
        language: str = Indexing.language,
        context: Choice | None = None,
    ) -> Index:
        """Make an index of documents in a new folder; the same call resumes a run that was killed.

        Args:
            documents: texts, which get their numbers from 0 as ids, or documents with ids and
                titles of their own. Those without a word are left out.
            folder: for the index.
            metadata: fields of the documents' ``metadata`` that searches can filter by.
            chunk_words: most words in a chunk.
            keep_tokens: keep token vectors, so that re-ranking takes milliseconds.
            language: of the texts, for BM25: "auto" finds it, "none" stems nothing, or a code such
                as "de".
            context: of a retriever that reads one: "corpus" draws it from the documents (the
                default), "saved" is the one it was trained with, "none" has no documents; or texts.

        Raises:
            RevelaError: there is nothing to index, ``folder`` holds something else, or two
                documents share an id.
        """
        numbered = (
            Document(str(i), document) if isinstance(document, str) else document
            for i, document in enumerate(documents)
        )
        rows = arrow_list(Document, (row for row in numbered if row.full_text.strip()))
        if not rows:
            raise RevelaError(
                "there is nothing to index: give texts or documents with words in them"
            )
        settings = Indexing(chunk_words=chunk_words, keep_tokens=keep_tokens, language=language)
        columns = metadata_columns(rows, metadata)
        chosen = chosen_for(self.encoder, context, rows, chunk_words)
        given: Any = dict(context=chosen, encoder=self.encoder, lm=self.lm)
        index = Index.create(folder, self.folder, columns, settings, **given)
        index.add(rows)
        return index

    def open(self, folder: str | Path) -> Index:
        """Open an index that this retriever has made, here or by ``revela index``."""
        return Index.open(folder, self.folder, encoder=self.encoder, lm=self.lm)


def _paths(corpus: str | Path | Sequence[str | Path]) -> list[Path]:
    return [Path(p) for p in ([corpus] if isinstance(corpus, str | Path) else corpus)]


@dataclass(frozen=True)
class TrainingResult:
    """What a run gave; ``scores`` is nDCG@10 of the label-free check by system, then by task."""

    outcome: Outcome
    scores: dict[str, dict[str, float]]


def train(
    corpus: Sequence[Path], out: Path, recipe: Recipe, *, resume: bool = False, command: str = ""
) -> TrainingResult:
    """Read a corpus, hold documents out, train on the others, and save a retriever; ``command`` is
    for the model card.
    """
    from revela.distributed import from_rank_zero, is_rank_zero, joined
    from revela.evaluation.choose_model import candidates_of, choose_model
    from revela.groups.dataset import TrainingSet
    from revela.training.record import model_of_run
    from revela.training.train import train as run
    from revela.training.validate import check_recipe

    with joined():
        check_recipe(recipe, out, resume)  # before a language model writes questions
        names = named_by_auto(recipe.retriever.model)
        if names is not None and resume:
            recipe, names = recipe.replace(model=model_of_run(out)), None
        if names is not None:
            candidates_of(names, TRAINABLE)
        if is_rank_zero():
            data, check = read_training_set(recipe, corpus)
            given: dict[str, Any] = dict(check=check if check.tasks else None, bm25=check.bm25())
        else:
            data, given = TrainingSet.read(recipe, corpus), {}
        given |= dict(corpus=", ".join(map(str, corpus)), command=command)
        if names is not None:
            how: dict[str, Any] = dict(kinds=TRAINABLE, recipe=recipe)
            chosen = from_rank_zero(
                lambda: choose_model(data.documents, names, **how).candidate.model
            )
            recipe = recipe.replace(model=chosen)
        outcome = run(recipe, data, out, resume=resume, **given)
        bm25 = from_rank_zero(lambda: given["bm25"])
    systems = {
        "BM25": bm25,
        "untrained": outcome.untrained,
        "before training": outcome.before,
        "trained": outcome.after,
    }
    return TrainingResult(outcome, systems if outcome.after else {})


@dataclass(frozen=True)
class FitOptions:
    """What a fit makes of a language model."""

    prune: bool = False
    "Leave out the tokens that the corpus has no use for."
    static: bool = False
    "Make a table of the corpus's words, without any layer."
    steps: int | None = None
    "Steps of training its rows, or those of the lexical half. None: by the corpus's size."


FIT_OPTIONS = FitOptions()


@dataclass(frozen=True)
class FitResult:
    """What a fit gave: ``scores`` is nDCG@10 of the label-free check by system, then by task, and
    ``kept`` the system that is saved.
    """

    scores: dict[str, dict[str, float]]
    minutes: float
    kept: str


def fit(
    corpus: Sequence[Path],
    out: Path,
    recipe: Recipe,
    options: FitOptions = FIT_OPTIONS,
    command: str = "",
) -> FitResult:
    """Read a corpus, hold documents out, fit a raw language model to the others, and save it;
    ``command`` is for the model card.
    """
    from revela.distributed import check_single_process
    from revela.evaluation.choose_model import candidates_of, choose_model
    from revela.evaluation.label_free import check_by
    from revela.files import atomic_write
    from revela.groups.dataset import TrainingSet
    from revela.index.language import check_language
    from revela.retriever.fit import WORDS_TO_VECTORS
    from revela.retriever.save import save_retriever
    from revela.silence import silence_libraries

    _check_options(recipe, options)
    static, steps = options.static, options.steps
    names, forms = named_by_auto(recipe.retriever.model), _forms(recipe, options)
    if out.exists():
        raise RevelaError(f"{out} exists: choose another --out")
    check_single_process()
    check_language(recipe.corpus.language)
    if names is None:
        folder = _language_model(recipe.retriever.model)
    else:
        candidates_of(names, forms)
    silence_libraries()
    data = TrainingSet.read(recipe, corpus)
    if not static and len(data.chunks) < 2:  # a table is made of longer windows
        raise RevelaError("a fit takes two chunks of text or more: give more text")
    if names is not None:
        chosen = choose_model(data.documents, names, kinds=forms, recipe=recipe).candidate
        recipe, static = recipe.replace(model=chosen.model), chosen.kind == "table"
        data, folder = data.replace(recipe), resolve(chosen.model)
    check = check_by(data.held_out, recipe)
    asked = check.describe() or "too few for a task, so the fit is not checked"
    log.info(f"held out {len(data.held_out):,} documents for the label-free check ({asked})")
    if static:
        model, result = _fit_table(folder, data, check, steps)
    else:
        model, result = _fit_layers(folder, data, check, options)
    about: dict[str, Any] = dict(name=out.name, corpus=", ".join(map(str, corpus)), command=command)
    card = _card(data, result, static, steps, about)
    with atomic_write(out) as temporary:
        save_retriever(model, temporary, card.text(), words_to_vectors=WORDS_TO_VECTORS)
    return result


def _card(
    data: TrainingSet, result: FitResult, static: bool, steps: int | None, known: dict[str, Any]
) -> Card:
    """The model card of a fit."""
    from revela.retriever.card import Card

    unread = OF_LAYERS if static else ()
    recipe = data.recipe
    flat = recipe.to_dict()
    trained = ", trained to find the rest of a text by some of its words"
    if static:
        about = "a row for each word, begun as the mean of the input embeddings of its pieces"
        about += trained * (result.kept == "trained")
    else:
        about = "the weights of tokens, whitening"
        if recipe.fit.lexical:
            about += f", and a half of the vector for words{trained * (steps != 0)}"
    return Card(
        learned_from=f"{{model}} was fitted to text: {about}.",
        documents=data.n_documents,
        settings={name: flat[name] for name in ("model", *FITTED_BY) if name not in unread},
        scores=result.scores,
        minutes=result.minutes,
        **known,
    )


def _fit_layers(
    folder: Path, data: TrainingSet, check: HeldOutCheck, options: FitOptions
) -> tuple[SentenceTransformer, FitResult]:
    """The lower layers of a language model, fitted to the chunks, with a trained lexical half."""
    from revela.device import compute_device, return_freed, uses_bf16
    from revela.retriever.build import untrained_retriever
    from revela.retriever.encode import RetrieverEncoder
    from revela.retriever.fit import WORDS_TO_VECTORS, fit_to_corpus
    from revela.retriever.prune import prune as drop_unused_tokens
    from revela.training.train_table import row_trainer

    recipe, scores = data.recipe, dict[str, dict[str, float]]()
    model = untrained_retriever(recipe, folder, data.documents).to(compute_device())
    bf16 = uses_bf16(recipe.training.precision, model.device)
    encoder = RetrieverEncoder(model, bf16)
    if check.tasks:
        scores = {"BM25": check.bm25(), "untrained": check(encoder)}
    begun = time.monotonic()
    if options.prune:
        held_out = (document.full_text for document in data.held_out)
        drop_unused_tokens(model, chain((chunk.text for chunk in data.chunks), held_out))
    trainer = row_trainer(model, data.documents, steps=options.steps, seed=recipe.training.seed)
    texts, seed = LazyTexts(data.chunks, lambda chunk: chunk.text), recipe.training.seed
    fit_to_corpus(model, texts, recipe.fit, seed=seed, bf16=bf16, train_rows=trainer)
    return_freed(model.device)  # what it gave is in the model now
    encoder.words_to_vectors = WORDS_TO_VECTORS
    minutes = (time.monotonic() - begun) / 60
    if check.tasks:
        scores["fitted"] = check(encoder)
    return model, FitResult(scores, minutes, "fitted")


def _fit_table(
    folder: Path, data: TrainingSet, check: HeldOutCheck, steps: int | None
) -> tuple[SentenceTransformer, FitResult]:
    """A table of the words of all documents, trained on those that are not held out, unless the
    check finds it worse than it began.
    """
    from revela.training import train_table as training

    recipe, scores = data.recipe, dict[str, dict[str, float]]()
    begun = time.monotonic()
    how: Any = dict(language=recipe.corpus.language, steps=steps, seed=recipe.training.seed)
    fitted, trained = training.tables(folder, data.documents, data.held_out, **how)
    minutes = (time.monotonic() - begun) / 60
    tables, kept = {"fitted": fitted}, "fitted"
    if trained is not fitted:
        tables["trained"], kept = trained, "trained"
    if check.tasks:
        scores = {"BM25": check.bm25()}
        scores |= {name: check(table.encoder()) for name, table in tables.items()}
        means = {name: fmean(scores[name].values()) for name in tables}
        if means[kept] < means["fitted"] - MAY_LOSE:
            kept = "fitted"
    return tables[kept].model(), FitResult(scores, minutes, kept)


def _check_options(recipe: Recipe, options: FitOptions) -> None:
    """Refuse settings that the kind of retriever that is asked for does not read."""
    static, steps = options.static, options.steps
    if steps and not static and not recipe.fit.lexical:
        raise RevelaError("--steps trains the lexical half: leave --lexical 0 out, or --steps")
    if steps is not None and steps < 0:
        raise RevelaError(f"--steps {steps}: give 0, which does not train, or more")
    others = _about_layers(recipe)
    if static and (options.prune or others):
        flag = "--prune" if options.prune else f"--{others[0].replace('_', '-')}"
        raise RevelaError(
            f"{flag} is about the layers of a model, of which --static keeps none: "
            "leave one of them out"
        )


def _about_layers(recipe: Recipe) -> list[str]:
    """The settings of layers that are not as by default."""
    given, default = recipe.to_dict(), Recipe().to_dict()
    return [name for name in OF_LAYERS if given[name] != default[name]]


def _forms(recipe: Recipe, options: FitOptions) -> Sequence[Kind]:
    """What may be made of a language model that is to be chosen, by the settings that are given."""
    if options.static:
        return ("table",)
    if options.prune or set(_about_layers(recipe)) - {"precision"}:
        return ("fit",)
    return ("table", "fit")


def _language_model(name: str) -> Path:
    """The folder of the model to fit."""
    folder = resolve(name)
    if (folder / "modules.json").is_file():
        raise RevelaError(
            f"{name} is an embedder, which a fit would harm: give a raw language model as --model, "
            "or search with this one as it is"
        )
    return folder


def read_training_set(recipe: Recipe, corpus: Sequence[Path]) -> tuple[TrainingSet, HeldOutCheck]:
    """What is trained on, and the label-free check by what is held out; logs both."""
    from revela.evaluation.label_free import MIN_QUERIES, check_by
    from revela.groups.dataset import TrainingSet
    from revela.queries.generated import generate_answers
    from revela.silence import silence_libraries

    silence_libraries()
    data = TrainingSet.read(recipe, corpus)
    path = data.queries_file
    assert path is not None
    ask = partial(generate_answers, recipe, path=path, of="held-out chunks")
    check = check_by(data.held_out, recipe, ask)
    questions = recipe.training.check_questions
    if questions and all(task.name != "question" for task in check.tasks):
        log.info(
            f"fewer than {MIN_QUERIES} questions about held-out chunks were kept: "
            "the label-free check asks none"
        )
    log.info(_about_check(recipe, check, len(data.held_out)))
    return data, check


def _about_check(recipe: Recipe, check: HeldOutCheck, held_out: int) -> str:
    """What the label-free check asks, or why it asks nothing."""
    if not held_out and not recipe.corpus.held_out:
        return "no documents held out, so no label-free check: the last state is saved"
    unguarded = "too few for a task, so the last state is saved unchecked"
    if not recipe.training.check_questions:
        unguarded += ": --check-questions 100 has a language model write questions about them"
    asked = check.describe() or unguarded
    return f"held out {held_out:,} documents for the label-free check ({asked})"
