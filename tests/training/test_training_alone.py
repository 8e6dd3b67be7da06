"""Training and evaluation where the packages of search and of other extras are missing: what a
machine with a GPU and without a network may lack.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from conftest import TINY, make_rows
from tests.collection_folder import write_collection, write_lines
from tests.test_core import SOURCE, site_without

MISSING = (
    *("lancedb", "openvino", "fastapi", "starlette", "uvicorn", "mcp", "mteb"),
    *("mammoth", "pptx", "openpyxl", "pypdfium2", "onnx", "onnxscript", "onnxruntime"),
    *("tree_sitter", "jinja2", "matplotlib", "prometheus_fastapi_instrumentator"),
)
RUN = """
import json, sys
from pathlib import Path
from revela import Retriever, evaluate
from revela.training.on_files import train_on_files
from revela.training.recipe import Recipe

lm, corpus, collection, out, settings = sys.argv[1:]
recipe = Recipe.of(model=lm, lm=lm, **json.loads(settings))
train_on_files([Path(corpus)], Path(out), recipe)
scores = evaluate([out], [collection])
vectors = Retriever(out).encode_passages(["ocean01 ocean02"])
print(json.dumps([sorted(scores["sea"]), len(vectors)]))
"""
STEP = TINY | dict(max_steps=1, gate_heads=0, check_every=1, held_out=0.3)


def test_a_step_an_evaluation_and_a_saved_model_need_no_search(tiny_lm_folder, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(site_without(MISSING))
    write_lines(tmp_path / "corpus.jsonl", make_rows(40))
    documents = [{"_id": f"d{i}", "text": f"ocean{i} engine{i} garden."} for i in range(4)]
    write_collection(tmp_path / "sea", documents, {"q": "ocean1"}, {("q", "d1"): 1})
    path = os.pathsep.join(map(str, (tmp_path / "site", SOURCE)))
    environment = {**os.environ, "PYTHONPATH": path, "REVELA_CACHE": str(tmp_path / "cache")}
    given = tiny_lm_folder, tmp_path / "corpus.jsonl", tmp_path / "sea", tmp_path / "out"
    command = [sys.executable, "-W", "ignore", "-c", RUN, *map(str, given), json.dumps(STEP)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    systems, count = json.loads(done.stdout.splitlines()[-1])
    assert "out" in systems and "BM25" in systems and count == 1
    code = "import revela, importlib; importlib.import_module('lancedb')"
    refused = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert refused.returncode != 0  # the packages are really missing
