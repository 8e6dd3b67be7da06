"""Size, processor seconds of one thread and nDCG@10 of a retriever's ONNX forms, beside torch.

    python -m research.benchmarks.exported --model my-retriever --on COLLECTIONS/med

Each form encodes the same passages, sorted by length, and the queries. Processor seconds count, so
other work on the machine does not.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from revela.evaluation.beir import load_collection
from revela.evaluation.metrics import mean_scores
from revela.index.exact import top_k
from revela.retriever.build import load_retriever
from revela.retriever.encode import RetrieverEncoder
from revela.retriever.onnx import MODEL, OnnxEncoder, export_onnx
from revela.silence import silence_libraries
from revela.weights import resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--on", type=Path, required=True, help="a BEIR-layout folder")
    parser.add_argument(
        "--max-tokens", type=int, default=0, help="cut texts here; 0: where the model does"
    )
    arguments = parser.parse_args()
    silence_libraries()
    import torch

    torch.set_num_threads(1)
    collection = load_collection(arguments.on)
    model = load_retriever(resolve(arguments.model))
    if arguments.max_tokens:
        model.max_seq_length = min(arguments.max_tokens, model.max_seq_length)
    with tempfile.TemporaryDirectory() as hidden:
        forms = {"torch, fp32": RetrieverEncoder(model.cpu().float(), bf16=False)}
        sizes = {"torch, fp32": sum(p.numel() for p in model.parameters()) * 4 / 1e6}
        for name, int8 in (("onnx, fp32", False), ("onnx, int8", True)):
            folder = Path(hidden) / name
            start = time.process_time()
            check = export_onnx(model, folder, int8)
            print(f"{name}: exported in {time.process_time() - start:.0f} s; {check}", flush=True)
            forms[name], sizes[name] = (
                OnnxEncoder(folder, threads=1),
                (folder / MODEL).stat().st_size / 1e6,
            )
        for name, encoder in forms.items():
            encoder.encode_passages(collection.documents[:8])
            start = time.process_time()
            passages = encoder.encode_passages(collection.documents)
            seconds = time.process_time() - start
            indices, scores = top_k(encoder.encode_queries(collection.queries), passages, 100)
            run = {
                q: {collection.document_ids[d]: float(s) for d, s in zip(row, values, strict=True)}
                for q, row, values in zip(collection.query_ids, indices, scores, strict=True)
            }
            ndcg = mean_scores(collection.qrels, run)["ndcg@10"]
            rate = len(collection.documents) / seconds
            took = f"{seconds:.1f} s ({rate:.1f} passages/s)"
            print(f"{name}: {sizes[name]:.0f} MB, {took}, nDCG@10 {ndcg:.4f}", flush=True)


if __name__ == "__main__":
    main()
