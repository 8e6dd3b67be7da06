"""Score retrievers on public benchmarks through mteb: BEIR, NanoBEIR, CoIR, BRIGHT, RTEB, or
single tasks. No other file imports mteb.

mteb loads the data, ranks and scores; the encoder is ours, with the model's own prompts. Results
have mteb's layout, OUT/results/MODEL/REVISION/TASK.json, as its leaderboard takes them, with
prompts, maximum length and arithmetic in run_settings.jsonl beside them. Runs with truncated texts
or in bf16 have their own folders (experiments/...), so that a score is only reused for runs with
the same vectors.

mteb's own command line takes models of the hub and of its registry; ``python -m
revela.evaluation.benchmarks`` is that command line with local folders registered (``register``).
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from revela.errors import RevelaError, first_line
from revela.evaluation.beir import labelled, load_collection
from revela.evaluation.metrics import MAIN
from revela.evaluation.metrics import METRICS as OURS
from revela.evaluation.results import SystemScores
from revela.index.contexts import Choice, Context, refuse_without_slots
from revela.retriever.encode import (
    RetrieverEncoder,
    passage_prompt_of,
    query_prompt_of,
    token_limit,
)
from revela.settings import Precision
from revela.types import Encoder, Vectors
from revela.weights import EMBEDDED, fingerprint, name_of, resolve

log = logging.getLogger(__name__)

try:
    import mteb
    from datasets import Dataset
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.abstasks.aggregated_task import AbsTaskAggregate
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.get_tasks import TASK_LIST
    from mteb.models import ModelMeta
    from mteb.models.model_implementations import MODEL_REGISTRY
    from mteb.models.model_meta import ScoringFunction
    from mteb.types import PromptType
except ModuleNotFoundError as error:
    raise RevelaError(
        f"benchmarks need mteb ({error}): run pip install 'revela[benchmarks]'"
    ) from error

CORPUS, QUERIES = ("corpus.jsonl", "corpus.jsonl.gz"), ("queries.jsonl", "queries.jsonl.gz")
FOLDER_FILES = (*CORPUS, *QUERIES, "qrels/test.tsv")
METRICS = dict(zip(OURS, ("ndcg_at_10", "recall_at_100", "mrr_at_10", "map_at_1000"), strict=True))
"""mteb's names of our metrics, by ours."""


CONTEXT = Context("corpus", seed=42)
"""Of models that read one: the seed is that of mteb's own contextual models."""


@dataclass(frozen=True)
class Contender:
    """A model as mteb files it: ``name`` is owner/model, ``revision`` the hub's commit or a
    fingerprint of a local folder, ``context`` what it reads if it has slots.
    """

    encoder: RetrieverEncoder
    name: str
    revision: str
    context: Context = CONTEXT

    def settings(self) -> dict[str, Any]:
        """What a score depends on beside the weights; recorded with each score."""
        model, cut = self.encoder.model, self.encoder.max_tokens
        limits = [limit for limit in (token_limit(model), cut) if limit is not None]
        reads = {"context": self.context.describe()} if self.encoder.slots else {}
        return {
            "query_prompt": query_prompt_of(model),
            "passage_prompt": passage_prompt_of(model),
            "max_tokens": min(limits, default=None),
            "arithmetic": "bf16" if self.encoder.bf16 else "fp32",
            **reads,
        }


@dataclass(frozen=True)
class TaskScore:
    """mteb's result of one task: its main score, those of ``METRICS`` that it has (means over
    splits and subsets), and the settings of the run.
    """

    main: float
    metrics: dict[str, float]
    settings: dict[str, Any]

    def as_system(self) -> SystemScores:
        """As in the results of ``eval``, with the main score as one more metric."""
        return SystemScores(means={**self.metrics, MAIN: self.main}, settings=self.settings)


def evaluate_benchmarks(
    models: Sequence[str],
    names: Sequence[str],
    out: Path,
    max_tokens: int | None = None,
    precision: Precision = "auto",
    context: Choice | None = None,
) -> tuple[dict[str, list[str]], dict[str, dict[str, TaskScore]]]:
    """Score retrievers on benchmarks, tasks of mteb or folders in BEIR layout.

    Args:
        models: Sentence-Transformers folders, hub ids or embedded:minilm-l6.
        names: of benchmarks and tasks, and folders.
        out: for the results, in mteb's layout.
        max_tokens: truncate texts to this length.
        precision: arithmetic.
        context: of models that read one; None: drawn from each task's corpus. Tasks without a
            corpus have the saved one.

    Returns:
        The tasks of each name, and {task: {model: score}}.

    Raises:
        RevelaError: as ``find_tasks`` and ``run_tasks``, or a model cannot be loaded.
    """
    tasks = find_tasks(names)
    contenders = {}
    for label, name in labelled(models).items():
        folder = resolve(name)
        encoder = RetrieverEncoder.load(folder, precision, max_tokens)
        contenders[label] = contender(name, folder, encoder)
    if context is not None:
        known = Context.of(context, CONTEXT.seed)
        refuse_without_slots([each.encoder for each in contenders.values()])
        contenders = {label: replace(each, context=known) for label, each in contenders.items()}
    scores = run_tasks([task for found in tasks.values() for task in found], contenders, out)
    return {name: [task.metadata.name for task in found] for name, found in tasks.items()}, scores


def contender(given: str, folder: Path, encoder: RetrieverEncoder) -> Contender:
    """The model in ``folder``, under the name that a user gave."""
    if given in EMBEDDED:
        return Contender(encoder, given.replace(":", "/"), fingerprint(folder))
    if Path(given).exists():
        return Contender(encoder, f"local/{folder.resolve().name}", fingerprint(folder))
    # The hub's cache names a snapshot by its commit.
    return Contender(encoder, name_of(folder), folder.name)


def register(model: str | Path, precision: Precision = "auto") -> ModelMeta:
    """Make a model known to mteb by the name it is given here, with its own prompts.

    ``mteb.get_model`` takes that name from then on, in this process. A retriever that reads a
    context reads the one it was saved with, as mteb does not say which corpus it encodes: its own
    of each task is drawn by ``revela eval --benchmark``.

    Args:
        model: a Sentence-Transformers folder, a hub id or embedded:minilm-l6.
        precision: arithmetic.

    Returns:
        What mteb knows of it; its ``load_model()`` gives the model.

    Raises:
        RevelaError: the model cannot be opened.
    """
    folder = resolve(str(model))
    known = contender(str(model), folder, RetrieverEncoder.load(folder, precision))
    bridge = _Bridge(str(model), replace(known, context=Context("saved")))

    def load(*_: Any, **__: Any) -> _Bridge:
        return bridge

    meta = bridge.mteb_model_meta.model_copy(update={"loader": load})
    MODEL_REGISTRY[str(model)] = meta
    return meta


def find_tasks(names: Sequence[str]) -> dict[str, list[Any]]:
    """The tasks of each name: a benchmark, a task or a folder in BEIR layout. Private tasks are
    logged and skipped.

    Raises:
        RevelaError: a name is none of the three, or all tasks are private.
    """
    benchmarks = {alias: b for b in mteb.get_benchmarks() for alias in (b.name, *(b.aliases or ()))}
    found: dict[str, list[Any]] = {}
    for name in names:
        if name in benchmarks:
            found[name] = list(benchmarks[name].tasks)
        elif (Path(name) / "qrels").is_dir():
            found[name] = [folder_task(Path(name))]
        else:
            found[name] = [_task(name, benchmarks)]
    each = [task.metadata for tasks in found.values() for task in tasks]
    for name in dict.fromkeys(task.name for task in each if not task.is_public):
        log.info(f"{name}: private, only mteb's maintainers have its data; skipped")
    found = {name: [t for t in tasks if t.metadata.is_public] for name, tasks in found.items()}
    if not any(found.values()):
        raise RevelaError(f"{', '.join(names)}: every task is private; name a public one")
    return found


def _task(name: str, benchmarks: Iterable[str]) -> Any:
    names = [*(task.metadata.name for task in TASK_LIST), *benchmarks]
    known = {each.lower(): each for each in names}
    if name in names:
        return mteb.get_task(name)
    near = [known[each] for each in difflib.get_close_matches(name.lower(), known, n=3)]
    nearest = f"did you mean {' or '.join(near)}?" if near else "mteb.get_tasks() lists all tasks"
    raise RevelaError(
        f"{name} is neither a benchmark nor a task of mteb {mteb.__version__}, nor a folder with "
        f"qrels/: {nearest}"
    )


def folder_task(folder: Path) -> Any:
    """A folder in BEIR layout as an mteb task of the folder's name; the revision is a digest of
    its files.

    Raises:
        RevelaError: as ``load_collection``.
    """
    collection = load_collection(folder)
    digest = hashlib.blake2b(digest_size=16)
    for file in (folder / name for name in FOLDER_FILES):
        if file.is_file():
            digest.update(file.read_bytes())

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
            # The texts begin with the titles already.
            documents = {"id": collection.document_ids, "text": collection.documents}
            queries = {"id": collection.query_ids, "text": collection.queries}
            split = {
                "corpus": Dataset.from_dict(documents),
                "queries": Dataset.from_dict(queries),
                "relevant_docs": dict(collection.qrels),
                "top_ranked": None,
            }
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    return FolderTask()


def run_tasks(
    tasks: Sequence[Any], models: Mapping[str, Contender], out: Path
) -> dict[str, dict[str, TaskScore]]:
    """Every model on every task: {task: {model: score}}. Tasks finished in ``out`` are not run
    again.

    Raises:
        RevelaError: data cannot be loaded, vectors are not finite, or a result file is damaged;
            finished tasks are kept.
    """
    for name in ("mteb", "huggingface_hub"):  # their warnings repeat errors that are raised
        logging.getLogger(name).setLevel(logging.ERROR)
    cache = mteb.ResultCache(out)
    once = {task.metadata.name: task for task in tasks}
    scores: dict[str, dict[str, TaskScore]] = {name: {} for name in once}
    for label, model in models.items():
        bridge = _Bridge(label, model)
        for task in once.values():
            result = _run(task, bridge, cache)
            scores[task.metadata.name][label] = TaskScore(
                float(result.get_score()), _metrics(result), bridge.settings
            )
    return scores


def _run(task: Any, model: _Bridge, cache: Any) -> Any:
    name, meta = task.metadata.name, model.mteb_model_meta
    try:
        kept = cache.load_task_result(name, meta)
    except ValueError as error:
        path = cache.get_task_result_path(name, meta)
        raise RevelaError(f"{path} is damaged: delete it, and the task runs again") from error
    revision = task.metadata.revision
    current = kept is not None and (task.is_aggregate or kept.dataset_revision == revision)
    if current and not kept.get_missing_evaluations(task):
        path = cache.get_task_result_path(name, meta)
        log.info(f"{name}, {model.label}: finished before ({path})")
        return kept
    if isinstance(task, AbsTaskAggregate):
        for part in task.tasks:
            _run(part, model, cache)
    else:
        log.info(f"{name}, {model.label}")
        _load(task, cache)
        model.task = task
    settings = {"batch_size": 1024, "show_progress_bar": False, **model.settings}
    strategy = "only-missing" if current or task.is_aggregate else "always"
    result = mteb.evaluate(
        model,
        task,
        cache=cache,
        encode_kwargs=settings,
        overwrite_strategy=strategy,
        co2_tracker=False,
        show_progress_bar=False,
    )
    task.unload_data()
    return result.task_results[0]


def _load(task: Any, cache: Any) -> None:
    try:
        task.load_data()
    except RevelaError:
        raise
    except Exception as error:  # a lost connection has many types: datasets', the hub's, HTTP's
        reason = first_line(error)
        raise RevelaError(
            f"{task.metadata.name}: its data cannot be loaded ({reason}); run again with a "
            f"network, finished tasks are kept in {cache.cache_path}"
        ) from error


def _metrics(result: Any) -> dict[str, float]:
    rows = [scores for split in result.scores.values() for scores in split]
    return {
        ours: float(np.mean([row[theirs] for row in rows]))
        for ours, theirs in METRICS.items()
        if all(theirs in row for row in rows)
    }


def _corpus(task: Any, subset: str, split: str) -> list[str]:
    """The documents of a loaded task of retrieval, titles first; of another task, none."""
    data = getattr(task, "dataset", None) or {}
    try:
        rows = data[subset][split]["corpus"]
    except (KeyError, TypeError, IndexError):
        return []
    titles = rows["title"] if "title" in rows.column_names else [""] * len(rows)
    return [f"{t or ''} {text}".strip() for t, text in zip(titles, rows["text"], strict=True)]


class _Bridge:
    """Our encoder as mteb's encoder protocol. Texts of tasks without queries (STS and the like) are
    encoded as queries.

    Attributes:
        task: that is run, loaded; it has the corpus that a context is drawn from.
    """

    task: Any = None

    def __init__(self, label: str, model: Contender) -> None:
        self.label, self.encoder, self.settings = label, model.encoder, model.settings()
        self.context = model.context
        self._reader: tuple[tuple[str, ...], Encoder] = ((), model.encoder)
        inner = model.encoder.model
        variant = {}
        if self.settings["max_tokens"] != token_limit(inner):
            variant["max_tokens"] = self.settings["max_tokens"]
        if model.encoder.bf16:
            variant["arithmetic"] = "bf16"
        if model.encoder.slots and model.context != CONTEXT:
            about = model.context.about(model.encoder.slots)
            variant["context"] = about["kind"] + about["texts"][:8]
        self.mteb_model_meta = ModelMeta.create_empty(
            {
                "name": model.name,
                "revision": model.revision,
                "max_tokens": self.settings["max_tokens"],
                "embed_dim": inner.get_embedding_dimension(),
                "n_parameters": sum(p.numel() for p in inner.parameters()),
                "similarity_fn_name": ScoringFunction.COSINE,
                "framework": ["Sentence Transformers"],
                "use_instructions": any(
                    self.settings[name] for name in ("query_prompt", "passage_prompt")
                ),
                "experiment_kwargs": variant or None,
            }
        )

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
        encoder = self.reader(task_metadata.name, hf_subset, hf_split)
        if prompt_type == PromptType.document:
            return encoder.encode_passages(texts, progress=True)
        return encoder.encode_queries(texts)

    def reader(self, name: str, subset: str, split: str) -> Encoder:
        """The encoder, with the context of a task's corpus if it reads one."""
        if not self.encoder.slots:
            return self.encoder
        if self._reader[0] != (name, subset, split):
            corpus = _corpus(self.task, subset, split)
            drawn = self.context.kind == "corpus"
            reader = (
                self.encoder if drawn and not corpus else self.context.into(self.encoder, corpus)
            )
            self._reader = (name, subset, split), reader
        return self._reader[1]

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        return np.atleast_2d(embeddings1) @ np.atleast_2d(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        return (np.asarray(embeddings1) * np.asarray(embeddings2)).sum(axis=-1)


if __name__ == "__main__":
    from mteb.cli import main

    for given in sys.argv[1:]:
        if (Path(given) / "modules.json").is_file():
            register(given)
    main()
