"""Score retrievers on public benchmarks through mteb: BEIR, NanoBEIR, CoIR, BRIGHT, RTEB, or single
tasks. Only this module and mteb_hybrid.py import mteb.

mteb loads the data, ranks and scores; the encoder is ours, with the model's own prompts. Results
have the layout of mteb's leaderboard, OUT/results/MODEL/REVISION/TASK.json. Runs with truncated
texts or in bf16 are in experiments/..., so that scores are reused only for the same vectors.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mteb
import numpy as np
from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.get_tasks import TASK_LIST
from mteb.models import ModelMeta
from mteb.models.model_meta import ScoringFunction
from mteb.types import PromptType

from revela.embedded import EMBEDDED
from revela.encoder.prompts import OWN, Given
from revela.encoder.torch_encoder import TorchEncoder
from revela.errors import RevelaError, first_line
from revela.evaluation.collection import load_collection
from revela.evaluation.evaluate import short_names
from revela.evaluation.metrics import MAIN
from revela.evaluation.metrics import METRICS as OURS
from revela.evaluation.results import SystemScores
from revela.index.contexts import Choice, Context, check_without_slots
from revela.model_files import fingerprint, name_of, resolve
from revela.retriever.encode import RetrieverEncoder
from revela.types import Encoder, Precision, Vectors

log = logging.getLogger(__name__)

METRICS = dict(zip(OURS, ("ndcg_at_10", "recall_at_100", "mrr_at_10", "map_at_1000"), strict=True))
"""Our name of a metric -> mteb's."""
CONTEXT = Context("corpus", seed=42)  # the seed of mteb's own contextual models


class MtebEncoder:
    """A retriever in mteb's encoder protocol. Texts of tasks without queries (STS and the like) are
    encoded as queries.

    Attributes:
        settings: prompts, truncation, precision and context.
    """

    def __init__(
        self, encoder: RetrieverEncoder, filed_as: tuple[str, str], context: Context = CONTEXT
    ) -> None:
        self.encoder, self.context = encoder, context
        self.settings = _settings(encoder, context)
        self._task: Any = None
        self._in_context: tuple[tuple[str, ...], Encoder] = ((), encoder)
        name, revision = filed_as
        prompts = self.settings["query_prompt"], self.settings["passage_prompt"]
        self.mteb_model_meta = ModelMeta.create_empty(
            {
                "name": name,
                "revision": revision,
                "max_tokens": self.settings["max_tokens"],
                "embed_dim": encoder.model.get_embedding_dimension(),
                "n_parameters": sum(p.numel() for p in encoder.model.parameters()),
                "similarity_fn_name": ScoringFunction.COSINE,
                "framework": ["Sentence Transformers"],
                "use_instructions": any(prompts),
                "experiment_kwargs": self._variant() or None,
            }
        )

    @classmethod
    def load(
        cls,
        name: str,
        precision: Precision = "auto",
        max_tokens: int | None = None,
        prompts: Given = OWN,
        context: Context = CONTEXT,
    ) -> MtebEncoder:
        """Open a Sentence-Transformers folder, a hub id or embedded:minilm-l6."""
        folder = resolve(name)
        encoder = TorchEncoder.load(folder, precision, max_tokens, prompts)
        return cls(encoder, filed_as(name, folder), context)

    def _variant(self) -> dict[str, Any]:
        """Settings that change the model's vectors."""
        variant: dict[str, Any] = {}
        if self.settings["max_tokens"] != self.encoder.retriever.own_limit():
            variant["max_tokens"] = self.settings["max_tokens"]
        if self.encoder.retriever.bf16:
            variant["arithmetic"] = "bf16"
        if self.encoder.slots and self.context != CONTEXT:
            about = self.context.about(self.encoder.slots)
            variant["context"] = about["kind"] + about["texts"][:8]
        return variant

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: Any,
        prompt_type: Any = None,
        hf_split: str = "",
        hf_subset: str = "",
        **_: Any,
    ) -> Vectors:
        texts = [text for batch in inputs for text in batch["text"]]
        encoder = self._encoder_for(task_metadata.name, hf_subset, hf_split)
        if prompt_type == PromptType.document:
            return encoder.encode_passages(texts, progress=True)
        return encoder.encode_queries(texts)

    def begin(self, task: Any) -> None:
        """Draw contexts from the corpus of this task, which must be loaded, from now on."""
        self._task = task

    def _encoder_for(self, *part: str) -> Encoder:
        """The encoder for a task, subset and split; a contextual one with the context."""
        if not self.encoder.slots or self.context.kind == "saved":
            return self.encoder
        if self._in_context[0] != part:
            encoder: Encoder = self.encoder
            corpus = _corpus(self._task, *part[1:])
            if corpus or self.context.kind != "corpus":
                encoder = self.context.into(self.encoder, corpus)
            self._in_context = part, encoder
        return self._in_context[1]

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        return np.atleast_2d(embeddings1) @ np.atleast_2d(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        return (np.asarray(embeddings1) * np.asarray(embeddings2)).sum(axis=-1)


def _settings(encoder: RetrieverEncoder, context: Context) -> dict[str, Any]:
    retriever = encoder.retriever
    settings = {
        "query_prompt": retriever.prompt("query"),
        "passage_prompt": retriever.prompt("document"),
        "max_tokens": retriever.limit(),
        "arithmetic": encoder.precision,
    }
    return settings | ({"context": context.describe()} if encoder.slots else {})


def _corpus(task: Any, subset: str, split: str) -> list[str]:
    """The documents of a loaded retrieval task, titles first; [] for other tasks."""
    data = getattr(task, "dataset", None) or {}
    try:
        rows = data[subset][split]["corpus"]
    except (KeyError, TypeError, IndexError):
        return []
    titles = rows["title"] if "title" in rows.column_names else [""] * len(rows)
    return [f"{t or ''} {text}".strip() for t, text in zip(titles, rows["text"], strict=True)]


def evaluate_benchmarks(
    models: Sequence[str],
    names: Sequence[str],
    out: Path,
    max_tokens: int | None = None,
    precision: Precision = "auto",
    context: Choice | None = None,
    prompts: Given = OWN,
) -> tuple[dict[str, list[str]], dict[str, dict[str, SystemScores]]]:
    """Score retrievers on benchmarks, tasks of mteb and folders in BEIR layout.

    Arguments are as for ``evaluate``. By default a context is drawn from each task's corpus.

    Returns:
        {name: its tasks}, and {task: {model: scores}}.
    """
    tasks = find_tasks(names)
    drawn = CONTEXT if context is None else Context.of(context, CONTEXT.seed)
    encoders = {
        label: MtebEncoder.load(name, precision, max_tokens, prompts, drawn)
        for label, name in short_names(models).items()
    }
    if context is not None:
        check_without_slots([each.encoder for each in encoders.values()])
    scores = run_tasks([task for own in tasks.values() for task in own], encoders, out)
    return {name: [task.metadata.name for task in own] for name, own in tasks.items()}, scores


def filed_as(given: str, folder: Path) -> tuple[str, str]:
    """Name (owner/model) and revision of a model, for mteb's files. The revision is the hub's
    commit, or the fingerprint of a local folder.
    """
    if given in EMBEDDED:
        return given.replace(":", "/"), fingerprint(folder)
    if Path(given).exists():
        return f"local/{folder.resolve().name}", fingerprint(folder)
    return name_of(folder), folder.name  # the hub's cache names a snapshot by its commit


def find_tasks(names: Sequence[str]) -> dict[str, list[Any]]:
    """The public tasks of each name: a benchmark, a task or a folder in BEIR layout."""
    benchmarks = {alias: b for b in mteb.get_benchmarks() for alias in (b.name, *(b.aliases or ()))}
    public: dict[str, list[Any]] = {name: [] for name in names}
    for name in public:
        if name in benchmarks:
            tasks = list(benchmarks[name].tasks)
        elif (Path(name) / "qrels").is_dir():
            tasks = [folder_task(Path(name))]
        else:
            tasks = [_task(name, benchmarks)]
        for task in tasks:
            if task.metadata.is_public:
                public[name].append(task)
            else:
                log.info(f"{task.metadata.name}: private, only mteb has its data; skipped")
    if not any(public.values()):
        raise RevelaError(f"{', '.join(names)}: every task is private; name a public one")
    return public


def _task(name: str, benchmarks: Iterable[str]) -> Any:
    names = {n.lower(): n for n in (*(task.metadata.name for task in TASK_LIST), *benchmarks)}
    if name in names.values():
        return mteb.get_task(name)
    near = [names[key] for key in difflib.get_close_matches(name.lower(), names)]
    hint = f"did you mean {' or '.join(near)}?" if near else "mteb.get_tasks() lists all tasks"
    raise RevelaError(
        f"{name} is neither a benchmark nor a task of mteb {mteb.__version__}, nor a folder with "
        f"qrels/: {hint}"
    )


def folder_task(folder: Path) -> Any:
    """A folder in BEIR layout as a task of mteb, with a digest of its contents as revision."""
    collection = load_collection(folder)
    titles = collection.titles
    texts = [d[len(t) + 1 :] if t else d for d, t in zip(collection.documents, titles, strict=True)]
    documents = {"id": collection.document_ids, "title": titles, "text": texts}
    queries = {"id": collection.query_ids, "text": collection.queries}
    qrels = collection.qrels
    digest = hashlib.blake2b(repr((documents, queries, qrels)).encode(), digest_size=16)

    class FolderTask(AbsTaskRetrieval):
        ignore_identical_ids = bool(collection.among_documents)
        metadata = TaskMetadata(
            name=collection.name,
            description=f"{len(collection.documents)} documents, {len(collection.queries)} queries",
            type="Retrieval",
            dataset={"path": collection.name, "revision": digest.hexdigest()},
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )

        def load_data(self, **_: Any) -> None:
            split = {
                "corpus": Dataset.from_dict(documents),
                "queries": Dataset.from_dict(queries),
                "relevant_docs": qrels,
                "top_ranked": None,
            }
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    return FolderTask()


def run_tasks(
    tasks: Sequence[Any], models: Mapping[str, MtebEncoder], out: Path
) -> dict[str, dict[str, SystemScores]]:
    """Run every model on every task: {task: {model: scores}}. ``out`` keeps finished tasks."""
    for name in ("mteb", "huggingface_hub"):  # their warnings repeat the errors they raise
        logging.getLogger(name).setLevel(logging.ERROR)
    cache = mteb.ResultCache(out)
    by_name = {task.metadata.name: task for task in tasks}
    scores: dict[str, dict[str, SystemScores]] = {name: {} for name in by_name}
    for label, model in models.items():
        for name, task in by_name.items():
            scores[name][label] = _scores(_run(task, label, model, cache), model.settings)
    return scores


def _scores(result: Any, settings: dict[str, Any]) -> SystemScores:
    """mteb's main score and its scores of our metrics, averaged over splits and subsets."""
    rows = [scores for split in result.scores.values() for scores in split]
    means = {
        ours: float(np.mean([row[theirs] for row in rows]))
        for ours, theirs in METRICS.items()
        if all(theirs in row for row in rows)
    }
    return SystemScores({**means, MAIN: float(result.get_score())}, settings=settings)


def _run(task: Any, label: str, model: MtebEncoder, cache: Any) -> Any:
    """mteb's result of one task: cached, or run now."""
    name, meta = task.metadata.name, model.mteb_model_meta
    path = cache.get_task_result_path(name, meta)
    try:
        cached = cache.load_task_result(name, meta)
    except ValueError as error:
        raise RevelaError(f"{path} is damaged: delete it, and the task runs again") from error
    revision = task.metadata.revision
    current = cached is not None and (task.is_aggregate or cached.dataset_revision == revision)
    if current and not cached.get_missing_evaluations(task):
        log.info(f"{name}, {label}: finished before ({path})")
        return cached
    if isinstance(task, AbsTaskAggregate):
        for part in task.tasks:
            _run(part, label, model, cache)
    else:
        log.info(f"{name}, {label}")
        _load(task, cache)
        model.begin(task)
    result = mteb.evaluate(
        model,
        task,
        cache=cache,
        encode_kwargs={"batch_size": 1024, "show_progress_bar": False, **model.settings},
        overwrite_strategy="only-missing" if current or task.is_aggregate else "always",
        co2_tracker=False,
        show_progress_bar=False,
    )
    task.unload_data()
    return result.task_results[0]


def _load(task: Any, cache: Any) -> None:
    try:
        task.load_data()
    except Exception as error:  # a lost connection has many types: datasets', the hub's, HTTP's
        raise RevelaError(
            f"{task.metadata.name}: its data cannot be loaded ({first_line(error)}); run again "
            f"with a network, finished tasks are kept in {cache.cache_path}"
        ) from error
