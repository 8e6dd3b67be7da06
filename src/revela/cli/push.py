"""``revela push``: a retriever to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from revela.cli.main import ELSEWHERE, app


@app.command(group=ELSEWHERE)
def push(
    model: Path,
    name: str,
    *,
    public: Annotated[bool, Parameter(negative=())] = False,
    update: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Upload a retriever to the Hugging Face hub, private unless --public.

    Sends the model and its card, which names no folder; no checkpoints, metrics or text.
    OWNER/NAME is then a model for every verb.

    Parameters
    ----------
    model:
        Folder made by revela train, or any Sentence-Transformers folder.
    name:
        OWNER/NAME on the hub.
    public:
        Make it public; a model that the hub already has keeps its visibility.
    update:
        Replace the model of this name on the hub.
    """
    from revela.retriever.publish import push as upload

    print(upload(model, name, public=public, update=update))
