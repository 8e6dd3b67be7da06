"""The sections of a recipe: the default and bounds of each field, and below them its help.

A setting is one field of a section, or of a method (methods/). It has one name everywhere: the
field, the flag (``--chunk-words``) and the key of a recipe file (``[corpus] chunk_words``).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from revela.encoders.embedded import SMOLLM2
from revela.text.load import Reading

Pooling = Literal["eos", "last", "mean", "weighted-mean"]
Strategy = Literal["document", "document-random", "interleaved", "random", "cluster", "split"]
TorchPrecision = Literal["auto", "fp32", "bf16"]
Reads = Literal["chunks", "queries", "windows"]
"The rows that a method reads."
COUNTED = 20_000  # maximum number of texts to count token frequencies on
Preset = dict[str, Any]
"Settings by name; `method` is the method's own name."
T = TypeVar("T")

RARE = "rare"
Rare = Annotated[T, RARE]
"A setting that ``--help`` omits; docs/command-line.md lists all."
Share = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
CHECKED = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
)
NO_FIT = {"token_weighting": 0.0, "whitening": 0.0, "lexical": 0.0}
"Settings of a model that is trained as it is; the papers know no fit."


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def checked(settings: type[T]) -> type[T]:
    """Make a frozen dataclass whose fields are checked, with the docstrings below them as help."""
    decorate: Any = dataclass(frozen=True, config=CHECKED)
    made: type[T] = decorate(settings)
    return made


@checked
class Corpus:
    """How a corpus is read and chunked, and what is held out of training."""

    text_field: str = Reading.text_field
    "Field of JSONL, or column of a table, that holds the text."
    title_field: str = Reading.title_field
    "Field or column that holds the title, if there is one."
    join_titles: bool = Reading.join_titles
    "Join neighbouring rows with the same title: a file of passages becomes articles again."
    language: Rare[str] = "auto"
    """Language whose words are stemmed, as for index: by BM25 in the label-free check, and for the
    rows of fit --static."""
    near_duplicates: Share = 0.8
    """Drop documents with this Jaccard similarity to an earlier one, over runs of five words. 0:
    keep all."""
    max_bad_share: Rare[Share] = 0.01
    "Share of unreadable rows and files above which the run stops."
    chunk_words: PositiveInt = 48
    """Maximum words per chunk, which has whole sentences, or whole functions and blocks of code.
    Two characters of Chinese or Japanese count as a word, as do five of Thai and other scripts
    without spaces between words; this holds for all lengths in words."""
    held_out: Share = 0.05
    "Share of the documents held out for the label-free check; at most 300 documents."
    held_out_at_most: ClassVar[int] = 300


@checked
class Groups:
    """Which chunks are compared with one another."""

    groups: Strategy = "document"
    """Which chunks share a group: those of a document (short documents join similar ones, or with
    document-random any), those of several documents in turn (interleaved), any (random; also
    shuffles stored groups), or similar ones by --surrogate (cluster). split: every document, cut
    into --group-size chunks of nearly equal length, is a group."""
    group_size: Annotated[int, Field(ge=2)] = 16
    "Chunks per group. Larger stored groups are cut into groups of this size."
    interleaved_passages: Rare[PositiveInt] = 2
    "Documents whose chunks take turns in interleaved groups."
    surrogate: str = ""
    """Model that finds similar chunks, as for --model. The method cde also filters false negatives
    by it: passages that it scores at least as high as the positive. Empty: the retriever's own
    token embeddings, and no filter."""
    surrogate_tokens: Rare[PositiveInt] = 64
    "Maximum tokens that the surrogate, and the model of --filter, read of a text."
    cluster_size: Rare[NonNegativeInt] = 0
    """Chunks per cluster, on average, of --groups cluster. Small clusters share a group with the
    next ones, large ones are split. 0: --group-size."""
    packing: Rare[Literal["path", "random"]] = "path"
    """Order of the clusters, along which groups are cut: from each to the most similar one (a
    greedy travelling salesman's path), or random."""
    kmeans_steps: Rare[PositiveInt] = 10
    "Steps of the k-means that finds the clusters."
    kmeans_starts: Rare[PositiveInt] = 1
    "Random starts of k-means, of which the one with the least squared distances is taken."
    refresh_every: Rare[PositiveInt] = 200
    "Steps between minings of --negatives."
    refresh_epochs: Rare[NonNegativeInt] = 0
    "Epochs between minings of --negatives, instead of --refresh-every steps. 0: by steps."


@checked
class Queries:
    """Where queries come from, for the methods that learn from queries and for
    --check-questions.
    """

    queries: Literal[
        "lm", "authors-words", "title", "first-sentence", "telling-sentence", "judged"
    ] = "lm"
    """Written by a language model (lm), taken from the text (authors-words: docstrings, titles,
    else a sentence), or those of --pairs alone (judged)."""
    query_lm: Rare[str] = ""
    "Language model that writes queries. Empty: --lm."
    queries_file: Rare[str] = ""
    "JSONL file that keeps written queries. Empty: one in the cache, by the place of the corpus."
    max_queries: Rare[NonNegativeInt] = 4000
    "Maximum queries to write; training uses the documents that have them. 0: no limit."
    targets: Rare[NonNegativeInt] = 0
    "Ask about this many chunks of each document, drawn by the seed. 0: about all."
    questions: Rare[str] = ""
    """JSONL file of questions that another program wrote, each with its chunk (revela queries
    --chunks), in place of --query-lm."""
    question_prompt: Rare[str] = ""
    """Prompt of --query-lm: a text, or a file, with {passage} in it; or `instruction`, a built-in
    one. Empty: three examples, which small models follow better."""


@checked
class Retriever:
    """The model that is trained."""

    model: str = "HuggingFaceTB/SmolLM2-135M"
    """Model that becomes the retriever: a hub id (owner/name, or owner/name@revision), a local
    folder, embedded:smollm2-135m (instruct, 4 bits) or embedded:minilm-l6; or new:tiny, new:small
    or new:base, an encoder-decoder without training and a tokenizer of the corpus."""
    offline_model: Rare[str] = SMOLLM2
    """Replaces the default --model and --lm when the hub cannot be reached and they are not cached.
    Empty: refuse to start, as the presets with -paper in their name do."""
    layers: NonNegativeInt = 6
    """Lower layers that the retriever keeps of a transformers model, a decoder or an encoder. 0:
    all. Sentence-Transformers models and T5Gemma stay complete."""
    pooling: Rare[Pooling] = "mean"
    """How a decoder's token vectors become one vector: the mean, one weighted by position, the
    state of the text's last token, or that of an EOS appended to it."""
    similarity: Rare[Literal["cosine", "dot"]] = "cosine"
    """How vectors are compared, in training and in the saved model: by cosine, or by dot product,
    without normalisation; revela index needs cosines."""
    lower_case: Rare[Literal["auto", "yes", "no"]] = "auto"
    "Fold case in the retriever's tokenizer; auto does so if the corpus has almost no capitals."
    query_prompt: Rare[str] = "auto"
    """Prefix of every query. auto: `query: ` for a language model; Sentence-Transformers models
    keep their own prompts."""
    passage_prompt: Rare[str] = "auto"
    "Prefix of every passage. auto: `passage: ` for a language model."
    max_tokens: PositiveInt = 512
    "Maximum tokens of a text for the saved retriever; longer texts are truncated."
    lora_rank: NonNegativeInt = 64
    """Rank of the retriever's LoRA, which is merged when saved. 0: train all weights of the
    transformer. A static retriever has no LoRA."""
    lora_alpha: Rare[PositiveInt] = 64
    "The scale of LoRA is alpha / rank."
    lora_dropout: Rare[Share] = 0.0
    "Dropout inside LoRA."


@checked
class Context:
    """Documents that the retriever reads before every text (CDE)."""

    context: NonNegativeInt = 0
    """Read this many documents of the corpus before every text, as a vector each (CDE). 0: none."""
    context_from: Rare[Literal["batch", "corpus", "constant"]] = "batch"
    """Documents read in training: texts of the batch, any of its corpus, or none (constant: learned
    rows only, as a control)."""
    context_layers: Rare[NonNegativeInt] = 1
    """Lower layers of the retriever that the first stage copies. 0: all. A second phase keeps the
    first stage of the first phase."""
    context_tokens: Rare[PositiveInt] = 64
    "Maximum tokens of a context document."
    context_vectors_per_document: Rare[PositiveInt] = 1
    """Vectors of a context document, one for each of so many equal runs of its tokens; --context
    counts vectors, so fewer documents are read."""
    context_dropout: Rare[Share] = 0.005
    "Probability that a slot of a text has no document, in training."
    context_null: Rare[Share] = 0.1
    """Probability that a batch has no context documents, so that the retriever also works without a
    corpus."""


@checked
class Fit:
    """The label-free fit of a decoder's pooling to the corpus, before training."""

    token_weighting: NonNegativeFloat = 3e-3
    """SIF: weight each token in the mean by a / (a + its share of the corpus's tokens), where a is
    this setting; punctuation has weight 0. 0: equal weights."""
    whitening: NonNegativeFloat = 0.4
    """Whiten pooled vectors by (covariance of the corpus's token vectors) ** -whitening, as a
    linear layer. 0: off, 0.5: fully."""
    lexical: NonNegativeFloat = 1.0
    """Append the mean of the tokens' own whitened embeddings at this weight, which doubles the
    width. 0: off."""


@checked
class LM:
    """The language model that gives the signal."""

    lm: str = "HuggingFaceTB/SmolLM2-135M"
    """Language model that gives the signal: a hub id, a local folder or embedded:smollm2-135m (the
    instruct model in 4 bits)."""
    lm_tokens: Annotated[int, Field(ge=2)] = 156
    "Maximum tokens of a chunk for the LM, and for the retriever in training."


@checked
class Optimizer:
    """AdamW and its learning rate."""

    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate of AdamW; ten times that for the rows of a static retriever, and fifty
    times for their weights."""
    warmup_steps: Rare[NonNegativeInt] = 10
    "Steps of linear warm-up."
    schedule: Rare[Literal["linear", "cosine", "constant"]] = "linear"
    "Learning rate after the warm-up: falls to 0 linearly or by half a cosine, or stays."
    weight_decay: Rare[NonNegativeFloat] = 0.0
    "Weight decay of AdamW, on all trained weights."
    betas: Rare[Annotated[tuple[Beta, Beta], Field(strict=False)]] = (0.9, 0.999)
    "Decay rates of AdamW's two moments."
    restart_optimizer: Rare[bool] = False
    "Restart the optimiser and its schedule with each mining of --negatives."


@checked
class Training:
    """Limits, checks, checkpoints and precision of a run."""

    groups_per_step: PositiveInt = 1
    "Groups per optimiser step, over all processes."
    groups_per_batch: Rare[PositiveInt | Literal["auto"]] = "auto"
    """Groups per forward pass; more use a GPU better and need more memory. auto: on a GPU as many
    of a step's groups as fit into its memory, on a CPU 1."""
    retriever_batch: Rare[NonNegativeInt] = 0
    """Texts per forward pass of the retriever, which the backward pass repeats, to save memory. 0:
    all at once."""
    max_steps: NonNegativeInt = 0
    "Stop after this many steps. 0: no limit."
    max_epochs: NonNegativeInt = 0
    "Stop after this many passes over the groups. 0: no limit."
    max_minutes: NonNegativeFloat = 20.0
    """Stop after this much training time. 0: no limit. The learning rate falls to 0 at the nearest
    limit."""
    max_tokens_read: Rare[NonNegativeFloat] = 0.0
    "Stop after the retriever has read this many million tokens. 0: no limit."
    check_every: NonNegativeInt = 50
    "Steps between label-free checks. 0: only before the first step and at the end."
    check_queries: ClassVar[int] = 150  # per task of the label-free check
    check_passages: ClassVar[int] = 600  # per task
    check_questions: NonNegativeInt = 0
    """Let a language model write questions about this many held-out passages, for the check."""
    keep: Literal["best", "last"] = "best"
    "Save the state with the best label-free check, or the last one."
    save_every: Rare[PositiveInt] = 50
    "Steps between checkpoints."
    keep_checkpoints: Rare[NonNegativeInt] = 1
    """Newest checkpoints that are kept, during the run and after it, so that --resume can extend a
    finished run. 0: none after the run."""
    log_every: Rare[PositiveInt] = 5
    "Steps between lines of metrics.jsonl, which has a line for each checkpoint too."
    seed: NonNegativeInt = 0
    "Seed of all random numbers."
    threads: NonNegativeInt = 0
    "CPU threads. 0: all cores that the process may use."
    precision: TorchPrecision = "auto"
    "Numeric precision of the models. auto: bf16 where the hardware supports it."
    track: Rare[Literal["", "tensorboard", "trackio", "wandb"]] = ""
    "Also send metrics to this experiment tracker, which must be installed."

    @property
    def fixed_groups_per_batch(self) -> int:
        """``groups_per_batch``, or 1 while it is not known."""
        return 1 if self.groups_per_batch == "auto" else self.groups_per_batch
