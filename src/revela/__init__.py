"""Raw text in, a dense retriever out: trained without labels by a language model's next-token
prediction.

What is public is here, and imported when it is first asked for: ``import revela`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from revela.api import Retriever, Searcher
    from revela.errors import RevelaError
    from revela.types import Document, Hit

__all__ = ["Document", "Hit", "Retriever", "RevelaError", "Searcher", "__version__"]

_HOMES = {
    "Retriever": "api",
    "Searcher": "api",
    "RevelaError": "errors",
    "Document": "types",
    "Hit": "types",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("revela")
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"revela.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'revela' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
