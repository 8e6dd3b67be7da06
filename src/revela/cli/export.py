"""``revela export``: a retriever to ONNX."""

from __future__ import annotations

from typing import Annotated

from revela.cli.flags import PROMPTS, Flat, Out, PromptFlags
from revela.errors import extra
from revela.files import check_free


def export(model: str, *, out: Out, prompts: Annotated[PromptFlags, Flat] = PROMPTS) -> None:
    """Export a retriever to ONNX: a graph from token ids to unit vectors, checked against torch,
    with its tokenizer.json.

    Parameters
    ----------
    model:
        The retriever: a Sentence-Transformers folder, a hub id or embedded:minilm-l6.
    out:
        Folder for the export.
    """
    check_free(out)
    from revela.encoders.graphs import EXPORT
    from revela.encoders.load import resolve

    folder = resolve(model)
    with extra("train", "export to ONNX"):
        from revela.encoders.graph_export import export_onnx
        from revela.encoders.torch_model import open_model

        retriever = open_model(folder, prompts=prompts.given)
    difference = export_onnx(retriever, out)
    size = sum(file.stat().st_size for file in out.glob(f"{EXPORT}*")) / 1e6
    print(f"{out / EXPORT}: {size:,.0f} MB; differs from torch's vectors by {difference:.0e}")
