"""``revela push``: a retriever to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from revela.cli.main import app


@app.command
def push(
    model: Path,
    name: str,
    *,
    public: Annotated[bool, Parameter(negative=())] = False,
    update: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Upload a retriever to the Hugging Face hub, private unless --public.

    What loads it is sent, and its card, which names no folder; no checkpoints, metrics
    or text. OWNER/NAME is then a model for every verb.

    Parameters
    ----------
    model:
        Folder made by revela train, or any Sentence-Transformers folder.
    name:
        OWNER/NAME on the hub.
    public:
        For everyone to see; a model that the hub has already stays as visible as it is.
    update:
        Replace the model that the hub has by this name.
    """
    from revela.retriever.publish import push as upload

    print(upload(model, name, public=public, update=update))
