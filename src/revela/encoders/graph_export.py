"""Export a retriever to ONNX: token ids in, unit vectors out, without torch.

The graph holds all modules of a saved folder. Next to it are tokenizer.json, which truncates, pads
and lowers case as the model does, and retriever.json with the prompts, which the caller puts before
a text. An export is kept only if its vectors equal torch's. Exports in the cache, which graphs.py
opens, also give token vectors.

Shapes: B texts of a batch, L tokens.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from revela.encoders.after_transformer import TOKENS, VECTOR
from revela.encoders.base import truncate
from revela.encoders.bert import MASK
from revela.encoders.graph_encoder import IDS, GraphEncoder
from revela.encoders.graphs import CONFIG, EXPORT, TOKENIZER, export_folder, open_export
from revela.encoders.model_files import fingerprint
from revela.encoders.prompts import Prompts
from revela.encoders.torch_encoder import TorchEncoder
from revela.encoders.torch_model import open_model, slot_ids, text_vectors, transformer_of
from revela.errors import RevelaError, extra, first_line
from revela.files import atomic_write, check_free
from revela.quiet_libraries import silence_warnings
from revela.terminal import progress_bar
from revela.types import Vectors

log = logging.getLogger(__name__)
TOLERANCE = 1e-5  # between its vectors and torch's, in any component
MAX_CACHED = 150_000_000  # parameters of a model that is exported into the cache
INPUTS = (IDS, MASK)
SAMPLE = (
    "kidneys",
    "How are invoices archived?",
    "The relation between bone marrow and the immune response of mice has been studied for forty "
    "years.",
    "def area(width: float, height: float) -> float:\n    return width * height",
    "Übermäßig lange Wörter, 漢字 und emoji 🙂 come from other alphabets.",
    "The NATO summit in PARIS: café à la crème",
    " ".join(map(str, range(1000))),  # truncated, and its ends differ
)


def export_onnx(model: SentenceTransformer, out: Path, tokens: bool = False) -> float:
    """Export a retriever into a new folder; moves it to the CPU, in fp32.

    With ``tokens`` the graph also gives token vectors, as a second output.

    Returns:
        The largest difference between the graph's vectors and torch's, in any component.

    Raises:
        RevelaError: the extra is not installed, ``out`` exists, the model cannot be exported, or
            its vectors differ in ONNX.
    """
    with extra("train", "export to ONNX"):
        import onnxscript  # noqa: F401 (torch exports with it)
    check_free(out)
    model = model.cpu().float().eval()
    with atomic_write(out) as temporary, progress_bar("exporting", "part", total=2) as shown:
        temporary.mkdir()
        _write_graph(model, temporary / EXPORT, tokens)
        shown.update()
        _write_tokenizer(model, temporary / TOKENIZER)
        _write_config(model, temporary / CONFIG)
        differ = difference(open_export(temporary), model, tokens)
        shown.update()
        if differ > TOLERANCE:
            raise RevelaError(
                f"this model cannot be exported: its vectors differ by {differ:.1e} in ONNX"
            )
    return differ


def export_to_cache(folder: Path) -> None:
    """Export a small retriever into the cache, where ``open_graph`` finds it.

    Raises:
        RevelaError: as for ``export_onnx``; or it is too large, or reads a context.
    """
    model = open_model(folder, device="cpu")
    if sum(weight.numel() for weight in model.parameters()) > MAX_CACHED:
        raise RevelaError(f"it has more than {MAX_CACHED / 1e6:.0f} million weights")
    if slot_ids(model):
        raise RevelaError("it reads a context")
    export_onnx(model, export_folder(fingerprint(folder)), tokens=True)
    log.info(f"{folder} is exported to ONNX, so that later runs do not need torch")


class _Graph(nn.Module):
    """A retriever as the exporter needs it: tensors in, tensors out."""

    def __init__(self, model: SentenceTransformer, tokens: bool) -> None:
        super().__init__()
        self.model, self.tokens = model, tokens

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        features = {IDS: input_ids, MASK: attention_mask}
        return tuple(text_vectors(self.model, features, self.tokens))


def _write_graph(model: SentenceTransformer, file: Path, tokens: bool) -> None:
    if transformer_of(model) is None:
        raise RevelaError(
            f"a {type(model[0]).__name__} cannot be exported to ONNX: give a transformer"
        )
    example = model.preprocess(["two texts of", "different lengths, so that one of them is padded"])
    axes = {0: "batch", 1: "length"}
    try:
        with torch.no_grad(), silence_warnings():
            program = torch.onnx.export(
                _Graph(model, tokens).eval(),
                tuple(example[name] for name in INPUTS),
                dynamo=True,
                verbose=False,
                input_names=list(INPUTS),
                output_names=[VECTOR, TOKENS] if tokens else [VECTOR],
                dynamic_shapes=(axes, axes),
            )
    except RuntimeError as error:  # the exporter's own errors are subclasses
        reason = first_line(error.__cause__ or error)
        raise RevelaError(
            f"{type(model[0].model).__name__} cannot be exported to ONNX ({reason}): use torch"
        ) from error
    assert program is not None  # as dynamo=True
    program.save(file)


def _write_config(model: SentenceTransformer, file: Path) -> None:
    config = {
        "prompts": Prompts.named(model.prompts)._asdict(),
        "max_tokens": model.max_seq_length,
        "dimension": model.get_embedding_dimension(),
        "similarity": "cosine",
        "inputs": INPUTS,
        "output": VECTOR,
        "special_tokens": model.tokenizer.all_special_ids,
    }
    file.write_text(json.dumps(config, indent=1) + "\n")


def _write_tokenizer(model: SentenceTransformer, file: Path) -> None:
    from tokenizers import Tokenizer

    own = model.tokenizer
    tokenizer = Tokenizer.from_str(own.backend_tokenizer.to_str())
    tokenizer.enable_padding(
        direction=own.padding_side, pad_id=own.pad_token_id, pad_token=own.pad_token
    )
    truncate(tokenizer, model.max_seq_length or None, own.truncation_side)
    tokenizer.save(str(file))


def difference(encoder: GraphEncoder, model: SentenceTransformer, tokens: bool = False) -> float:
    """The largest difference between vectors of ``SAMPLE`` by a graph and by sentence-transformers,
    as queries and as passages.
    """
    pairs = list[tuple[Vectors, Vectors]]()
    for ours, stock in (
        (encoder.encode_queries, model.encode_query),
        (encoder.encode_passages, model.encode_document),
    ):
        for texts in (SAMPLE, SAMPLE[:1]):
            expected = stock(list(texts), normalize_embeddings=True, show_progress_bar=False)
            pairs.append((ours(texts), expected))
    if tokens:
        reference = TorchEncoder(model)
        queries = zip(encoder.query_tokens(SAMPLE), reference.query_tokens(SAMPLE), strict=True)
        pairs += [(actual.tokens, expected.tokens) for actual, expected in queries]
    return max(float(np.abs(actual - expected).max()) for actual, expected in pairs)
