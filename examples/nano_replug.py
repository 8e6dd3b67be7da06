"""REPLUG's batch form (Revela, appendix A.3; arXiv 2506.16552; after Shi et al., 2023) in one file,
with torch and transformers only: a retriever learns an LM's ranking of chunks by likelihood.

    python examples/nano_replug.py [FOLDER]      # of text; without it, this project's docs

A frozen LM says how likely each chunk of a batch is after each other one. The retriever learns to
rank the other chunks as the LM does:

    P_LM(j | i) = softmax over j != i of log P(D_i | D_j) / tau_lm
    P_R(j | i)  = softmax over j != i of cos(query_i, passage_j) / tau
    loss        = mean over i of KL( P_LM(. | i) || P_R(. | i) )

log P(D_i | D_j) is the mean over the tokens of chunk i, read after chunk j; the first half of a
chunk's tokens is its query; both temperatures are 1e-3.

On this project's docs, in 77 s of two cores, the mean reciprocal rank of the second half of 200
chunks, asked for by the first half, stays: 0.223 and 0.221. Eight steps are too few for a gain; at
temperatures of 1e-3 most rows name one chunk, and the loss jumps from 0 to 13.

Smaller than in the appendix (theirs in brackets): 4 chunks a batch (16), one batch a step (32), 8
steps (4,500), four layers and their mean (all, the state at an EOS), all weights at a rate of 1e-4
(LoRA of rank 256 at 5e-4, warm-up, decay), SmolLM2-135M for both parts (Llama-3.2-1B predicts).

Differs from the appendix: its sums run over all j, i itself too, and a chunk after itself would win
trivially; it leaves open whether the likelihood is a mean or a sum over tokens.

--lm and --retriever are hub ids or folders. Without a hub, revela has a SmolLM2 (4 bits, instruct):
python -c "import revela.encoders.embedded as e; print(e.embedded_folder('embedded:smollm2-135m'))"

Shapes: B chunks of a batch, X the others of a chunk, M tokens of a context, L of a chunk, T tokens
that are predicted, N texts, W width of a vector, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Chunks of a batch; words and tokens of a chunk, at most; chunks that the score is measured on.
BATCH, WORDS, MAX_TOKENS, MEASURED = 4, 48, 96, 200
LAYERS, LEARNING_RATE = 4, 1e-4  # of the retriever, which is the lower part of a transformer
TAU_LM, TAU = 1e-3, 1e-3  # temperatures of the log-likelihoods and of the cosines
QUERY, PASSAGE = "query: ", "passage: "  # what the retriever reads before a text


# ---- text: chunks, and batches of them --------------------------------------------------------


class Chunk(NamedTuple):
    file: str
    text: str


def read_chunks(folder: Path) -> list[Chunk]:
    """Cut the files of a folder into chunks that end with a sentence, if one ends in time."""
    chunks = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".md", ".txt")):
        words, start = path.read_text("utf-8", "replace").split(), 0
        while window := words[start : start + WORDS]:
            ends = [i for i, word in enumerate(window, 1) if word[-1] in ".!?" and 2 * i > WORDS]
            size = ends[-1] if ends else WORDS
            chunks.append(Chunk(str(path.relative_to(folder)), " ".join(window[:size])))
            start += size
    return chunks


def batches(chunks: list[Chunk]) -> Iterator[list[Chunk]]:
    """Pair runs of contiguous chunks, without end: most batches are of two documents."""
    half = BATCH // 2
    runs = [chunks[i : i + half] for i in range(0, len(chunks) - half + 1, half)]
    while True:
        random.shuffle(runs)
        for one, other in zip(runs[::2], runs[1::2], strict=False):
            yield one + other


def load_tokenizer(name: str):
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="right")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def tokenize(tokenizer, texts: list[str], **options):
    options |= dict(padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    return tokenizer(texts, **options).to(DEVICE)


# ---- P_LM: which chunks help to predict which, by the LM --------------------------------------


@torch.no_grad()
def log_likelihoods(lm, tokenizer, texts: list[str]):
    """(B, B) log P(D_i | D_j) in row i, column j: the mean over the tokens of chunk i; 0 at j = i.

    The LM reads each D_j once, and all D_i continue its key-value cache.
    """
    contexts = [tokenize(tokenizer, [text])["input_ids"] for text in texts]
    chunks = tokenize(tokenizer, texts, add_special_tokens=False)
    ids_BL, is_token_BL = chunks["input_ids"], chunks["attention_mask"].bool()
    logprob_BB = torch.zeros(len(texts), len(texts), device=DEVICE)
    for j, context_1M in enumerate(contexts):
        others = [i for i in range(len(texts)) if i != j]
        memory = lm.base_model(context_1M, use_cache=True).past_key_values
        # The last token of D_j predicts the first one of D_i, so it is read again with D_i.
        memory.crop(-1)
        memory.batch_repeat_interleave(len(others))
        last = context_1M[:, -1:].expand(len(others), 1)
        # Padding is on the right, where no token sees it.
        given = torch.cat([last, ids_BL[others]], dim=1)
        states = lm.base_model(given, past_key_values=memory).last_hidden_state
        is_token = is_token_BL[others]
        logits_TV = lm.get_output_embeddings()(states[:, :-1][is_token])
        losses_T = F.cross_entropy(logits_TV, ids_BL[others][is_token], reduction="none")
        by_chunk = losses_T.split(is_token.sum(dim=1).tolist())
        logprob_BB[others, j] = -torch.stack([losses.mean() for losses in by_chunk])
    return logprob_BB


# ---- P_R: the same, by the retriever ----------------------------------------------------------


class Retriever(nn.Module):
    """Texts -> unit vectors: the mean over tokens of the states of a transformer's lower layers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(name)
        config.num_hidden_layers = min(LAYERS, config.num_hidden_layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:LAYERS]
        self.model = AutoModel.from_pretrained(name, config=config, dtype=torch.float32)
        self.tokenizer = load_tokenizer(name)

    def forward(self, prompt: str, texts: list[str]):
        tokens = tokenize(self.tokenizer, [prompt + text for text in texts])
        states_NLW = self.model(**tokens).last_hidden_state
        is_token_NL1 = tokens["attention_mask"][:, :, None]
        return F.normalize((states_NLW * is_token_NL1).sum(1) / is_token_NL1.sum(1), dim=1)


def halves(tokenizer, texts: list[str]) -> tuple[list[str], list[str]]:
    """The first and the second half of each text's tokens. The first half is the chunk's query."""
    options = dict(add_special_tokens=False, truncation=True, max_length=MAX_TOKENS)
    first, second = [], []
    read = tokenizer(texts, return_offsets_mapping=True, **options)["offset_mapping"]
    for text, spans in zip(texts, read, strict=True):
        middle = len(spans) // 2
        first.append(text[: spans[max(middle, 1) - 1][1]])
        second.append(text[spans[middle][0] : spans[-1][1]])
    return first, second


def cosines(retriever: Retriever, texts: list[str]):
    """(B, B) cos(query_i, passage_j) in row i, column j."""
    return retriever(QUERY, halves(retriever.tokenizer, texts)[0]) @ retriever(PASSAGE, texts).T


# ---- the loss, and training -------------------------------------------------------------------


def divergence(logprob_BB, cosine_BB):
    """The mean over i of KL(P_LM(. | i) || P_R(. | i)), both over j != i."""
    not_self_BB = ~torch.eye(len(cosine_BB), device=cosine_BB.device).bool()
    teacher_BX, student_BX = (
        (scores_BB[not_self_BB].view(len(scores_BB), -1) / tau).log_softmax(dim=1)
        for scores_BB, tau in ((logprob_BB, TAU_LM), (cosine_BB, TAU))
    )
    return (teacher_BX.exp() * (teacher_BX - student_BX)).sum(dim=1).mean()


def train(retriever: Retriever, lm, lm_tokenizer, chunks: list[Chunk], steps: int) -> None:
    trained = [p for p in retriever.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    for step, batch in zip(range(steps), batches(chunks), strict=False):
        start = time.perf_counter()
        texts = [chunk.text for chunk in batch]
        loss = divergence(log_likelihoods(lm, lm_tokenizer, texts), cosines(retriever, texts))
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step:2}  loss {loss:.3f}  {time.perf_counter() - start:.1f} s", flush=True)


# ---- the folder that sentence-transformers opens, and search ----------------------------------


def save(retriever: Retriever, folder: Path) -> None:
    retriever.model.save_pretrained(folder)
    retriever.tokenizer.chat_template = None  # a text is not a chat message
    retriever.tokenizer.save_pretrained(folder)
    width = retriever.model.config.hidden_size
    parts = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{part}"}
        for i, (part, path) in enumerate(parts)
    ]
    for name, content in {
        "sentence_bert_config.json": {"max_seq_length": MAX_TOKENS},
        "1_Pooling/config.json": {
            "word_embedding_dimension": width,
            "pooling_mode_mean_tokens": True,
        },
        "config_sentence_transformers.json": {"prompts": {"query": QUERY, "document": PASSAGE}},
        "modules.json": modules,
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2))


@torch.no_grad()
def encode(retriever: Retriever, prompt: str, texts: list[str]):
    """(N, W) vectors, a few texts at a time."""
    return torch.cat([retriever(prompt, texts[i : i + 32]) for i in range(0, len(texts), 32)])


def mean_reciprocal_rank(retriever: Retriever, texts: list[str]) -> float:
    """For each chunk's first half as a query: 1 / rank of its second half among all second halves.

    Training does not compare the two halves of a chunk: P_LM and P_R leave j = i out.
    """
    first, second = halves(retriever.tokenizer, texts)
    scores_NN = encode(retriever, QUERY, first) @ encode(retriever, PASSAGE, second).T
    rank_N = (scores_NN >= scores_NN.diag()[:, None]).sum(dim=1)
    return (1 / rank_N).mean().item()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    docs = Path(__file__).parents[1] / "docs"
    parser.add_argument("folder", type=Path, nargs="?", default=docs, help="of .md and .txt files")
    parser.add_argument("--query", default="how do I keep an index up to date?")
    parser.add_argument("--lm", default="HuggingFaceTB/SmolLM2-135M", help="hub id or folder")
    parser.add_argument("--retriever", default="HuggingFaceTB/SmolLM2-135M", help="the same")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default="runs/nano-replug")
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    random.seed(0)
    torch.manual_seed(0)

    chunks = read_chunks(args.folder)
    if len(chunks) < BATCH:
        parser.error(f"{args.folder} has fewer than {BATCH} chunks in .md and .txt files")
    retriever = Retriever(args.retriever).to(DEVICE)
    lm = AutoModelForCausalLM.from_pretrained(args.lm, dtype=torch.float32).to(DEVICE)
    texts = [chunk.text for chunk in chunks]
    asked = random.sample(texts, min(MEASURED, len(texts)))
    before = mean_reciprocal_rank(retriever, asked)
    train(retriever, lm, load_tokenizer(args.lm), chunks, args.steps)
    save(retriever, args.out)
    print(f"MRR of second halves: {before:.3f} -> {mean_reciprocal_rank(retriever, asked):.3f}")
    scores_N = encode(retriever, PASSAGE, texts) @ encode(retriever, QUERY, [args.query])[0]
    for i in scores_N.argsort(descending=True)[:3].tolist():
        print(f"{scores_N[i]:.3f}  {chunks[i].file}: {texts[i][:70]}")


if __name__ == "__main__":
    main()
