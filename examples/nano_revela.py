"""Revela (Cai et al., ICLR 2026; arXiv 2506.16552) in one file, with torch and transformers only:
a retriever learns to search a folder of text, without labels, from an LM's next-token loss.

    python examples/nano_revela.py [FOLDER]      # of text; without it, this project's docs

The retriever says how similar the chunks of a batch are. The language model predicts each chunk
while it attends to the others, to each as much as the retriever says. Attention to a chunk that
helps lowers the loss, so its gradient teaches the retriever which chunks belong together:

    Sim_ij = softmax over j != i of cos(query_i, passage_j) / tau      (section 3)
    b_i    = sum over j of Sim_ij softmax(Q_i K_j^T / sqrt(D)) V_j     (eqs. 5-7; V-normalised)
    h_i    = s_i + b_i                 --form paper, the default       (eq. 8)
    h_i    = (1 - g) s_i + g b_i       --form gated, of this project
    loss   = mean of -log p(a token of chunk i | the tokens before it, the other chunks)

A chunk's query is the first half of its tokens. In the paper's form b joins all layers, and the LM
is trained along. In the gated form g is 0.3 in every head of the upper 40 % of the LM's layers; it
and the LM are not trained.

On this project's docs, in 108 s of two cores, the mean reciprocal rank of the second half of 200
chunks, asked for by the first half, falls from 0.239 to 0.208: five steps are too few. The LM has
to learn to use b first; the paper trains 10,000 steps of 32 such batches.

Smaller than in the paper (theirs in brackets): 8 chunks a batch (16), one batch a step (32), 5
steps (10,000), six layers and their mean (all, the state at an EOS), all weights at one rate (LoRA
of rank 256, warm-up, decay), SmolLM2-135M for both parts (Llama-3.2-1B predicts).

--lm and --retriever are hub ids or folders. Without a hub, revela has a SmolLM2 (4 bits, instruct):
python -c "import revela.encoders.embedded as e; print(e.embedded_folder('embedded:smollm2-135m'))"

Shapes: B chunks of a batch, L tokens of a chunk, M of a chunk that is attended to, T tokens that
are predicted, N texts, H heads, D width of a head, W width of a vector, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Chunks of a batch; words and tokens of a chunk, at most; chunks that the score is measured on.
BATCH, WORDS, MAX_TOKENS, MEASURED = 8, 48, 96, 200
LAYERS, LEARNING_RATE = 6, 4e-4  # of the retriever, which is the lower part of a transformer
QUERY, PASSAGE = "query: ", "passage: "  # what the retriever reads before a text


@dataclass(frozen=True)
class Form:
    """What differs between the paper's form and the gated form."""

    tau: float
    sim_dtype: torch.dtype  # the rounding of bf16 softens a Sim of so small a tau as the paper's
    standardise: bool  # divide the cosines of a row by their standard deviation
    v_norm: bool  # divide b_ij by the mean norm of the values that it is made of
    gate: float | None  # g, the same for all heads and not trained; None: h = s + b
    first_layer: float  # the lowest layer with in-batch attention, as a share of the LM's depth
    train_lm: bool  # False: the LM is frozen


FORMS = {
    "paper": Form(
        tau=1e-4, sim_dtype=torch.bfloat16, standardise=False,
        v_norm=True, gate=None, first_layer=0.0, train_lm=True,
    ),
    "gated": Form(
        tau=1.0, sim_dtype=torch.float32, standardise=True,
        v_norm=False, gate=0.3, first_layer=0.6, train_lm=False,
    ),
}  # fmt: skip


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
    """Pair runs of contiguous chunks, without end: most batches are of two documents.

    Random chunks do not help to predict one another: with them the paper's BEIR mean falls from 34
    to 4.
    """
    half = BATCH // 2
    runs = [chunks[i : i + half] for i in range(0, len(chunks) - half + 1, half)]
    while True:
        random.shuffle(runs)
        for one, other in zip(runs[::2], runs[1::2], strict=False):
            yield one + other


# ---- the retriever, and Sim -------------------------------------------------------------------


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


def load_tokenizer(name: str):
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="right")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def tokenize(tokenizer, texts: list[str]):
    options = dict(padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    return tokenizer(texts, **options).to(DEVICE)


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


def similarity(query_BW, passage_BW, form: Form):
    """Sim (B, B): softmax over j != i of cos(query_i, passage_j) / tau."""
    scores_BB = query_BW.to(form.sim_dtype) @ passage_BW.to(form.sim_dtype).T
    is_self_BB = torch.eye(len(scores_BB), device=scores_BB.device).bool()
    if form.standardise:
        others_BX = scores_BB[~is_self_BB].view(len(scores_BB), -1)
        scores_BB = scores_BB / others_BX.std(dim=1, correction=0, keepdim=True)
    return (scores_BB / form.tau).masked_fill(is_self_BB, -torch.inf).softmax(dim=1).float()


# ---- in-batch attention -----------------------------------------------------------------------


def in_batch_attention(query_BHLD, key_BHMD, value_BHMD, sim_BB, is_token_BM, scale, v_norm):
    """b (B, H, L, D): what each chunk i takes from the other chunks j."""
    # eq. 5: every token l of chunk i attends to all tokens m of chunk j
    scores_HBLBM = torch.einsum("ihld,jhmd->hiljm", query_BHLD, key_BHMD) * scale
    attention_HBLBM = scores_HBLBM.masked_fill(~is_token_BM, -torch.inf).softmax(dim=-1)
    # eq. 6: V-normalisation
    if v_norm:
        norm_HBLB = torch.einsum("hiljm,jhm->hilj", attention_HBLBM, value_BHMD.norm(dim=-1))
        attention_HBLBM = attention_HBLBM / (norm_HBLB[..., None] + 1e-6)
    # eq. 7: b_i = sum over j of Sim_ij b_ij
    weighted_HBLBM = sim_BB[:, None, :, None] * attention_HBLBM
    return torch.einsum("hiljm,jhmd->ihld", weighted_HBLBM, value_BHMD)


def attention(layer, query, key, value, _mask, scaling, sim_BB, is_token_BL, form: Form, **_):
    """The attention of an LM's layer to two streams, which are the two halves of the 2B rows.

    Stream e is the plain LM. Stream h attends to its own chunk, s, and to e in the others, b.
    """
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    # Padding is on the right, where no token sees it.
    own = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    if layer.layer_idx >= int(form.first_layer * layer.config.num_hidden_layers):
        (e, s), (_, query_h) = own.chunk(2), query.chunk(2)
        (key_e, _), (value_e, _) = key.chunk(2), value.chunk(2)
        given = query_h, key_e, value_e, sim_BB, is_token_BL, scaling, form.v_norm
        # The backward pass repeats this: H x (B x L)^2 numbers a layer are too many to keep.
        b = checkpoint(in_batch_attention, *given, use_reentrant=False)
        # eq. 8, or gated
        h = s + b if form.gate is None else (1 - form.gate) * s + form.gate * b
        own = torch.cat([e, h])
    return own.transpose(1, 2), None


transformers.AttentionInterface.register("in_batch", attention)


def next_token_loss(lm, tokens, sim_BB, form: Form):
    """Mean of -log p(token) over all tokens but the first of each chunk, in stream h."""
    ids_BL, is_token_BL = tokens["input_ids"], tokens["attention_mask"].bool()
    given = dict(sim_BB=sim_BB, is_token_BL=is_token_BL, form=form, use_cache=False)
    states = lm.base_model(input_ids=torch.cat([ids_BL, ids_BL]), **given).last_hidden_state
    h_BLW, is_next_BL = states.chunk(2)[1], is_token_BL[:, 1:]
    logits_TV = lm.get_output_embeddings()(h_BLW[:, :-1][is_next_BL])
    return F.cross_entropy(logits_TV, ids_BL[:, 1:][is_next_BL])


# ---- training ---------------------------------------------------------------------------------


def train(retriever: Retriever, lm, lm_tokenizer, chunks: list[Chunk], form: Form, steps: int):
    lm.requires_grad_(form.train_lm)
    trained = [p for p in (*retriever.parameters(), *lm.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    for step, batch in zip(range(steps), batches(chunks), strict=False):
        start = time.perf_counter()
        texts = [chunk.text for chunk in batch]
        query_BW = retriever(QUERY, halves(retriever.tokenizer, texts)[0])
        passage_BW = retriever(PASSAGE, texts)
        sim_BB = similarity(query_BW, passage_BW, form)
        loss = next_token_loss(lm, tokenize(lm_tokenizer, texts), sim_BB, form)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        print(f"step {step:2}  loss {loss:.3f}  {seconds:.1f} s", flush=True)


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

    Training does not compare the two halves of a chunk: Sim leaves j = i out.
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
    parser.add_argument("--form", choices=FORMS, default="paper")
    parser.add_argument("--lm", default="HuggingFaceTB/SmolLM2-135M", help="hub id or folder")
    parser.add_argument("--retriever", default="HuggingFaceTB/SmolLM2-135M", help="the same")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default="runs/nano-revela")
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    random.seed(0)
    torch.manual_seed(0)

    chunks = read_chunks(args.folder)
    if len(chunks) < BATCH:
        parser.error(f"{args.folder} has fewer than {BATCH} chunks in .md and .txt files")
    retriever = Retriever(args.retriever).to(DEVICE)
    options = dict(dtype=torch.float32, attn_implementation="in_batch")
    lm = AutoModelForCausalLM.from_pretrained(args.lm, **options).to(DEVICE)
    texts = [chunk.text for chunk in chunks]
    asked = random.sample(texts, min(MEASURED, len(texts)))
    before = mean_reciprocal_rank(retriever, asked)
    train(retriever, lm, load_tokenizer(args.lm), chunks, FORMS[args.form], args.steps)
    save(retriever, args.out)
    print(f"MRR of second halves: {before:.3f} -> {mean_reciprocal_rank(retriever, asked):.3f}")
    scores_N = encode(retriever, PASSAGE, texts) @ encode(retriever, QUERY, [args.query])[0]
    for i in scores_N.argsort(descending=True)[:3].tolist():
        print(f"{scores_N[i]:.3f}  {chunks[i].file}: {texts[i][:70]}")


if __name__ == "__main__":
    main()
