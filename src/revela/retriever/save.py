"""Save a retriever as a stock Sentence-Transformers folder: LoRA merged, with a model card, moved
into place once all of it is written.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sentence_transformers import SentenceTransformer

from revela.files import disk_errors, flush, make_readable
from revela.retriever.context import FOLDER as CONTEXT
from revela.retriever.context import SavedContext
from revela.retriever.lora import merged, needs_merging
from revela.retriever.slots import write_rows
from revela.silence import duration


def save_retriever(
    model: SentenceTransformer,
    folder: Path,
    card: str,
    matryoshka: Sequence[int] = (),
    context: SavedContext | None = None,
    words_to_vectors: float = 1.0,
) -> None:
    """Write the retriever into ``folder``, beside other files; modules.json, which makes it
    loadable, comes last.

    Args:
        model: the retriever, with or without LoRA.
        folder: created if need be.
        card: text of README.md.
        matryoshka: widths that its vectors were trained to be truncated to; with the full width
            they become "matryoshka_dims" of its configuration.
        context: of a retriever with slots, which are saved with its rows.
        words_to_vectors: kept in its configuration if it is not 1 (``words_to_vectors_of``).

    Raises:
        RevelaError: the disk is full, or the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (
        disk_errors(folder),
        tempfile.TemporaryDirectory(prefix=".model-", dir=folder) as hidden,
    ):
        temporary = Path(hidden)
        if (tokenizer := getattr(model.tokenizer, "backend_tokenizer", None)) is not None:
            # training truncates texts shorter than the model may read
            tokenizer.no_truncation()
            tokenizer.no_padding()
        # A copy takes the model's memory again, and spares it what is merged and filled in; it is
        # made on the CPU.
        changed = context is not None or needs_merging(model) or model.device.type != "cpu"
        final = merged(model) if changed else model
        if context is not None:
            write_rows(final, context.rows_JD)
            context.save(temporary / CONTEXT)
        final.save_pretrained(hidden, create_model_card=False)
        # A path in the card may have bytes that are no UTF-8.
        (temporary / "README.md").write_text(card, encoding="utf-8", errors="replace")
        kept: dict[str, object] = {}
        if matryoshka:
            widths = {*matryoshka, int(model.get_embedding_dimension() or 0)}
            kept["matryoshka_dims"] = sorted(widths)
        if words_to_vectors != 1:
            kept["words_to_vectors"] = words_to_vectors
        if kept:
            configuration = temporary / "config_sentence_transformers.json"
            settings = json.loads(configuration.read_text(encoding="utf-8"))
            configuration.write_text(json.dumps(settings | kept, indent=2), encoding="utf-8")
        make_readable(temporary)
        flush(temporary)
        (folder / "modules.json").unlink(missing_ok=True)
        for part in sorted(temporary.iterdir(), key=lambda p: p.name == "modules.json"):
            target = folder / part.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(part, target)


def model_card(
    name: str,
    learned_from: str,
    corpus: str,
    command: str,
    settings: str,
    scores: Mapping[str, Mapping[str, float]],
    minutes: float,
    steps: int | None,
    matryoshka: Sequence[int] = (),
    slots: int = 0,
    labelled: bool = False,
) -> str:
    """The README.md of a retriever: what it was trained on or fitted to, by which command, and its
    label-free scores.

    Args:
        name: of the retriever.
        learned_from: a sentence: what was trained, and by which objective; or what was fitted.
        corpus: a phrase: what it was trained on or fitted to.
        command: that made it.
        settings: of the run, as text.
        scores: nDCG@10 by system, then by task.
        minutes: that training, or the fit, took.
        steps: of training; None: it was fitted only.
        matryoshka: widths that its vectors were trained to be truncated to.
        slots: how many documents it reads as its context; 0: none.
        labelled: whether it learned from judged queries.
    """
    widths = ", ".join(map(str, matryoshka))
    how = "on judged queries" if labelled else "without labels"
    made = "fitted" if steps is None else "trained"
    begins = f"Fitted to {corpus}" if steps is None else f"Trained on {corpus}, {steps:,} steps"
    results = dict(list(scores.values())[-1]) if scores else {}
    truncation = f"\nIts vectors may be cut to their first numbers (`truncate_dim`): {widths}.\n"
    return f"""---
{_card_data(name, results)}
---
# {name}

A dense retriever {made} {how} by [revela](https://arxiv.org/abs/2506.16552).
{learned_from}

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
passages = model.encode_document(["a passage", "another passage"])
queries = model.encode_query(["a question"])
scores = model.similarity(queries, passages)
```
{truncation if matryoshka else ""}{_on_context(name, slots) if slots else ""}
{begins} in {duration(minutes)}:

    {command}

{_check_table(scores) if scores else ""}Settings:

```
{settings}
```
"""


def _check_table(scores: Mapping[str, Mapping[str, float]]) -> str:
    tasks = list(dict.fromkeys(task for row in scores.values() for task in row))
    header = "| nDCG@10 | " + " | ".join(tasks) + " |\n|---|" + "---|" * len(tasks)
    rows = "\n".join(
        f"| {system} | " + " | ".join(f"{row[t]:.3f}" if t in row else "" for t in tasks) + " |"
        for system, row in scores.items()
    )
    return f"""\
Label-free check on documents held out of it (first half of a chunk finds the rest of its document;
title finds its document; docstring finds its function; question, written by a language model, finds
its chunk), by the vectors alone and by their fusion with BM25:

{header}
{rows}

"""


def _card_data(name: str, scores: Mapping[str, float]) -> str:
    """The header of a card: YAML as the hub reads it, with nDCG@10 by task as its model-index."""
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="information-retrieval",
            dataset_type="held-out",
            dataset_name=f"label-free check: {task}",
            dataset_config=task,  # results of one dataset are one to the hub
            metric_type="ndcg_at_10",
            metric_name="nDCG@10",
            metric_value=round(score, 4),
        )
        for task, score in scores.items()
    ]
    data = ModelCardData(
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "feature-extraction", "dense-retrieval", "revela"],
        eval_results=results or None,
        model_name=name,
    )
    return str(data.to_yaml())


def _on_context(name: str, slots: int) -> str:
    """How to give a contextual retriever another corpus by stock sentence-transformers."""
    return f"""
It reads a context before every text: {slots} documents of a corpus, a vector each. It is saved with
documents of the corpus it was trained on. `revela index` and `revela eval` give it documents of the
corpus that is searched; by hand:

```python
import torch
from safetensors.torch import load_file

folder = "{name}"
first = SentenceTransformer(f"{{folder}}/context")
documents = [...]  # {slots} texts, drawn at random from the corpus that is searched
vectors = first.encode_document(documents, convert_to_tensor=True).cpu()
rows = load_file(f"{{folder}}/context/rows.safetensors")["anchors_JD"] + vectors
ids = model.tokenizer.convert_tokens_to_ids([f"<|context-{{j}}|>" for j in range({slots})])
with torch.no_grad():
    model[0].model.get_input_embeddings().weight[ids] = rows
```
"""
