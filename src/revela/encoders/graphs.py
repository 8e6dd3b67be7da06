"""Open a retriever's folder as a graph, in the precision that is fastest on this processor.

The graph is built from a BERT's weights, or read from the export of graph_export.py in the cache.
An int8 copy is made once, and cached if it retrieves as well as the graph in fp32.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from revela.encoders.after_transformer import Unsupported, with_modules
from revela.encoders.base import check_max_tokens, truncate
from revela.encoders.bert import STATES, bert, is_bert, max_positions
from revela.encoders.cpu import fastest, openvino_core
from revela.encoders.graph_encoder import Graph, GraphEncoder
from revela.encoders.int8 import quantised
from revela.encoders.model_files import Weights, fingerprint, modules_of, opening, read_config
from revela.encoders.prompts import OWN, GivenPrompts, prompts_of
from revela.files import atomic_write, cache_folder, writing
from revela.types import Precision

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)
VERSION = 4  # format of exports and of int8 copies
EXPORT, TOKENIZER, CONFIG = "model.onnx", "tokenizer.json", "retriever.json"  # files of an export
LEAST_COSINE = 0.98  # minimum of the mean cosine between vectors in int8 and in fp32
SEQUENCES, LENGTH, BATCH = 64, 32, 16  # of random tokens for measuring the ranges of int8
# Texts in halves; each first half should find its second.
SAMPLE = (
    ("Invoices are kept for ten years in the cellar.", "After that the paper is shredded."),
    ("Blood pressure was measured twice in each arm.", "The second reading was often lower."),
    ("def area(width, height):", "    return width * height  # of a rectangle"),
    ("The committee met on Tuesday.", "Members voted to raise the fee for new licences."),
    ("Die Katze schläft auf dem Sofa.", "Abends jagt sie Mäuse im Garten."),
    ("Le musée ouvre à neuf heures.", "L'entrée est gratuite le dimanche."),
    ("Поезд отправляется в полдень.", "Билеты продаются на вокзале."),
    ("図書館は月曜日に閉まっています。", "本は二週間借りることができます。"),
    ("水库的水位在春天上升。", "渔民在岸边修理他们的船。"),
    ("تفتح المدرسة أبوابها في الخريف.", "يتعلم الأطفال القراءة والكتابة."),
)


def export_folder(digest: str) -> Path:
    """The cached export of a retriever with this fingerprint."""
    return cache_folder() / "onnx" / f"{digest}-{VERSION}"


def open_graph(
    folder: Path,
    precision: Precision = "auto",
    max_tokens: int | None = None,
    prompts: GivenPrompts = OWN,
) -> GraphEncoder | None:
    """Open a Sentence-Transformers folder as a graph; None if it has to be read by torch.

    Raises:
        RevelaError: a file is damaged, or ``max_tokens`` exceeds the model's positions.
    """
    modules = modules_of(folder)
    if not modules or modules[0][0] != "Transformer" or (folder / "context").is_dir():
        return None
    inside = modules[0][1]
    if not (inside / TOKENIZER).is_file():
        return None
    encoder: GraphEncoder | None = None
    with opening(folder), suppress(Unsupported):
        config = _read(inside / "config.json")
        if max_tokens is not None:
            check_max_tokens(max_tokens, max_positions(config), str(folder))
        export, own = export_folder(fingerprint(folder)), prompts_of(folder, prompts)
        if (export / EXPORT).is_file():
            encoder = open_export(export, folder, max_tokens, own)
        elif is_bert(config) and not _is_unusual(inside):
            states, table_VD = bert(config, Weights(inside))
            width = read_config(folder).get("truncate_dim")
            graph = Graph(with_modules(states, modules[1:], width), "fp32", table_VD)
            tokenizer, limit = _tokenizer(inside, config), max_tokens or _limit(inside, config)
            padding = config.get("pad_token_id") or 0
            encoder = GraphEncoder(graph, tokenizer, own, limit, padding, str(folder))
    if encoder is None:
        return None
    if precision == "auto":
        # A decoder has channels so large that random tokens do not show what int8 loses: a fitted
        # SmolLM2 passes the test below, but has a cosine of 0.94 on its own text.
        precision = fastest(int8=is_bert(config))
    if precision == "int8":
        return _in_int8(encoder, folder)
    return encoder.with_graph(precision=precision)


def open_export(
    export: Path,
    folder: Path | None = None,
    max_tokens: int | None = None,
    prompts: tuple[str, str] | None = None,
) -> GraphEncoder:
    """Open an export of ``revela export``, in fp32; ``folder`` is its retriever's. The other
    arguments replace the export's own settings.
    """
    from tokenizers import Tokenizer

    about = json.loads((export / CONFIG).read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(export / TOKENIZER))
    padding = (tokenizer.padding or {}).get("pad_id", 0)
    prompts = prompts or (about["prompts"]["query"], about["prompts"]["passage"])
    limit, place = max_tokens or about["max_tokens"], folder or export
    graph = Graph(openvino_core().read_model(export / EXPORT), "fp32")
    return GraphEncoder(graph, tokenizer, prompts, limit, padding, str(place))


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON file; {} if it is missing."""
    read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return read


def _settings(inside: Path) -> dict[str, Any]:
    """The settings of sentence-transformers for a transformer; their file has had several names."""
    return _read(next(iter(inside.glob("sentence_*_config.json")), inside / "no file"))


def _is_unusual(inside: Path) -> bool:
    """Whether a transformer has settings that only sentence-transformers supports."""
    known = ("max_seq_length", "do_lower_case", "transformer_task", "modality_config")
    settings = _settings(inside)
    rest = {k for k, v in settings.items() if v} - {*known, "module_output_name"}
    output = settings.get("module_output_name", STATES)
    return bool(rest) or output != STATES


def _limit(inside: Path, config: dict[str, Any]) -> int | None:
    """The maximum number of tokens of a text by a transformer's configuration, at most its number
    of positions; None: no limit.
    """
    tokenizer, positions = _read(inside / "tokenizer_config.json"), max_positions(config)
    limits = _settings(inside).get("max_seq_length"), tokenizer.get("model_max_length")
    limit = next((int(limit) for limit in limits if limit), positions)
    return min(limit, positions) if limit and positions else limit


def _tokenizer(inside: Path, config: dict[str, Any]) -> Any:
    """A transformer's tokenizer, of the ``tokenizers`` library, as transformers makes it."""
    from tokenizers import Tokenizer
    from tokenizers.normalizers import BertNormalizer, Lowercase, Sequence

    tokenizer = Tokenizer.from_file(str(inside / TOKENIZER))
    about = _read(inside / "tokenizer_config.json")
    family = "BertTokenizer" if config.get("model_type") == "bert" else ""
    if (about.get("tokenizer_class") or family).removesuffix("Fast") == "BertTokenizer":
        # transformers ignores the normalizer in tokenizer.json.
        tokenizer.normalizer = BertNormalizer(
            handle_chinese_chars=about.get("tokenize_chinese_chars", True),
            strip_accents=about.get("strip_accents"),
            lowercase=about.get("do_lower_case", True),
        )
    if _settings(inside).get("do_lower_case"):
        own = [tokenizer.normalizer] if tokenizer.normalizer else []
        tokenizer.normalizer = Sequence([Lowercase(), *own])
    truncate(tokenizer, 1, about.get("truncation_side") or "")  # the encoder sets the maximum
    return tokenizer


def _in_int8(encoder: GraphEncoder, folder: Path) -> GraphEncoder:
    """The encoder with an int8 copy of its graph, made if necessary; bf16 if the copy is worse."""
    import openvino as ov

    place = cache_folder() / "int8" / f"{fingerprint(folder)}-{VERSION}"
    if not place.is_dir():
        copy = quantised(encoder.graph.model, _random_batches(encoder))
        reason = _difference(encoder, encoder.with_graph(model=copy, precision="int8"))
        with writing(place.parent, wait=True):
            if not place.is_dir():  # else another process has made it
                with atomic_write(place) as temporary:
                    temporary.mkdir()
                    (temporary / "about.json").write_text(json.dumps({"refused": reason}))
                    if not reason:
                        ov.save_model(copy, temporary / "graph.xml", compress_to_fp16=False)
    if reason := json.loads((place / "about.json").read_text())["refused"]:
        log.info(f"{folder} is not used in int8: {reason}")
        return encoder.with_graph(precision="bf16")
    graph = openvino_core().read_model(place / "graph.xml")
    return encoder.with_graph(model=graph, precision="int8")


def _random_batches(encoder: GraphEncoder) -> Iterator[dict[str, NDArray[Any]]]:
    """Random tokens of the vocabulary, between the special tokens around a text."""
    tokenizer, rng = encoder.tokenizer, np.random.default_rng(0)
    words = np.setdiff1d(np.arange(tokenizer.get_vocab_size()), encoder.special_ids)
    around = tokenizer.encode("").ids
    for _ in range(SEQUENCES // BATCH):
        ids_BL = rng.choice(words, size=(BATCH, LENGTH)).astype(np.int64)
        if around:
            ids_BL[:, 0], ids_BL[:, -1] = around[0], around[-1]
        yield encoder.graph.inputs(ids_BL, np.ones_like(ids_BL))


def _difference(whole: GraphEncoder, copy: GraphEncoder) -> str:
    """Why a copy is worse than the graph; "" if it is not."""
    firsts, seconds = zip(*SAMPLE, strict=True)
    vectors, found = [], []
    for encoder in (whole, copy):
        queries_ND, passages_ND = encoder.encode_queries(firsts), encoder.encode_passages(seconds)
        vectors.append(np.concatenate([queries_ND, passages_ND]))
        right = (queries_ND @ passages_ND.T).argmax(axis=1) == np.arange(len(SAMPLE))
        found.append(int(right.sum()))
    cosine = float((vectors[0] * vectors[1]).sum(axis=1).mean())
    if cosine < LEAST_COSINE:
        return f"its vectors have a cosine of {cosine:.3f} to those in fp32"
    if found[1] < found[0]:
        return f"it finds {found[1]} of {len(SAMPLE)} texts by their first half; fp32, {found[0]}"
    return ""
