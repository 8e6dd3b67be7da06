"""Flags that several verbs share."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from revela.encoders.prompts import GivenPrompts
from revela.errors import RevelaError
from revela.files import check_free_for_run

Corpus = Annotated[list[Path], Parameter(negative=())]


def check_out(_type: object, path: Path | None) -> None:
    """Refuse an address: folders are locked, renamed and synchronised, which object stores cannot
    do.

    Raises:
        RevelaError: the path is an address, whose slashes Path has merged; or it is not valid
            UTF-8, so that Arrow and Lance cannot open it.
    """
    if path is not None and re.search("[\ud800-\udfff]", str(path)):
        raise RevelaError(f"--out {str(path)!a} is not valid UTF-8: give another name")
    if path is not None and re.match(r"[a-z][a-z0-9+.-]+:/", str(path)):
        raise RevelaError(
            f"--out is {str(path).replace(':/', '://', 1)}, a URL: give a folder of a file "
            "system, such as a mounted bucket"
        )


Out = Annotated[Path, Parameter(validator=check_out)]
Switch = Annotated[bool, Parameter(negative=())]
"A flag that has no --no-... form."
Several = Parameter(negative=(), consume_multiple=True)
Flat = Parameter(name="*", consume_multiple=True, negative_iterable=())
"A dataclass whose fields are flags of their own."


def names_of(given: Sequence[str] | None) -> list[str]:
    """The names that a flag was given: --metadata year lang, or year,lang."""
    return [name.strip() for names in given or () for name in names.split(",")]


@dataclasses.dataclass(frozen=True)
class PromptFlags:
    """Prompts in place of those that an embedder's folder names."""

    query_prompt: str | None = None
    "Text before every query. Default: that of the model's folder, or of a known model."
    passage_prompt: str | None = None
    "Text before every passage. Default: as for --query-prompt."

    @property
    def given(self) -> GivenPrompts:
        return self.query_prompt, self.passage_prompt


PROMPTS = PromptFlags()


def check_paths(corpus: Sequence[Path], out: Path | None) -> None:
    """Refuse a corpus that does not exist, and a folder that is taken, before torch is imported."""
    if out is not None:
        check_free_for_run(out)
    for source in corpus:
        if not (source.exists() or str(source).startswith("hub:")):
            from revela.text.readers import files_of
            from revela.text.readers.common import ReadReport

            next(files_of(source, ReadReport()))  # says what a corpus may be
