"""``revela export``: a retriever as ONNX."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from revela.cli.flags import Out
from revela.cli.main import app
from revela.errors import RevelaError


@app.command
def export(
    model: str,
    *,
    out: Out,
    int8: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Export a retriever to ONNX: a graph from token ids to unit vectors, checked against torch,
    with its tokenizer.json.

    Parameters
    ----------
    model:
        The retriever: a Sentence-Transformers folder, a hub id or embedded:minilm-l6.
    out:
        Folder for the export.
    int8:
        Quantise it to 8 bits: a third of the size, faster, and slightly different vectors.
    """
    if out.exists():
        raise RevelaError(f"{out} exists: choose another --out")
    from revela.retriever.build import load_retriever
    from revela.retriever.onnx import MODEL, export_onnx
    from revela.silence import silence_libraries
    from revela.weights import resolve

    silence_libraries()
    check = export_onnx(load_retriever(resolve(model)), out, int8=int8)
    size = sum(file.stat().st_size for file in out.glob(f"{MODEL}*")) / 1e6
    agreement = (
        f"least cosine {check.cosine:.4f}" if int8 else f"largest difference {check.difference:.0e}"
    )
    print(f"{out / MODEL}: {size:,.0f} MB; {agreement} from torch's vectors")
