"""Every default of revela, in frozen dataclasses. A preset is a dict of what differs from them; a
recipe (TOML) and flags go on top.

Values of the ``dream`` preset that its paper does not give are marked as ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from revela.errors import RevelaError

Pooling = Literal["eos", "mean", "weighted-mean"]
Precision = Literal["auto", "fp32", "bf16"]
VectorForm = Literal["float32", "int8", "binary"]
Objective = Literal["revela", "gains", "dream", "attention", "replug", "infonce", "crop"]

# What a number may be; any other one of a recipe is 0 or more.
AT_LEAST = {
    **dict.fromkeys(("group_size", "lm_tokens", "crop_window"), 2),
    **dict.fromkeys(
        ("chunk_words", "surrogate_tokens", "max_tokens", "check_queries", "check_passages"), 1
    ),
    **dict.fromkeys(("query_heads", "lora_rank", "groups_per_step", "groups_per_batch"), 1),
    **dict.fromkeys(("regroup_every", "save_every", "log_every"), 1),
}
ABOVE_0 = {"tau", "tau_lm", "sharpness", "lora_alpha"}
SHARES = {
    "near_duplicates",
    "max_bad_share",
    "held_out",
    "gate",
    "gate_first_layer",
    "lora_dropout",
}
SHARES |= {"crop_least", "crop_most", "crop_deletion"}
ANY = {"prior", "margin"}


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run; the defaults are the ``gated`` preset.

    Raises:
        RevelaError: a number is none that its setting can be.
    """

    # Corpus
    text_field: str = "text"
    "Field of JSONL, or column of a table, that holds the text."
    title_field: str = "title"
    "Field or column that holds the title, where there is one."
    join_titles: bool = False
    "Join neighbouring rows of one title: a file of passages becomes articles again."
    near_duplicates: float = 0.8
    """Drop documents that share this much of their wording with an earlier one (Jaccard, runs of
    five words); 0: keep them."""
    max_bad_share: float = 0.01
    "Share of unreadable rows and files past which the run stops."
    chunk_words: int = 48
    "Most words in a chunk; chunks are whole sentences, or whole functions and blocks of code."
    group_size: int = 16
    "Chunks that are compared with one another."
    groups: Literal["document", "random", "cluster", "iterative"] = "document"
    """What is compared: chunks of a document, any, or similar ones, as --surrogate finds them or
    (iterative) the retriever in training."""
    surrogate: str = ""
    """Model that tells which chunks are similar: as for --model; empty: their words do, by the
    retriever's own token embeddings."""
    surrogate_tokens: int = 64
    "Longest text that it reads, in tokens."
    cluster_size: int = 0
    "Most chunks in a cluster of similar ones; 0: as many as in a group."
    regroup_every: int = 200
    "Updates between two rebuildings of iterative groups."
    neighbours: Literal["similar", "random"] = "similar"
    "Which short documents fill a group together: those with similar words, or any."
    held_out: float = 0.05
    "Share of the documents that is never trained on, for the label-free check."
    held_out_at_most: int = 300
    "Never hold out more documents than this."
    check_queries: int = 150
    "Queries a task of the label-free check."
    check_passages: int = 600
    "Passages a task of the label-free check."
    check_questions: int = 0
    """Have a language model write questions about so many of these passages, for the check to ask,
    even where it can ask nothing else."""

    # Retriever
    model: str = "HuggingFaceTB/SmolLM2-135M"
    """Model that becomes the retriever: a hub id, a local folder, embedded:smollm2-135m or
    embedded:minilm-l6."""
    offline_model: str = "embedded:smollm2-135m"
    """What stands in for the default --model and --lm when the hub cannot be reached and has not
    been cached; empty: stop instead."""
    layers: int = 6
    """Lower layers of a decoder that the retriever keeps; 0 keeps all. Sentence-Transformers models
    stay whole."""
    pooling: Pooling = "mean"
    "How a decoder's token vectors become one vector."
    token_weighting: float = 3e-3
    """Weight each token in the mean by a / (a + its share of the corpus's tokens), a being this
    (SIF); punctuation by 0. 0: all alike."""
    whitening: float = 0.4
    """Whiten the pooled vectors by (covariance of the corpus's token vectors) ** -whitening, as a
    linear layer; 0: off, 0.5: fully."""
    lexical: float = 1.0
    """Join to each vector the mean of its tokens' own whitened embeddings, at this weight; doubles
    the width. 0: off."""
    lower_case: Literal["auto", "yes", "no"] = "auto"
    "Fold case in the retriever's tokenizer; auto does so if the corpus has next to no capitals."
    query_prompt: str = "query: "
    "Put before every query, by a decoder; Sentence-Transformers models keep their own prompts."
    passage_prompt: str = "passage: "
    "Put before every passage, likewise."
    max_tokens: int = 512
    "Longest text that the saved retriever reads, in tokens; the rest is cut off."
    lora_rank: int = 64
    "Rank of the retriever's LoRA; merged on saving."
    lora_alpha: int = 64
    "LoRA scale is alpha / rank."
    lora_dropout: float = 0.0
    "Dropout inside LoRA."

    # Language model
    lm: str = "HuggingFaceTB/SmolLM2-135M"
    "Language model that gives the signal: a hub id, a local folder or embedded:smollm2-135m."
    lm_tokens: int = 156
    "Longest chunk that the LM (and the retriever in training) reads, in tokens."
    lm_lora: bool = False
    "Train the LM too, by LoRA of the same rank; otherwise it is frozen."

    # Objective
    objective: Objective = "revela"
    """What is learned from: an LM's next tokens (revela, gains, dream), attention, likelihoods
    (replug), queries (infonce) or crops (crop)."""
    tau: float = 1.0
    "Temperature of the similarities: of the standard scores, or of the cosines."
    learn_tau: bool = False
    "Train the temperature."
    gate: float = 0.5
    "The gate g: how much of the mixed heads' attention is the retriever's doing."
    learn_gates: bool = False
    "Train the gates."
    epsilon: float = 1e-4
    "Pairs with no more weight than this are skipped; 0 computes all."
    kernel: Literal["torch", "triton"] = "torch"
    "What computes document attention: torch anywhere, or a Triton kernel on a GPU."
    matryoshka: tuple[int, ...] = ()
    """Train vectors that may be cut to so many of their first numbers, 64 128 256 for example. Each
    batch trains one width, or the whole."""

    # Objective: revela, gains
    mix: Literal["gated", "sum"] = "gated"
    "How the in-batch output joins the LM's own attention: (1-g) s + g b, or the paper's s + b."
    gate_heads: int = 24
    """Gate this many heads, the best that the label-free probe finds from gate_first_layer up; 0
    gates all of them."""
    gate_first_layer: float = 0.6
    "Lowest layer with a gate, as a share of the LM's depth; below it the LM runs once."
    v_norm: bool = False
    "V-normalise the in-batch output."
    standardise: bool = True
    """Divide each row's cosines by their standard deviation, so that the loss cannot fall by
    vectors that merely run together."""
    sim_dtype: Literal["fp32", "bf16"] = "fp32"
    "Precision of the similarities; the published run's was bf16."
    siblings: float = 0.0
    """Weight of a contrastive loss on the same vectors beside the LM's: chunks of one document are
    positives."""
    query_side: Literal["first-half", "random-span", "whole"] = "first-half"
    """What of a chunk is its query; random-span: any half in one piece. Code always uses the whole
    chunk in the paper; here all do the same."""

    # Objectives: dream, attention, and infonce on the same queries; --check-questions has the same
    # writer
    queries: Literal["lm", "authors-words", "title", "first-sentence", "telling-sentence"] = "lm"
    """Where queries come from: written by a language model, or taken from the text (authors-words:
    docstrings, titles, else a sentence)."""
    query_lm: str = ""
    "Language model that writes queries; empty: --lm."
    query_prompting: Literal["examples", "instruction"] = "examples"
    """How it is asked: by three examples, or by an instruction in its chat template, which takes a
    larger model."""
    queries_file: str = ""
    "JSONL file that keeps written queries; empty: CORPUS.queries.jsonl, beside the first corpus."
    max_queries: int = 4000
    """Have no more queries written than this, and train on the documents that have them; 0: no
    limit."""
    heads: str = ""
    """JSON file of such heads, made by revela heads --objective dream --out (for revela: of heads
    to gate); empty: find them."""
    query_heads: int = 16
    "Inject into, or learn from, this many heads: the best that look from a question to its answer."
    drop_outliers: bool = False
    """Choose them without a candidate's tokens that are attended to far less than its mean, as
    QRHead does."""
    lm_prompt: Literal["plain", "chat"] = "plain"
    "What the LM reads around passages and questions; chat: its own chat template."

    # Objective: attention, gains
    sharpness: float = 2.0
    """Factor of the standard scores that the LM and the retriever's start give together, before
    their soft-max."""
    prior: float = 1.0
    "Weight of the retriever's start in them."

    # Objective: infonce, crop
    drop_false_negatives: bool = False
    "Compare a query with no passage that --surrogate finds as near to it as its own."
    margin: float = 0.0
    "Nor with one that comes so close to that, in cosine."

    # Objective: replug
    tau_lm: float = 1e-3
    "Temperature of the LM's log-likelihoods."
    likelihood: Literal["mean", "sum"] = "mean"
    "Log-likelihood of a chunk: the mean over its tokens, or the sum."
    lm_batch: int = 0
    "Chunks that the LM reads after another at a time; 0: all of a group."

    # Objective: crop
    crop_window: int = 240
    "Most words of a document that two crops are taken from."
    crop_least: float = 0.1
    "Shortest crop, as a share of the text's words."
    crop_most: float = 0.5
    "Longest crop."
    crop_deletion: float = 0.0
    "Chance of each word of a crop to be left out."

    # Training
    learning_rate: float = 1e-4
    warmup_steps: int = 10
    groups_per_step: int = 1
    "Groups a parameter update."
    groups_per_batch: int = 1
    "Of these, groups that go through the models together; more fill a GPU, and take more memory."
    retriever_batch: int = 0
    """Texts the retriever reads at a time in training, and again in the backward pass: less memory,
    one more forward pass; 0: all, once."""
    max_steps: int = 0
    "Stop after this many updates; 0: no limit."
    max_minutes: float = 20.0
    """Stop after this much training time; 0: no limit. The learning rate falls to zero over
    whichever limit is nearer."""
    clock: Literal["wall", "cpu"] = "wall"
    """Time as it passes, or this process's processor time, all threads together: fair to every run
    of a shared machine."""
    max_tokens_read: float = 0.0
    "Stop after the retriever has read this many million tokens; 0: no limit."
    check_every: int = 50
    "Updates between label-free checks; 0: only at the end."
    checks: int = 0
    """Check after each of so many equal parts of the run, instead of every so many updates; 0: by
    --check-every."""
    keep: Literal["best", "last"] = "best"
    "Save the state that the label-free check liked best, or the last."
    save_every: int = 50
    "Updates between checkpoints."
    log_every: int = 5
    "Updates between lines of metrics.jsonl."
    seed: int = 0
    threads: int = 0
    "CPU threads; 0: all cores."
    precision: Precision = "auto"
    "Arithmetic of the models; auto is bf16 where the hardware has it."

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or name in ANY:
                continue
            least = AT_LEAST.get(name, 0)
            allowed = (
                "above 0"
                if name in ABOVE_0
                else "from 0 to 1"
                if name in SHARES
                else f"of {least} or more"
            )
            if (
                not value >= least
                or (name in ABOVE_0 and value == 0)
                or (name in SHARES and value > 1)
            ):
                raise RevelaError(f"--{name.replace('_', '-')} {value}: give a number {allowed}")
        if self.objective == "dream" and self.gate in (0, 1):
            raise RevelaError(f"--gate {self.gate}: DREAM's gate lies between 0 and 1")


@dataclass(frozen=True)
class Indexing:
    """What an index is made with; it keeps to that when documents are added."""

    chunk_words: int = 120
    "Most words in a chunk."
    dimensions: int = 0
    "Keep this many dimensions of each vector, of those the model was trained for; 0: all."
    vectors: VectorForm = "binary"
    """How a large index holds the vectors that it looks through; what it finds is scored again by
    the whole ones."""
    keep_tokens: bool = False
    """Keep each token's vector too, at one bit a number, so that search --rerank tokens takes
    milliseconds: some 8 kB a chunk more."""


PAPER: dict[str, Any] = dict(
    chunk_words=120,
    neighbours="random",
    layers=0,
    pooling="eos",
    token_weighting=0.0,
    whitening=0.0,
    lexical=0.0,
    lower_case="no",
    lora_rank=256,
    lora_alpha=64,
    lora_dropout=0.1,
    lm_lora=True,
    mix="sum",
    v_norm=True,
    standardise=False,
    tau=1e-4,
    sim_dtype="bf16",
    epsilon=0.0,
    learning_rate=1e-4,
    warmup_steps=100,
    groups_per_step=32,
    keep="last",
)

GAINS: dict[str, Any] = dict(objective="gains", groups="cluster", tau=0.05)
# Ours: tau, gate, and the learning rate that goes with this start.
DREAM: dict[str, Any] = dict(objective="dream", tau=0.2, learn_tau=True, gate=0.5, learn_gates=True)
ATTENTION: dict[str, Any] = dict(
    objective="attention", queries="telling-sentence", chunk_words=80, query_heads=4, tau=0.05
)
REPLUG: dict[str, Any] = dict(objective="replug", tau=1e-3, learning_rate=5e-4)
INFONCE: dict[str, Any] = dict(objective="infonce", tau=0.05)
PAIRS: dict[str, Any] = dict(
    objective="infonce", queries="authors-words", group_size=32, neighbours="random", tau=0.05
)
CROP: dict[str, Any] = dict(objective="crop", tau=0.05, group_size=32, neighbours="random")

PRESETS: dict[str, dict[str, Any]] = {
    "gated": {},
    "paper": PAPER,
    "gains": GAINS,
    "dream": DREAM,
    "attention": ATTENTION,
    "replug": REPLUG,
    "infonce": INFONCE,
    "pairs": PAIRS,
    "crop": CROP,
}


READ_BY: dict[str, tuple[Objective, ...]] = {
    **dict.fromkeys(("lm_lora", "standardise", "sim_dtype", "siblings"), ("revela",)),
    **dict.fromkeys(("mix", "gate_heads", "gate_first_layer", "v_norm"), ("revela", "gains")),
    **dict.fromkeys(("gate", "epsilon", "kernel"), ("revela", "gains", "dream")),
    "learn_gates": ("revela", "dream"),
    "learn_tau": ("revela", "gains", "dream", "replug", "infonce", "crop"),
    "query_side": ("revela", "gains", "replug"),
    "heads": ("revela", "gains", "dream", "attention"),
    **dict.fromkeys(("query_heads", "drop_outliers", "lm_prompt"), ("dream", "attention")),
    **dict.fromkeys(
        ("queries", "query_lm", "query_prompting", "queries_file", "max_queries"),
        ("dream", "attention", "infonce"),
    ),
    **dict.fromkeys(("sharpness", "prior"), ("gains", "attention")),
    **dict.fromkeys(("drop_false_negatives", "margin"), ("infonce", "crop")),
    **dict.fromkeys(("tau_lm", "likelihood", "lm_batch"), ("replug",)),
    **dict.fromkeys(("crop_window", "crop_least", "crop_most", "crop_deletion"), ("crop",)),
}
"""The objectives that read a setting; all read those that are not here, or may be given them with
the rest, as --lm."""
WRITING = (
    "query_lm",
    "query_prompting",
    "queries_file",
)  # read by every objective where --check-questions is given


def refuse_unread(made: Sequence[tuple[str, Recipe]]) -> None:
    """Refuse a setting that was given and that none of the objectives reads.

    Args:
        made: recipes that are trained together, each with the name of the preset whose own settings
            pass.

    Raises:
        RevelaError: there is one.
    """
    objectives = list(dict.fromkeys(recipe.objective for _, recipe in made))
    checked = any(recipe.check_questions for _, recipe in made)
    for name, readers in READ_BY.items():
        unread = not set(readers) & set(objectives) and not (checked and name in WRITING)
        if unread and any(
            getattr(recipe, name) not in (getattr(Recipe, name), PRESETS[preset].get(name))
            for preset, recipe in made
        ):
            ours, others = " and ".join(objectives), " or ".join(readers)
            raise RevelaError(
                f"--{name.replace('_', '-')} says nothing to --objective {ours}: leave it away, or train {others}"
            )


_RANKING, _CONTRAST = "KL from the LM's ranking (nats)", "contrastive loss (nats)"
LEARNED_FROM: dict[Objective, tuple[str, str]] = {
    "revela": (
        "The next-token prediction of {lm} told {model} which text helps to predict which.",
        "next-token loss (nats)",
    ),
    "gains": (
        "{model} learned to rank texts by how much each helps {lm} to predict another.",
        _RANKING,
    ),
    "dream": (
        "{lm}, which answers questions by what {model} finds, told it what to find.",
        "loss of the answers' tokens (nats)",
    ),
    "attention": (
        "{model} learned to rank texts as the attention of {lm} does when it reads a query.",
        _RANKING,
    ),
    "replug": (
        "{model} learned to rank texts by how likely {lm} finds another text after each.",
        _RANKING,
    ),
    "infonce": (
        "{model} learned to tell the text that a query was made for from others (queries: {queries}).",
        _CONTRAST,
    ),
    "crop": (
        "{model} learned to tell another crop of the same text from crops of others.",
        _CONTRAST,
    ),
}
"By objective: what the retriever learned from, filled in from the recipe, and what its loss is."
