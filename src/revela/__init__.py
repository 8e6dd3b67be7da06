"""revela trains dense retrievers from raw text, without labels, by language modelling, with the
methods of five papers (Revela, DREAM, REPLUG, CDE, Dwell in the Beginning), and searches your
own text with them.

The public names are imported when they are first used: ``import revela`` costs nothing.

Example:
    >>> from revela import Index, Retriever
    >>> index = Retriever("my-retriever").index(["Invoices are kept for ten years."], "my-notes")
    >>> Index.open("my-notes").search("how long are invoices kept")[0].text
    'Invoices are kept for ten years.'
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# torch's OpenMP threads spin while they wait, by default for 300,000 rounds, which makes a step
# several times slower when other processes need the cores. 1,000 rounds would make it half as slow
# again on an idle machine. libgomp reads the variable when torch is imported, and child processes
# inherit it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from revela.api import Retriever, compare, evaluate, train
    from revela.errors import RevelaError
    from revela.ranking.rerank_texts import rerank
    from revela.searching.folder_index import search
    from revela.searching.index import Index
    from revela.training.evaluator import LabelFreeEvaluator
    from revela.training.retriever.fit import fit
    from revela.types import Document, Hit

__version__ = "0.1.0"
__all__ = [
    "Document",
    "Hit",
    "Index",
    "LabelFreeEvaluator",
    "Retriever",
    "RevelaError",
    "__version__",
    "compare",
    "evaluate",
    "fit",
    "rerank",
    "search",
    "train",
]

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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        from revela.errors import extra

        with extra("train", f"revela.{name}"):
            return getattr(import_module(f"revela.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'revela' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
