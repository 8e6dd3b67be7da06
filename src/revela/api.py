"""The library's main functions: ``Retriever`` (fit or load a retriever, encode, make and open
indexes), ``train``, ``compare`` and ``evaluate``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela.encoders.load import load_encoder, resolve
from revela.encoders.prompts import OWN, GivenPrompts, prompts_of
from revela.errors import RevelaError, extra
from revela.evaluation import evaluate as evaluation
from revela.evaluation.evaluate import EvalOptions, Evaluation
from revela.evaluation.results import SystemScores
from revela.searching.index import Index
from revela.searching.manifest import Indexing
from revela.searching.rows import metadata_columns
from revela.searching.state import is_index
from revela.terminal import show_log
from revela.text.load import Reading
from revela.text.readers import sources_of, write_source
from revela.text.spool import arrow_list
from revela.types import Document, Precision, Vectors, items_of

if TYPE_CHECKING:
    from revela.training.compare import Comparison
    from revela.training.methods.base import Method
    from revela.training.outcome import TrainingResult


class Retriever:
    """A loaded retriever: encodes texts, makes and opens indexes.

    Args:
        model: a folder made by ``revela train``, any Sentence-Transformers folder, a hub id or
            embedded:minilm-l6.
        precision: arithmetic; "auto" is the fastest of int8, bf16 and fp32 on this hardware.
        prompts: prefixes of queries and of passages; None keeps the model's own.

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
        self, model: str | Path, precision: Precision = "auto", prompts: GivenPrompts = OWN
    ) -> None:
        self.folder = resolve(str(model))
        self.prompts = prompts_of(self.folder, prompts)
        self.encoder = load_encoder(self.folder, precision, prompts=self.prompts)

    @classmethod
    @show_log()
    def fit(
        cls,
        corpus: str | Path | Iterable[Any],
        out: str | Path,
        *,
        model: str | Path,
        static: bool = False,
        steps: int | None = None,
        **settings: Any,
    ) -> Retriever:
        """Fit a raw language model to text, save it as a retriever and load it. Takes minutes, and
        no labels.

        Args:
            corpus, out: as for ``train``.
            model: the language model: a hub id, a folder or embedded:smollm2-135m.
            static: make a table of word vectors, without layers.
            steps: training steps of the table, or of the lexical half; None: by the size of the
                corpus; 0: none.
            settings: any of ``fit.FITTED_BY``, by its flag's name (docs/command-line.md).

        Examples:
            >>> Retriever.fit("docs/", "out", model="embedded:smollm2-135m")  # doctest: +SKIP
        """
        with extra("train", "a fit"):
            from revela.training.fit import FITTED_BY, fit
            from revela.training.recipe import Recipe
        if unread := settings.keys() - set(FITTED_BY):
            raise RevelaError(f"a fit does not take {min(unread)}: it takes {', '.join(FITTED_BY)}")
        recipe = Recipe.of(model=str(model), **settings)
        fit(sources_of(corpus), Path(out), recipe, static=static, steps=steps)
        return cls(out, recipe.training.precision)

    def encode_queries(self, texts: Iterable[str]) -> Vectors:
        """Encode texts as queries: (N, D) float32 vectors of length one, in the order of the texts.

        Raises:
            RevelaError: a text is not a string, or a vector is not finite.
        """
        return self.encoder.encode_queries(list(items_of(texts, "texts")))

    def encode_passages(self, texts: Iterable[str]) -> Vectors:
        """Encode texts as passages. Dot products of queries and passages are cosines."""
        return self.encoder.encode_passages(list(items_of(texts, "texts")))

    def index(
        self,
        documents: Iterable[str | Document],
        folder: str | Path,
        metadata: Sequence[str] = (),
        chunk_words: int = Indexing.chunk_words,
        keep_tokens: bool = Indexing.keep_tokens,
        language: str = Indexing.language,
    ) -> Index:
        """Make an index of documents in a new folder. If it is killed, the same call resumes it.

        Args:
            documents: texts, whose ids are numbers from 0, or ``Document``s. Empty ones are left
                out.
            folder: the index's folder.
            metadata: fields of the documents' ``metadata`` that searches can filter by.
            chunk_words: maximum words per chunk.
            keep_tokens: keep token vectors, so that re-ranking takes milliseconds.
            language: language of the texts, for BM25: "auto", "none" (no stemming), or a code such
                as "de".

        Raises:
            RevelaError: there is nothing to index, ``folder`` holds something else, or two
                documents share an id.
        """
        metadata = list(items_of(metadata, "metadata"))
        numbered = (
            Document(str(i), document) if isinstance(document, str) else document
            for i, document in enumerate(items_of(documents, "documents", (str, Document)))
        )
        rows = arrow_list(Document, (row for row in numbered if row.full_text.strip()))
        if not rows:
            raise RevelaError("nothing to index: give texts or documents with words in them")
        settings = Indexing(chunk_words=chunk_words, keep_tokens=keep_tokens, language=language)
        columns = metadata_columns(rows, metadata)
        index = Index.create(
            folder, self.folder, columns, settings, encoder=self.encoder, prompts=self.prompts
        )
        index.add(rows)
        return index

    def open(self, folder: str | Path) -> Index:
        """Open an index that was made with this retriever, here or by ``revela index``."""
        return Index.open(folder, self.folder, encoder=self.encoder, prompts=self.prompts)


@show_log()
def train(
    corpus: str | Path | Iterable[Any],
    out: str | Path,
    method: str | Method = "revela-gated",
    *,
    resume: bool = False,
    overwrite: bool = False,
    **settings: Any,
) -> TrainingResult:
    """Train a retriever on raw text and save it. Messages are printed, unless the program has set
    up ``logging``, which then gets them.

    Args:
        corpus: a path (a folder, a file, a folder of groups) or a dataset of the hub
            (hub:owner/name), as a string or Path; or a list of texts, ``Document``s and Paths, in
            which a string is a text; or a ``datasets.Dataset``, with the columns that
            ``text_field`` and ``title_field`` name and, if it has one, a column id. Copies and
            near-duplicates are dropped, and documents are held out for the check.
        out: a folder for the retriever.
        method: a preset or a method by name, FILE.py:Class, or an instance of a method of your own
            (docs/write-a-method.md).
        resume: continue the run in ``out``, if there is one, from its last checkpoint, on the same
            corpus; or extend a finished run to a higher limit.
        overwrite: replace the run in ``out``.
        settings: any setting by its flag's name (docs/command-line.md).

    Returns:
        A report, the scores and the curve. ``Retriever(result.path)`` opens the retriever.

    Examples:
        >>> result = train("docs/", "my-retriever", "replug", max_minutes=5)  # doctest: +SKIP
        >>> print(result)  # doctest: +SKIP
    """
    with extra("train", "training"):
        from revela.training.on_files import train_on_files
        from revela.training.recipe import Recipe
    recipe = Recipe.of(method, **settings)
    sources = sources_of(corpus)
    return train_on_files(sources, Path(out), recipe, resume=resume, overwrite=overwrite)


def compare(
    corpus: str | Path | Iterable[Any],
    on: Sequence[str | Path],
    out: str | Path,
    methods: Sequence[str] = (),
    *,
    seeds: Sequence[int] = (0,),
    points: int = 4,
    processes: int = 0,
    **settings: Any,
) -> Comparison:
    """Train several methods from the same start for the same time, as `revela compare` does: each
    run is a command of its own, and finished ones are kept.

    Args:
        corpus: as for ``train``; texts and datasets are written to corpus.jsonl in ``out``.
        on: folders with judged queries, as for ``evaluate``.
        out: folder for the runs, their scores and compare.json.
        methods: presets, methods by name, or FILE.py:Class of your own; empty: revela-gated and
            contrastive-crop.
        seeds: each method is trained with each of them.
        points: number of scores after the start.
        processes: processes per run, by torchrun; 0: one for each GPU.
        settings: any setting by its flag's name, for all runs.

    Returns:
        The scores of BM25, the start and each method on each collection, the difference of each
        pair with its interval and p, and the curves.

    Examples:
        >>> compare("docs/", ["judged"], "runs", max_minutes=5)  # doctest: +SKIP
    """
    with extra("train", "a comparison"):
        from revela.training import commands
        from revela.training import compare as comparison
    rows = comparison.rows_of([*items_of(methods, "methods", (str,))], {}, {}, settings)
    named = {n: settings[n] for n in ("text_field", "title_field") if n in settings}
    file, fields = Path(out) / "corpus.jsonl", Reading(**named).fields()
    sources = [
        str(s if isinstance(s, Path) else write_source(s, fields, file)) for s in sources_of(corpus)
    ]
    folders = [*map(Path, items_of(on, "on", (str, Path)))]
    made = comparison.compare(
        rows,
        sources,
        folders,
        Path(out),
        seeds=seeds,
        points=points,
        processes=processes or commands.processes_here(),
    )
    assert made is not None
    return made


def evaluate(
    models: Sequence[str | Path], on: Sequence[str | Path], **options: Any
) -> dict[str, dict[str, SystemScores]]:
    r"""Score retrievers on judged collections, with BM25 and their fusion.

    Args:
        models: Sentence-Transformers folders, hub ids or embedded:minilm-l6; indexes, which are
            searched as they are; or TREC run files. With none, only BM25 is scored.
        on: folders in BEIR layout: corpus.jsonl, queries.jsonl (each may be .gz), qrels/test.tsv.
        options: fields of ``EvalOptions``, such as ``rerank="late-interaction"``.

    Returns:
        {collection: {system: scores}}. Systems are "BM25", each model, "MODEL + BM25" (fused by
        score) and "MODEL + BM25 (RRF)". p values are against BM25, and against the first of several
        models.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp(), "sea")
        >>> (folder / "qrels").mkdir(parents=True)
        >>> rows = '{"_id": "a", "text": "The sea is salt."}\n{"_id": "b", "text": "A hill."}\n'
        >>> _ = (folder / "corpus.jsonl").write_text(rows)
        >>> _ = (folder / "queries.jsonl").write_text('{"_id": "q", "text": "ocean water"}\n')
        >>> _ = (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")
        >>> scores = evaluate(["embedded:minilm-l6"], [folder])
        >>> scores["sea"]["embedded:minilm-l6"].means["ndcg@10"]
        1.0
    """
    models = list(items_of(models, "models", (str, Path)))
    folders = list(items_of(on, "on", (str, Path)))
    done = evaluations(models, folders, EvalOptions(**options))
    return {evaluation.name: evaluation.scores for evaluation in done}


def evaluations(
    models: Sequence[str | Path], on: Sequence[str | Path], options: EvalOptions
) -> Iterator[Evaluation]:
    """``evaluate``, one collection at a time."""
    folders = [str(name) for name in models if is_index(Path(name))]
    if options.max_tokens is not None and folders:
        raise RevelaError(f"--max-tokens has no effect on the index {folders[0]}: give its model")
    precision, weight, prompts = options.precision, options.weight, options.prompts
    indexes = {
        name: Index.open(name, precision=precision, weight=weight, prompts=prompts)
        for name in folders
    }
    return evaluation.evaluations(models, on, options, indexes)
