"""The snippets of docs/integrations.md give revela's own vectors, wherever the package is
installed.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "integrations.md").read_text()
SNIPPETS = dict(re.findall(r"^## (\S+)(?:(?!^## ).)*?```python\n(.*?)```", PAGE, re.S | re.M))
PACKAGES = {
    "LangChain": "langchain_huggingface",
    "LlamaIndex": "llama_index.embeddings.huggingface",
    "Haystack": "haystack_integrations.components.embedders.sentence_transformers",
    "onnxruntime": "onnxruntime",
}


def test_all_snippets_are_known():
    assert set(SNIPPETS) == set(PACKAGES)


@pytest.mark.parametrize("name", PACKAGES)
def test_snippet_gives_our_vectors(name, tmp_path, monkeypatch, saved_retriever):
    pytest.importorskip(PACKAGES[name])
    from revela import Retriever

    (tmp_path / "my-retriever").symlink_to(saved_retriever)
    monkeypatch.chdir(tmp_path)
    if name == "onnxruntime":
        pytest.importorskip("onnxscript")
        from revela.retriever.build import load_retriever
        from revela.retriever.onnx import export_onnx

        export_onnx(load_retriever("my-retriever"), Path("my-retriever-onnx"))
    found: dict[str, object] = {}
    exec(SNIPPETS[name], found)
    retriever = Retriever("my-retriever", precision="fp32")
    np.testing.assert_allclose(
        [found["query_vector"]], retriever.encode_queries(["how are invoices archived"]), atol=1e-5
    )
    passages = retriever.encode_passages(
        ["Invoices are kept for ten years.", "The garden opens at nine."]
    )
    np.testing.assert_allclose(found["passage_vectors"], passages, atol=1e-5)
