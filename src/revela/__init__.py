"""revela trains dense retrievers from raw text, without labels, by language modelling, with the
methods of five papers (Revela, DREAM, REPLUG, CDE, Dwell in the Beginning), and searches your
own text with them.

Public names are imported on first use, so ``import revela`` is fast.

Example:
    >>> from revela import Index, Retriever
    >>> index = Retriever("my-retriever").index(["Invoices are kept for ten years."], "my-notes")
    >>> Index.open("my-notes").search("how long are invoices kept")[0].text
    'Invoices are kept for ten years.'
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# torch's OpenMP threads spin while they wait, which slows them down when other processes need the
# cores. 10,000 rounds are four times faster than the default on a busy machine, and cost an idle
# training step 2 to 9 % (research/notebook.md). libgomp reads the variable when torch is imported,
# and child processes inherit it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from revela.api import Retriever as Retriever
    from revela.api import compare as compare
    from revela.api import evaluate as evaluate
    from revela.api import train as train
    from revela.errors import RevelaError as RevelaError
    from revela.ranking.rerank_texts import rerank as rerank
    from revela.searching.folder_index import search as search
    from revela.searching.index import Index as Index
    from revela.training.evaluator import LabelFreeEvaluator as LabelFreeEvaluator
    from revela.training.retriever.fit import fit as fit
    from revela.types import Document as Document
    from revela.types import Hit as Hit

__version__ = "0.1.0"
# The public names, and the modules that define them.
_HOMES = {
    "Retriever": "api",
    "compare": "api",
    "evaluate": "api",
    "train": "api",
    "Index": "searching.index",
    "search": "searching.folder_index",
    "rerank": "ranking.rerank_texts",
    "fit": "training.retriever.fit",
    "LabelFreeEvaluator": "training.evaluator",
    "RevelaError": "errors",
    "Document": "types",
    "Hit": "types",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        from revela.errors import extra

        with extra("train", f"revela.{name}"):
            return getattr(import_module(f"revela.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'revela' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
