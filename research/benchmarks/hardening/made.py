"""A synthetic corpus, tiny models, and the command line as a process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[3]
TOPICS = ["ocean", "engine", "garden", "planet", "market", "violin", "enzyme", "castle"]
PREFIX = "revela: "  # of an error's sentence


def sentences(rng: random.Random, count: int) -> str:
    topic = rng.choice(TOPICS)
    made = (
        " ".join(f"{topic}{rng.randrange(9)}" for _ in range(rng.randint(5, 9)))
        for _ in range(count)
    )
    return " ".join(f"{words.capitalize()}." for words in made)


def rows(count: int, seed: int = 0) -> Iterator[dict[str, object]]:
    rng = random.Random(seed)
    for i in range(count):
        text = sentences(rng, 8)
        yield {"_id": f"d{i}", "title": f"About {i}", "text": text, "year": 1990 + i % 30}


def write_corpus(path: Path, count: int = 80) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(count)))
    return path


def byte_tokenizer(texts: Iterable[str], vocabulary: int = 400) -> PreTrainedTokenizerFast:
    """A BPE tokenizer of bytes, and of what is frequent in a few texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*special.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def tokenizer(folder: Path) -> None:
    """Write one of the made-up corpus."""
    byte_tokenizer(str(row["text"]) for row in rows(60)).save_pretrained(folder)


def tiny_lm(folder: Path) -> Path:
    """A Llama of four layers and 32 dimensions, with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=2048,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_retriever(folder: Path) -> Path:
    """A vector of 16 numbers for each token, and their mean."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from tokenizers import Tokenizer

    tokenizer(folder.with_name("tokenizer"))
    made = Tokenizer.from_file(str(folder.with_name("tokenizer") / "tokenizer.json"))
    torch.manual_seed(0)
    parts = [modules.StaticEmbedding(made, embedding_dim=16), modules.Normalize()]
    SentenceTransformer(modules=parts).save_pretrained(str(folder))
    return folder


def environment(cache: Path) -> dict[str, str]:
    """The environment of a process that runs this checkout on one core."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    given = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "REVELA_CACHE": str(cache)}
    return {**os.environ, **given, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def revela(*command: object, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    line = [sys.executable, "-m", "revela", *map(str, command)]
    return subprocess.run(line, env=environment(cache), capture_output=True, text=True, check=False)


def fault(code: int, errors: str) -> str:
    """How a command failed; "" if it succeeded, or ended with one sentence and code 2."""
    sentences = [line for line in errors.splitlines() if line.startswith(PREFIX)]
    if "Traceback (most recent" in errors or "panicked at" in errors:
        return "traceback: " + errors.strip().splitlines()[-1][:200]
    if code not in (0, 2):
        return f"exit code {code}"
    if code == 2 and len(sentences) != 1 and "╭─ Error" not in errors:
        return f"{len(sentences)} sentences: {errors.strip()[-200:]}"
    return ""


def report(part: str, **figures: object) -> None:
    """Print a part's last line: figures as JSON."""
    print(json.dumps({"part": part, **figures}))
