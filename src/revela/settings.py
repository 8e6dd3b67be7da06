"""Every setting of a training run, in sections; each default and its bounds stand at the field.

A recipe is merged once, from three layers: a preset (``presets/*.toml``), a recipe file, and what
is given by hand (flags, or keyword arguments). A setting has one name everywhere: the field, the
flag (``--chunk-words``) and the key of a recipe file (``[corpus] chunk_words``). Only the first
setting of groups, queries, context and lm has the section's name as flag: ``--groups``,
``--queries``, ``--context``, ``--lm``. An objective's settings stand in its own file.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import logging
import math
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, resources
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from revela.errors import RevelaError

log = logging.getLogger(__name__)

Pooling = Literal["eos", "mean", "weighted-mean"]
Precision = Literal["auto", "fp32", "bf16"]
VectorForm = Literal["float32", "int8", "binary"]
Value = TypeVar("Value")

MOST = 2**63  # no whole number is as large
OFFLINE_MODEL = "embedded:smollm2-135m"
"Language model that needs no network; the instruct model in 4 bits."

OBJECTIVES = {
    "revela": "revela.objectives.revela:Revela",
    "gains": "revela.objectives.gains:Gains",
    "dream": "revela.objectives.dream:Dream",
    "attention": "revela.objectives.attention_distillation:Attention",
    "replug": "revela.objectives.replug:Replug",
    "infonce": "revela.objectives.contrastive:InfoNCE",
    "crop": "revela.objectives.contrastive:Crop",
    "spans": "revela.objectives.spans:Spans",
}
"""Where each objective's settings are; they are imported when they are needed, as torch is with
them."""


def setting(
    default: Value,
    *,
    least: float | None = 0,
    above: float | None = None,
    most: float | None = None,
    rare: bool = False,
) -> Value:
    """A field of a section.

    Args:
        default: its value if nothing else is given.
        least, above, most: bounds of a number; a least of None: any number.
        rare: not listed by ``--help`` (docs/settings.md lists all).
    """
    bounds = {"least": None if above is not None else least, "above": above, "most": most}
    made: Value = field(default=default, metadata={**bounds, "rare": rare})
    return made


def share(default: float, rare: bool = False) -> float:
    """A field that is a number from 0 to 1."""
    return setting(default, most=1, rare=rare)


@dataclass(frozen=True)
class Section:
    """Settings that belong together; they are checked when they are made.

    Raises:
        RevelaError: a value is of another kind than its field's, or out of bounds.
    """

    def __post_init__(self) -> None:
        for item, kind in _typed_fields(type(self)):  # type: ignore[arg-type]
            flag = flag_of(type(self).__name__.lower(), item.name)
            value = _checked(item, kind, getattr(self, item.name), flag)
            object.__setattr__(self, item.name, value)


@dataclass(frozen=True)
class Corpus(Section):
    """What is read, how it is cut, and what of it is held out of training."""

    text_field: str = "text"
    "Field of JSONL, or column of a table, that holds the text."
    title_field: str = "title"
    "Field or column that holds the title, where there is one."
    join_titles: bool = False
    "Join neighbouring rows with the same title: a file of passages becomes articles again."
    language: str = setting("auto", rare=True)
    "Language whose words BM25 stems in the label-free check, as for index."
    near_duplicates: float = share(0.8)
    """Drop documents that share this much of their wording with an earlier one (Jaccard of runs of
    five words). 0: keep them."""
    max_bad_share: float = share(0.01, rare=True)
    "Share of unreadable rows and files above which the run stops."
    chunk_words: int = setting(48, least=1)
    """Maximum words per chunk; a chunk is made of whole sentences, or of whole functions and blocks
    of code. Where words are not spaced, two characters of Chinese and Japanese count as one, five
    of Thai and the like, and so they do for all lengths in words."""
    held_out: float = share(0.05)
    "Share of the documents that is never trained on, for the label-free check."
    held_out_at_most: int = setting(300, rare=True)
    "Maximum number of documents held out."


@dataclass(frozen=True)
class Groups(Section):
    """Which chunks are compared with one another."""

    kind: Literal["document", "random", "cluster", "iterative"] = "document"
    """Chunks per group: of one document, any, or similar ones, as --surrogate or (iterative) the
    retriever in training finds them."""
    group_size: int = setting(16, least=2)
    "Chunks per group."
    surrogate: str = ""
    "Model that finds similar chunks, as for --model. Empty: the retriever's own token embeddings."
    surrogate_tokens: int = setting(64, least=1, rare=True)
    "Longest text that the surrogate reads, in tokens."
    cluster_size: int = setting(0, rare=True)
    "Maximum chunks per cluster of similar ones. 0: as many as per group."
    regroup_every: int = setting(200, least=1, rare=True)
    "Steps between two rebuildings of iterative groups."
    neighbours: Literal["similar", "random"] = setting("similar", rare=True)
    "Which short documents fill a group together: those with similar words, or any."


@dataclass(frozen=True)
class Queries(Section):
    """Where queries come from, for the objectives that learn from queries and for
    --check-questions.
    """

    source: Literal["lm", "authors-words", "title", "first-sentence", "telling-sentence"] = "lm"
    """Written by a language model (lm), or taken from the text (authors-words: docstrings, titles,
    else a sentence)."""
    query_lm: str = ""
    "Language model that writes queries. Empty: --lm."
    query_prompting: Literal["examples", "instruction"] = setting("examples", rare=True)
    """Prompt by three examples, or by an instruction in the chat template, which takes a larger
    model."""
    queries_file: str = setting("", rare=True)
    "JSONL file that keeps written queries. Empty: one in the cache, by the place of the corpus."
    max_queries: int = 4000
    "Maximum queries to write; training uses the documents that have them. 0: no limit."


@dataclass(frozen=True)
class Retriever(Section):
    """The model that is trained."""

    model: str = "HuggingFaceTB/SmolLM2-135M"
    """Model that becomes the retriever: a hub id (owner/name, or owner/name@revision), a local
    folder, embedded:smollm2-135m (instruct, 4 bits) or embedded:minilm-l6; or new:tiny, new:small
    or new:base, an encoder-decoder without training and a tokenizer of the corpus; or auto, or
    auto:NAME,NAME with more candidates: the one that suits the text, found without labels."""
    offline_model: str = setting(OFFLINE_MODEL, rare=True)
    """Replaces the default --model and --lm when the hub cannot be reached and they are not cached.
    Empty: stop instead."""
    layers: int = 6
    """Lower layers of a decoder that the retriever keeps. 0: all. Sentence-Transformers models and
    T5Gemma stay complete."""
    pooling: Pooling = "mean"
    "How a decoder's token vectors become one vector."
    lower_case: Literal["auto", "yes", "no"] = setting("auto", rare=True)
    "Fold case in the retriever's tokenizer; auto does so if the corpus has almost no capitals."
    query_prompt: str = setting("query: ", rare=True)
    "Prefix of every query of a decoder; Sentence-Transformers models keep their own prompts."
    passage_prompt: str = setting("passage: ", rare=True)
    "Prefix of every passage, likewise."
    max_tokens: int = setting(512, least=1)
    "Longest text that the saved retriever reads, in tokens; the rest is truncated."
    train_tokens: int = setting(0, rare=True)
    "Longest text that the retriever reads in training, in tokens. 0: --lm-tokens."
    lora_rank: int = setting(64)
    """Rank of the retriever's LoRA, which is merged on saving. 0: train all weights of its
    transformer instead. A static retriever has no LoRA."""
    lora_alpha: int = setting(64, above=0, rare=True)
    "The scale of LoRA is alpha / rank."
    lora_dropout: float = share(0.0, rare=True)
    "Dropout inside LoRA."
    matryoshka: tuple[int, ...] = ()
    """Train vectors that may be truncated to these widths, 64 128 256 for example; each batch
    trains one width."""


@dataclass(frozen=True)
class Context(Section):
    """Documents of the corpus that the retriever reads before every text (CDE)."""

    slots: int = 0
    """Read this many documents of the corpus, a vector each, before every text, so that vectors say
    what is special in this corpus (CDE). 0: none."""
    context_from: Literal["batch", "corpus", "constant"] = setting("batch", rare=True)
    """Which ones in training: texts of the batch, any of its corpus, or constant: learned rows
    without documents, the control."""
    context_tokens: int = setting(64, least=1, rare=True)
    "Longest text that is read of each, in tokens."
    context_dropout: float = share(0.005, rare=True)
    "Chance of each to be left out, for each text."
    context_null: float = share(0.1, rare=True)
    "Chance of a batch to have none of them, so that a retriever without a corpus still works."


@dataclass(frozen=True)
class Fit(Section):
    """The label-free fit of a decoder's pooling to the corpus, before training."""

    token_weighting: float = setting(3e-3)
    """SIF: weight each token in the mean by a / (a + its share of the corpus's tokens), this being
    a; punctuation by 0. 0: equal weights."""
    whitening: float = setting(0.4)
    """Whiten pooled vectors by (covariance of the corpus's token vectors) ** -whitening, as a
    linear layer. 0: off, 0.5: fully."""
    lexical: float = setting(1.0)
    """Append the mean of the tokens' own whitened embeddings at this weight, which doubles the
    width. 0: off."""


@dataclass(frozen=True)
class LM(Section):
    """The language model that gives the signal."""

    model: str = "HuggingFaceTB/SmolLM2-135M"
    """Language model that gives the signal: a hub id, a local folder or embedded:smollm2-135m (the
    instruct model in 4 bits)."""
    lm_tokens: int = setting(156, least=2)
    """Longest chunk that the LM reads, in tokens; and the retriever in training, but for
    --train-tokens."""
    loss_tokens: Literal["all", "corpus"] = setting("all", rare=True)
    """Tokens that the soft-max of the LM's loss is over: all, or those of the corpus, which saves
    more than half of a step with a vocabulary of 262,144."""
    shard_lm: bool = setting(False, rare=True)
    """Under torchrun, each process holds a part of the frozen LM's layers, for one that does not
    fit into a GPU beside the rest."""


@dataclass(frozen=True)
class Training(Section):
    """The loop: limits, checks, checkpoints and arithmetic."""

    learning_rate: float = 1e-4
    """Highest learning rate of AdamW; the rows of a static retriever take ten times that, and their
    weights fifty times."""
    warmup_steps: int = setting(10, rare=True)
    "Steps of linear warm-up."
    groups_per_step: int = setting(1, least=1)
    "Groups per optimiser step, of all processes together."
    groups_per_batch: int = setting(1, least=1, rare=True)
    "Groups per forward pass; more fill a GPU and take more memory."
    retriever_batch: int = setting(0, rare=True)
    """Texts per forward pass of the retriever, repeated in the backward pass: less memory, one more
    forward pass. 0: all at once."""
    max_steps: int = 0
    "Stop after this many steps. 0: no limit."
    max_minutes: float = 20.0
    """Stop after this much training time. 0: no limit. The learning rate falls to 0 over whichever
    limit is nearer."""
    clock: Literal["wall", "cpu"] = setting("wall", rare=True)
    "Wall time, or processor time of all threads: comparable between runs of a shared machine."
    max_tokens_read: float = setting(0.0, rare=True)
    "Stop after the retriever has read this many million tokens. 0: no limit."
    check_every: int = 50
    "Steps between label-free checks. 0: only at the end."
    checks: int = setting(0, rare=True)
    "Check this many times, after equal parts of the run, instead of by --check-every."
    check_queries: int = setting(150, least=1, rare=True)
    "Queries per task of the label-free check."
    check_passages: int = setting(600, least=1, rare=True)
    "Passages per task of the label-free check."
    check_questions: int = 0
    """Let a language model write questions about this many of these passages, which the check then
    asks."""
    keep: Literal["best", "last"] = "best"
    "Save the state with the best label-free check, or the last one."
    save_every: int = setting(50, least=1, rare=True)
    "Steps between checkpoints."
    log_every: int = setting(5, least=1, rare=True)
    "Steps between lines of metrics.jsonl."
    seed: int = 0
    "Seed of everything that is drawn at random."
    threads: int = 0
    "CPU threads. 0: all cores."
    precision: Precision = "auto"
    "Arithmetic of the models; auto is bf16 where the hardware has it."
    track: Literal["", "tensorboard", "trackio", "wandb"] = ""
    "Also send metrics to this experiment tracker, which must be installed."


@dataclass(frozen=True)
class Objective(Section):
    """Settings of a method, and all that the rest of the package has to know about it.

    To add one, subclass it with the settings of its own, and write ``build`` (docs/objectives.md).
    An instance can be given to ``Recipe(objective=...)`` and ``Retriever.train(objective=...)``; a
    line in ``OBJECTIVES`` makes it known by name.
    """

    name: ClassVar[str] = ""
    reads: ClassVar[Literal["chunks", "queries", "windows"]] = "chunks"
    "What groups are made of: chunks; chunks with queries; or windows, which are chunks joined."
    learned_from: ClassVar[str] = "{model} was trained by an objective of its own."
    "A sentence for the model card, filled in from the recipe's settings."
    loss_is: ClassVar[str] = "loss"
    "What the loss is, and its unit, for plots."
    across_groups: ClassVar[bool] = False
    """Whether texts of all groups of a batch are compared; several processes then share each
    batch, and gather what they compare."""

    def build(self, parts: Any) -> tuple[Any, Callable[[Sequence[Mapping[str, Any]]], Any]]:
        """The loss, and what makes its batches.

        Args:
            parts: ``objectives.base.Parts``: the recipe, the retriever, the rows of the corpus.

        Returns:
            A module that takes the batch's sides, a dict of tensors each, and gives a scalar; and a
            function from rows ({"text", "query", "document"}) to tensors, named SIDE_NAME.
        """
        raise NotImplementedError(f"{type(self).__name__} has no build(): write it")

    def refuse(self, recipe: Any) -> None:
        """Raise RevelaError if a setting of the recipe does not suit, before a corpus is read."""

    def window_words(self, recipe: Any) -> int:
        """Maximum words of a row, for an objective that reads windows."""
        raise NotImplementedError(f"{type(self).__name__} has no window_words(): write it")

    def save(self, loss: Any, folder: Path) -> None:
        """Write what was trained beside the retriever into the run's folder: nothing by default.

        Args:
            loss: the module that ``build`` gave.
            folder: of the run.
        """


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run; the defaults are the ``gated`` preset.

    >>> Recipe.of(preset="dream", group_size=8).groups.group_size
    8
    """

    corpus: Corpus = field(default_factory=Corpus)
    groups: Groups = field(default_factory=Groups)
    queries: Queries = field(default_factory=Queries)
    retriever: Retriever = field(default_factory=Retriever)
    context: Context = field(default_factory=Context)
    fit: Fit = field(default_factory=Fit)
    lm: LM = field(default_factory=LM)
    objective: Objective = field(default_factory=lambda: objective_class("revela")())
    training: Training = field(default_factory=Training)

    @classmethod
    def of(cls, preset: str = "", **settings: Any) -> Recipe:
        """A preset's recipe with other settings.

        Args:
            preset: name of a preset; empty: that of the objective.
            settings: by flag name, ``chunk_words=30`` or ``objective="dream"`` for example.

        Raises:
            RevelaError: there is no such preset or setting, or it is out of bounds.
        """
        return merged(preset, {}, settings)

    @property
    def tokens_in_training(self) -> int:
        """Where a text is truncated, in tokens, that the retriever reads in training."""
        return self.retriever.train_tokens or self.lm.lm_tokens

    def but(self, **settings: Any) -> Recipe:
        """The same with other settings, by flag name; those of another objective stay with it."""
        objective = settings.pop("objective", self.objective)
        if objective == self.objective.name:
            objective = self.objective
        elif isinstance(objective, str):
            objective = objective_class(objective)()
        recipe, unread = _with(dataclasses.replace(self, objective=objective), settings)
        refuse_unread([(recipe, unread)])
        return recipe

    def flat(self) -> dict[str, Any]:
        """Every setting by flag name, ``objective`` being its name, as JSON gives them back."""
        values: dict[str, Any] = {"objective": self.objective.name}
        for section, item in fields_of(self.objective):
            value = getattr(getattr(self, section), item.name)
            values[flag_of(section, item.name)] = list(value) if isinstance(value, tuple) else value
        return values


SECTIONS: dict[str, type[Section]] = {
    "corpus": Corpus,
    "groups": Groups,
    "queries": Queries,
    "retriever": Retriever,
    "context": Context,
    "fit": Fit,
    "lm": LM,
    "training": Training,
}
WRITING = ("query_lm", "query_prompting", "queries_file")
"Settings of written queries: every objective reads them where --check-questions is given."
FLAGS = {
    ("groups", "kind"): "groups",
    ("queries", "source"): "queries",
    ("context", "slots"): "context",
    ("lm", "model"): "lm",
}


def flag_of(section: str, name: str) -> str:
    """The flat name of a field: the flag with underscores."""
    return FLAGS.get((section, name), name)


def fields_of(objective: Objective | type[Objective]) -> Iterator[tuple[str, Any]]:
    """(section, field) of every setting of a recipe with this objective."""
    for section, kind in SECTIONS.items():
        yield from ((section, item) for item in dataclasses.fields(kind))
        if section == "lm":
            yield from (("objective", item) for item in dataclasses.fields(objective))


def objective_class(name: str) -> type[Objective]:
    """The settings of the objective of this name.

    Raises:
        RevelaError: there is none.
    """
    if name not in OBJECTIVES:
        raise RevelaError(f"--objective {name}: give one of {', '.join(OBJECTIVES)}")
    module, _, attribute = OBJECTIVES[name].partition(":")
    found: type[Objective] = getattr(import_module(module), attribute)
    return found


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """What each preset sets, by its name and by flag names."""
    folder = resources.files("revela").joinpath("presets")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    names = [file.name.removesuffix(".toml") for file in files]
    texts = dict(zip(names, (file.read_text(encoding="utf-8") for file in files), strict=True))
    order = ["gated", "paper", *(name for name in texts if name not in ("gated", "paper"))]
    return {name: _flattened(tomllib.loads(texts[name]), name)[0] for name in order}


def merged(preset: str, file: Mapping[str, Any], given: Mapping[str, Any]) -> Recipe:
    """The recipe of a preset, a recipe file's settings over it, and what is given by hand over
    both.

    Args:
        preset: its name; empty: that of the objective which is given, or which the file has.
        file, given: settings by flag name.

    Raises:
        RevelaError: there is no such preset or setting, a value is out of bounds, or the objective
            does not have a setting that the file or the hand gives.
    """
    recipe, unread = merge(preset, file, given)
    refuse_unread([(recipe, unread)])
    return recipe


def merge(
    preset: str, file: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Recipe, set[str]]:
    """``merged``, with the names that are given and that the objective does not read."""
    wanted = given.get("objective") or file.get("objective") or ""
    implied = preset or (wanted if isinstance(wanted, str) else "")
    if preset and preset not in presets():
        raise RevelaError(f"--preset {preset}: give one of {', '.join(presets())}")
    base = presets().get(implied, {})
    objective: Any = wanted or base.get("objective", "revela")
    if not isinstance(objective, Section):
        objective = objective_class(str(objective))()
    by_hand = {k: v for k, v in {**file, **given}.items() if k != "objective"}
    own = {flag_of(section, item.name) for section, item in fields_of(objective)}
    layers = {k: v for k, v in base.items() if k in own} | by_hand
    return _with(Recipe(objective=objective), layers, frozenset(by_hand))


def read_recipe(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Settings of a TOML file by flag name, and its variants: [variants.NAME], settings each.

    The form of earlier versions is read as well: all settings at the top, a variant per table.

    Raises:
        RevelaError: it is missing, is no TOML, or has a setting that does not exist.
    """
    if not file.is_file():
        raise RevelaError(f"{file} does not exist: give a TOML file of settings as --recipe")
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RevelaError(
            f"{file} is not TOML ({error}): correct it, or give another --recipe"
        ) from error
    return _flattened(tables, str(file))


def _flattened(
    tables: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    flat: dict[str, Any] = {}
    variants: dict[str, dict[str, Any]] = {}
    old = False
    for key, value in tables.items():
        if key == "variants" and isinstance(value, dict):
            if bad := next((name for name, v in value.items() if not isinstance(v, dict)), None):
                raise RevelaError(f"{where}: variant {bad!r} is no table: write [variants.{bad}]")
            variants |= {name: _flattened(table, where)[0] for name, table in value.items()}
        elif isinstance(value, dict) and key in (*SECTIONS, "objective"):
            for name, inner in value.items():
                is_name = (key, name) == ("objective", "name")
                flat["objective" if is_name else flag_of(key, name)] = inner
        elif isinstance(value, dict):
            old, variants[key] = True, dict(value)
        else:
            old, flat[key] = True, value
    if old and where.endswith(".toml"):
        log.info(f"{where} has the form of earlier versions: docs/settings.md shows the sections")
    if odd := next((n for n in variants if not n.replace("-", "").replace("_", "").isalnum()), ""):
        raise RevelaError(
            f"{where}: a variant is called {odd!r}, but names a folder: use letters, digits, - "
            "and _"
        )
    return flat, variants


def readers_of(name: str) -> list[str]:
    """The objectives that have this setting, as a flag name."""
    return [
        objective
        for objective in OBJECTIVES
        if name in {item.name for item in dataclasses.fields(objective_class(objective))}
    ]


def _with(
    recipe: Recipe, settings: Mapping[str, Any], by_hand: frozenset[str] | None = None
) -> tuple[Recipe, set[str]]:
    """The recipe with these settings, and those of ``by_hand`` that it does not read."""
    by_hand = frozenset(settings) if by_hand is None else by_hand
    places = {flag_of(s, item.name): (s, item.name) for s, item in fields_of(recipe.objective)}
    unread = {name for name in by_hand if name not in places}
    for name in unread:
        if not readers_of(name):
            raise RevelaError(f"there is no setting {name}: docs/settings.md lists all of them")
    changes: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name in places:
            section, key = places[name]
            changes.setdefault(section, {})[key] = value
    sections = {
        section: dataclasses.replace(getattr(recipe, section), **values)
        for section, values in changes.items()
    }
    made = dataclasses.replace(recipe, **sections)
    if made.objective.reads != "queries":
        given = {flag_of("queries", item.name) for item in dataclasses.fields(Queries)} & by_hand
        unread |= given - set(WRITING if made.training.check_questions else ())
    return made, unread


def refuse_unread(made: Sequence[tuple[Recipe, set[str]]]) -> None:
    """Refuse a setting that was given and that none of these recipes, trained together, reads.

    Raises:
        RevelaError: there is one.
    """
    names = set.intersection(*(unread for _, unread in made)) if made else set()
    if not names:
        return
    name = min(names)
    ours = " and ".join(dict.fromkeys(recipe.objective.name for recipe, _ in made))
    others = readers_of(name) or [o for o in OBJECTIVES if objective_class(o).reads == "queries"]
    raise RevelaError(
        f"--{name.replace('_', '-')} has no effect on --objective {ours}: "
        f"leave it out, or train {' or '.join(others)}"
    )


@functools.cache
def _typed_fields(kind: Any) -> list[tuple[Any, Any]]:
    hints = get_type_hints(kind)
    return [(item, hints[item.name]) for item in dataclasses.fields(kind)]


def _checked(item: Any, kind: Any, value: Any, name: str) -> Any:
    """The value as the field's kind."""
    flag = f"--{name.replace('_', '-')}"
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise RevelaError(f"{flag} {value}: give one of {', '.join(get_args(kind))}")
        return value
    if get_origin(kind) is tuple:
        numbers = (value,) if isinstance(value, int) else value
        if not isinstance(numbers, list | tuple) or not all(
            isinstance(n, int) and 0 < n < MOST for n in numbers
        ):
            raise RevelaError(f"{flag} {value}: give numbers of 1 or more")
        return tuple(numbers)
    if (isinstance(value, int) and abs(value) >= MOST) or value in (math.inf, -math.inf):
        raise RevelaError(f"{flag} {str(value)[:40]}: give a number that is not as large")
    if isinstance(value, str) and "\0" in value:
        raise RevelaError(f"{flag} {value!r}: give text without a NUL")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        what = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}[kind]
        raise RevelaError(f"{flag} {value!r}: give {what}")
    if kind in (int, float):
        least, above, most = (item.metadata.get(k) for k in ("least", "above", "most"))
        least = 0 if not item.metadata else least
        inside = (
            (least is None or value >= least)
            and (above is None or value > above)
            and (most is None or value <= most)
        )
        if not inside:
            bounds = "from 0 to 1" if most == 1 else f"of {least} or more"
            raise RevelaError(
                f"{flag} {value}: give a number {f'above {above}' if above is not None else bounds}"
            )
    return value


def documented(kind: Any) -> dict[str, str]:
    """The sentence that stands below each field of a section, and of the sections it extends."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not (dataclasses.is_dataclass(base) and base is not Section):
            continue
        source: Any = base
        body = ast.parse(textwrap.dedent(inspect.getsource(source))).body[0]
        assert isinstance(body, ast.ClassDef)
        for node, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                text = getattr(after, "value", None)
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found[node.target.id] = " ".join(text.value.split())
    return found


@dataclass(frozen=True)
class Indexing:
    """What an index is made with; it keeps to that when documents are added."""

    chunk_words: int = 120
    """Maximum words per chunk, counted as for train; one that has more tokens than the model reads
    is cut again."""
    language: str = "auto"
    """Language whose words BM25 stems. auto: found in the text. none: nothing is stemmed. Or a code
    such as en, de or zh; ru+en for two that have a script of their own."""
    dimensions: int = 0
    "Keep this many dimensions of each vector, of those the model was trained for. 0: all."
    vectors: VectorForm = "binary"
    """How a large index holds the vectors that it scans; what it finds is scored again by the full
    ones."""
    keep_tokens: bool = False
    """Keep each token's vector too, at one bit per number, so that search --rerank tokens takes
    milliseconds: about 8 kB more per chunk."""
