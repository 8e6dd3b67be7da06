"""Score retrievers on public benchmarks through mteb: BEIR, NanoBEIR, CoIR, BRIGHT, RTEB, or single
tasks. Only this module imports mteb.

mteb loads the data, ranks, scores and keeps results; the encoder is ours, with the model's own
prompts. Results have the layout of mteb's leaderboard, OUT/results/MODEL/REVISION/TASK.json; with
truncated texts or bf16, they are in experiments/..., so scores are reused only for equal vectors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mteb
import numpy as np
from mteb.models import ModelMeta
from mteb.models.model_meta import ScoringFunction
from mteb.types import PromptType

from revela.encoders.base import TextEncoder
from revela.encoders.embedded import EMBEDDED
from revela.encoders.load import resolve
from revela.encoders.model_files import fingerprint, name_of, saved_for_dot
from revela.encoders.prompts import OWN, GivenPrompts
from revela.encoders.torch_encoder import TorchEncoder
from revela.errors import RevelaError, first_line
from revela.evaluation.evaluate import short_names
from revela.evaluation.metrics import MAIN
from revela.evaluation.metrics import METRICS as OURS
from revela.evaluation.results import SystemScores
from revela.types import Precision, Vectors

log = logging.getLogger(__name__)

METRICS = dict(zip(OURS, ("ndcg_at_10", "recall_at_100", "mrr_at_10", "map_at_1000"), strict=True))
METRICS |= {"mrr@100": "mrr_at_100"}
"""Our name of a metric -> mteb's."""


class MtebEncoder:
    """A retriever in mteb's encoder protocol. In tasks without queries, such as STS, texts are
    encoded as queries.

    Attributes:
        settings: prompts, truncation and precision.
    """

    def __init__(
        self, encoder: TextEncoder, name: str, revision: str, max_tokens: int | None = None
    ) -> None:
        self.encoder = encoder
        self.settings = {
            "query_prompt": encoder.prompts.query,
            "passage_prompt": encoder.prompts.passage,
            "max_tokens": encoder.limit,
            "arithmetic": encoder.precision,
        }
        unusual: dict[str, Any] = {"max_tokens": max_tokens} if max_tokens else {}
        unusual |= {} if encoder.precision == "fp32" else {"arithmetic": encoder.precision}
        score = ScoringFunction.DOT_PRODUCT if encoder.by_dot else ScoringFunction.COSINE
        about = {"name": name, "revision": revision, "similarity_fn_name": score}
        about |= {"experiment_kwargs": unusual or None}
        self.mteb_model_meta = ModelMeta.create_empty(about)

    @classmethod
    def load(
        cls,
        name: str,
        precision: Precision = "auto",
        max_tokens: int | None = None,
        prompts: GivenPrompts = OWN,
    ) -> MtebEncoder:
        """Open a Sentence-Transformers folder, a hub id or embedded:minilm-l6."""
        folder = resolve(name)
        encoder = TorchEncoder.load(folder, precision, max_tokens, prompts, saved_for_dot(folder))
        return cls(encoder, *filed_as(name, folder), max_tokens)

    def encode(self, inputs: Any, *, prompt_type: Any = None, **_: Any) -> Vectors:
        texts = [text for batch in inputs for text in batch["text"]]
        if prompt_type == PromptType.document:
            return self.encoder.encode_passages(texts, progress=True)
        return self.encoder.encode_queries(texts)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        return np.atleast_2d(embeddings1) @ np.atleast_2d(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        return (np.asarray(embeddings1) * np.asarray(embeddings2)).sum(axis=-1)


def filed_as(given: str, folder: Path) -> tuple[str, str]:
    """Name (owner/model) and revision of a model, for mteb's files. The revision is the hub's
    commit, or the fingerprint of a local folder.
    """
    if given in EMBEDDED:
        return given.replace(":", "/"), fingerprint(folder)
    if Path(given).exists():
        return f"local/{folder.resolve().name}", fingerprint(folder)
    return name_of(folder), folder.name  # the hub's cache names a snapshot by its commit


def evaluate_benchmarks(
    models: Sequence[str],
    names: Sequence[str],
    out: Path,
    max_tokens: int | None = None,
    precision: Precision = "auto",
    prompts: GivenPrompts = OWN,
) -> tuple[dict[str, list[str]], dict[str, dict[str, SystemScores]]]:
    """Score retrievers on benchmarks and tasks of mteb.

    Arguments are as for ``evaluate``; ``out`` keeps finished tasks.

    Returns:
        {name: its tasks}, and {task: {model: scores}}.
    """
    tasks = {name: find_tasks(name) for name in names}
    by_name = {task.metadata.name: task for own in tasks.values() for task in own}
    scores: dict[str, dict[str, SystemScores]] = {name: {} for name in by_name}
    for label, model in short_names(models).items():
        encoder = MtebEncoder.load(model, precision, max_tokens, prompts)
        for name, task in by_name.items():
            log.info(f"{name}, {label}")
            scores[name][label] = run(task, encoder, out)
    return {name: [task.metadata.name for task in own] for name, own in tasks.items()}, scores


def find_tasks(name: str) -> list[Any]:
    """The public tasks of a benchmark, or a task of mteb."""
    benchmarks = {alias: b for b in mteb.get_benchmarks() for alias in (b.name, *(b.aliases or ()))}
    try:
        tasks = benchmarks[name].tasks if name in benchmarks else [mteb.get_task(name)]
    except KeyError as error:
        raise RevelaError(
            f"{name} is neither a benchmark nor a task of mteb {mteb.__version__} "
            f"({error.args[0]}): mteb.get_tasks() lists all tasks; give a folder with --on"
        ) from error
    public = [task for task in tasks if task.metadata.is_public]
    if private := [task.metadata.name for task in tasks if not task.metadata.is_public]:
        log.info(f"skipped {', '.join(private)}: private, only mteb has the data")
    if not public:
        raise RevelaError(f"{name}: every task is private; name a public one")
    return public


def run(task: Any, encoder: MtebEncoder, out: Path) -> SystemScores:
    """A task's main score by mteb, and its scores by our metrics, averaged over splits and subsets;
    a result in ``out`` is reused.
    """
    for library in ("mteb", "huggingface_hub"):  # their warnings repeat the errors that they raise
        logging.getLogger(library).setLevel(logging.ERROR)
    settings = {"batch_size": 1024, "show_progress_bar": False, **encoder.settings}
    try:
        results = mteb.evaluate(
            encoder,
            task,
            cache=mteb.ResultCache(out),
            encode_kwargs=settings,
            co2_tracker=False,
            show_progress_bar=False,
        )
    except RevelaError:
        raise
    except Exception as error:  # any error of mteb, datasets, the hub or the HTTP client
        raise RevelaError(
            f"{task.metadata.name}: mteb cannot read its data or an earlier result "
            f"({first_line(error)}): run again with a network, or delete the result; finished "
            f"tasks are kept in {out}"
        ) from error
    result = results.task_results[0]
    rows = [scores for split in result.scores.values() for scores in split]
    means = {
        ours: float(np.mean([row[theirs] for row in rows]))
        for ours, theirs in METRICS.items()
        if all(theirs in row for row in rows)
    }
    return SystemScores({**means, MAIN: float(result.get_score())}, settings=encoder.settings)
