"""What each objective needs for a run: its chunks, its order of groups, its batches and its module.

Everything else of a run (run.py) is the same for all, so that they can be compared. To add one: a module in ``objectives/``, a
collator, and a function here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from tqdm import tqdm

from revela.config import Recipe
from revela.data import queries
from revela.data.chunk import chunk_all
from revela.data.crops import windows
from revela.data.groups import document_groups, spread_groups, with_queries
from revela.data.prompts import Prompts
from revela.data.store import Stored, stored
from revela.errors import RevelaError
from revela.files import whole
from revela.models.language_model import LanguageModel, load_language_model, load_tokenizer
from revela.models.weights import cache_folder, fingerprint, resolve
from revela.objectives.contrastive import Contrastive
from revela.objectives.dream import Dream
from revela.objectives.head_probe import probe_heads, ranked_heads
from revela.objectives.query_heads import score_query_heads
from revela.objectives.replug import Replug
from revela.objectives.revela import Revela, gates_in_upper_layers, gates_on_heads
from revela.train.collate import Batch, ChunkCollator, CropCollator, PromptCollator, PromptMaker, QueryCollator, Row
from revela.types import Chunk, Document, Vectors

ASKING = ("dream", "infonce")  # objectives that need queries
PROBE_GROUPS, PROBE_PIECES, PROBE_WORDS = 5, 4, (6, 48)  # groups; documents a group and pieces a document; words a piece
PROBE_QUESTIONS = 64  # of the search for query-focused heads
QUESTION_TOKENS = 64
WRITING_BATCH = 32

Say = Callable[[str], None]
Head = tuple[int, int, float]
Groups = Callable[[int], Iterator[list[int]]]
Collate = Callable[[Sequence[Row]], Batch]


@dataclasses.dataclass(frozen=True)
class Materials:
    """What the functions below build from."""

    recipe: Recipe
    documents: Sequence[Document]
    rows: Stored[Chunk]
    model: SentenceTransformer
    device: torch.device
    bf16: bool
    count: Callable[[int], None]
    say: Say


def training_chunks(recipe: Recipe, documents: Iterable[Document]) -> Stored[Chunk]:
    """Chunks with a document's title as its first line: the LM predicts it too, and it says what the rest is about."""
    titled = (dataclasses.replace(d, text=f"{d.title}\n\n{d.text}") if d.title else d for d in documents)
    return stored(Chunk, chunk_all(titled, recipe.chunk_words, recipe.threads or os.cpu_count() or 1))


def training_rows(
    recipe: Recipe, documents: Sequence[Document], chunks: Stored[Chunk], queries_file: Path | None, say: Say
) -> Stored[Chunk]:
    """What groups are made of: the chunks; with queries, if the objective asks for them; for crops, longer runs of a document."""
    if recipe.objective == "crop":
        return stored(Chunk, windows(chunks, recipe.crop_window))
    if recipe.objective not in ASKING:
        return chunks
    if recipe.queries == "title":
        return stored(Chunk, queries.with_titles(chunks, documents))
    if recipe.queries == "first-sentence":
        return stored(Chunk, queries.with_first_sentences(chunks))
    if recipe.queries == "telling-sentence":
        return stored(Chunk, queries.with_telling_sentences(chunks))
    if queries_file is None:
        raise RevelaError("written queries need a file to be kept in: give --queries-file")
    return written_queries(recipe, chunks, queries_file, say)


def written_queries(recipe: Recipe, chunks: Stored[Chunk], path: Path, say: Say) -> Stored[Chunk]:
    """The chunks of as many documents as ``max_queries`` allows, with queries by a language model; kept in ``path``."""
    from revela.models.writer import writer

    owners = chunks.column("document")
    chosen = queries.documents_with_chunks(owners.tolist(), recipe.max_queries, seed=0)  # whatever the run's seed: written once
    mine = chunks.chosen(i for i, owner in enumerate(owners) if int(owner) in chosen)
    name = recipe.query_lm or recipe.lm
    folder = find_weights(recipe, name, say)
    file = queries.QueryFile(path, f"{fingerprint(folder)}, {recipe.query_prompting}")
    texts = [c.text for c in mine]
    missing = len({t for t in texts if file.get(t) is None})
    if missing:
        say(f"{name} writes {missing:,} queries into {path}")
        with tqdm(total=missing, unit="query") as bar:
            queries.write_queries(
                texts, file, writer(folder, queries.PROMPTINGS[recipe.query_prompting], recipe.lm_tokens), WRITING_BATCH, bar.update
            )
    answers = queries.without_repeats([file.get(t) or queries.Answer() for t in texts])
    rejected: dict[str, int] = {}
    for answer in answers:
        if answer.rejected:
            rejected[answer.rejected] = rejected.get(answer.rejected, 0) + 1
    why = ", ".join(f"{n:,} {reason}" for reason, n in sorted(rejected.items(), key=lambda item: -item[1]))
    say(f"queries for {len(texts) - sum(rejected.values()):,} of {len(texts):,} chunks" + (f"; rejected: {why}" if why else ""))
    return stored(Chunk, (dataclasses.replace(c, query=a.query) for c, a in zip(mine, answers, strict=True)))


def order_of_groups(recipe: Recipe, rows: Stored[Chunk], vectors_ND: Vectors | None = None) -> Groups:
    """epoch -> the groups of that epoch, as the objective needs them."""
    build = spread_groups if recipe.objective == "crop" else document_groups
    groups: Groups = functools.partial(build, rows.column("document"), recipe.group_size, recipe.seed, vectors_ND=vectors_ND)
    if recipe.objective not in ASKING:
        return groups
    has_query = rows.column("query") != ""
    return lambda epoch: with_queries(groups(epoch), has_query)


def build_objective(materials: Materials) -> tuple[nn.Module, Collate]:
    """The module that the trainer hosts, and what makes its batches."""
    build: dict[str, Callable[[Materials], tuple[nn.Module, Collate]]]
    build = {"revela": _revela, "dream": _dream, "replug": _replug, "infonce": _infonce, "crop": _crop}
    return build[materials.recipe.objective](materials)


def _revela(m: Materials) -> tuple[nn.Module, ChunkCollator]:
    recipe = m.recipe
    lm, tokenizer, folder = _language_model(m)
    objective = Revela(
        m.model,
        lm,
        tau=recipe.tau,
        gates_LH=_gates(m, lm, folder, tokenizer),
        v_norm=recipe.v_norm,
        epsilon=recipe.epsilon,
        standardise=recipe.standardise,
        sim_dtype=torch.bfloat16 if recipe.sim_dtype == "bf16" else None,
        learn_tau=recipe.learn_tau,
        learn_gates=recipe.learn_gates,
        group_size=recipe.group_size,
        retriever_batch=recipe.retriever_batch,
        kernel=recipe.kernel,
    )
    return objective, ChunkCollator(m.model, m.count, tokenizer, recipe.lm_tokens, recipe.query_side)


def _replug(m: Materials) -> tuple[nn.Module, ChunkCollator]:
    recipe = m.recipe
    lm, tokenizer, _ = _language_model(m)
    plain, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    objective = Replug(
        m.model,
        lm,
        tau=recipe.tau,
        tau_lm=recipe.tau_lm,
        by_token=recipe.likelihood == "mean",
        lead=whole.index(plain[0]),
        group_size=recipe.group_size,
        retriever_batch=recipe.retriever_batch,
        lm_batch=recipe.lm_batch,
        learn_tau=recipe.learn_tau,
    )
    return objective, ChunkCollator(m.model, m.count, tokenizer, recipe.lm_tokens, recipe.query_side)


def _infonce(m: Materials) -> tuple[nn.Module, QueryCollator]:
    recipe = m.recipe
    objective = Contrastive(
        m.model, tau=recipe.tau, learn_tau=recipe.learn_tau, retriever_batch=recipe.retriever_batch, group_size=recipe.group_size
    )
    return objective, QueryCollator(m.model, m.count)


def _crop(m: Materials) -> tuple[nn.Module, CropCollator]:
    recipe = m.recipe
    if not 0 < recipe.crop_least <= recipe.crop_most <= 1:
        raise RevelaError(f"--crop-least {recipe.crop_least} and --crop-most {recipe.crop_most} must be shares, the first the smaller")
    objective = Contrastive(m.model, tau=recipe.tau, learn_tau=recipe.learn_tau, retriever_batch=recipe.retriever_batch)
    return objective, CropCollator(m.model, m.count, recipe.crop_least, recipe.crop_most, recipe.crop_deletion, recipe.seed)


def _dream(m: Materials) -> tuple[nn.Module, PromptCollator]:
    recipe = m.recipe
    lm, tokenizer, folder = _language_model(m)
    make = _prompt_maker(recipe, tokenizer)
    context = getattr(lm.model.config.get_text_config(), "max_position_embeddings", None)
    longest = (recipe.group_size + 1) * (recipe.lm_tokens + 8) + QUESTION_TOKENS
    if context is not None and longest > context:
        raise RevelaError(
            f"{recipe.group_size} candidates of {recipe.lm_tokens} tokens may take {longest:,} tokens, more than the {context:,} that "
            f"{recipe.lm} reads: lower --lm-tokens or --group-size"
        )
    ranking = heads_from_file(Path(recipe.heads), folder) if recipe.heads else query_head_ranking(recipe, m.rows, lm, folder, make, m.say)
    heads = [(layer, head) for layer, head, _ in ranking[: recipe.injected_heads]]
    m.say(f"inject into {len(heads)} heads: {' '.join(f'{a}-{b}' for a, b in heads)}")
    objective = Dream(
        m.model,
        lm,
        heads,
        tau=recipe.tau,
        gate=recipe.gate,
        group_size=recipe.group_size,
        learn_tau=recipe.learn_tau,
        learn_gate=recipe.learn_gates,
        retriever_batch=recipe.retriever_batch,
        epsilon=recipe.epsilon,
        kernel=recipe.kernel,
    )
    return objective, PromptCollator(m.model, m.count, make)


def _prompt_maker(recipe: Recipe, tokenizer: Any) -> PromptMaker:
    prompts = Prompts(tokenizer, recipe.lm_tokens, QUESTION_TOKENS, recipe.lm_prompt == "chat")
    return PromptMaker(prompts, tokenizer.pad_token_id, recipe.group_size)


def _language_model(m: Materials) -> tuple[LanguageModel, Any, Path]:
    """The LM, trained if the recipe says so, its tokenizer, and its folder."""
    recipe = m.recipe
    folder = find_weights(recipe, recipe.lm, m.say)
    if recipe.lm_lora and recipe.objective != "revela":
        raise RevelaError(f"--objective {recipe.objective} keeps the LM frozen: drop --lm-lora")
    lora = dict(rank=recipe.lora_rank, alpha=recipe.lora_alpha, dropout=recipe.lora_dropout) if recipe.lm_lora else None
    lm = load_language_model(folder, bf16=m.bf16, lora=lora, name=recipe.lm).to(m.device)
    return lm, load_tokenizer(folder), folder


def _gates(m: Materials, lm: LanguageModel, folder: Path, tokenizer: Any) -> Tensor | None:
    recipe = m.recipe
    if recipe.mix == "sum":
        return None
    first = int(recipe.gate_first_layer * lm.n_layers)
    if not recipe.gate_heads:
        m.say(f"gate {recipe.gate} on every head of layers {first} to {lm.n_layers - 1}")
        return gates_in_upper_layers(lm, recipe.gate, first)
    ranking = head_ranking(lm, folder, tokenizer, m.documents, recipe, m.say)
    if not ranking:
        m.say(
            f"the documents are too short to probe the LM's heads: gate {recipe.gate} on every head of layers {first} to {lm.n_layers - 1}"
        )
        return gates_in_upper_layers(lm, recipe.gate, first)
    best = [(layer, head) for layer, head, _ in ranking if layer >= first][: recipe.gate_heads]
    m.say(f"gate {recipe.gate} on {len(best)} heads: {' '.join(f'{a}-{b}' for a, b in best[:12])}{' ...' if len(best) > 12 else ''}")
    return gates_on_heads(lm, recipe.gate, best)


def head_ranking(lm: LanguageModel, folder: Path, tokenizer: Any, documents: Sequence[Document], recipe: Recipe, say: Say) -> list[Head]:
    """(layer, head, score) of Revela's label-free probe, best first; once per LM, and cached. Empty if no document is long enough."""

    def probe() -> Tensor | None:
        groups = []
        for texts, owners in _probe_groups(documents, recipe.seed):
            tokens = tokenizer(texts, truncation=True, max_length=recipe.lm_tokens, padding=True, padding_side="right", return_tensors="pt")
            groups.append((lm.pack(tokens["input_ids"], tokens["attention_mask"]), torch.tensor(owners)))
        return probe_heads(lm, groups) if groups else None

    return _cached_ranking("siblings", lm, folder, probe, say)


def rank_heads(recipe: Recipe, documents: Sequence[Document], bf16: bool, queries_file: Path | None, say: Say) -> tuple[Path, list[Head]]:
    """The LM's folder, and the ranking of its heads that this objective goes by."""
    folder = find_weights(recipe, recipe.lm, say)
    lm, tokenizer = load_language_model(folder, bf16=bf16, name=recipe.lm), load_tokenizer(folder)
    if recipe.objective != "dream":
        return folder, head_ranking(lm, folder, tokenizer, documents, recipe, say)
    rows = training_rows(recipe, documents, training_chunks(recipe, documents), queries_file, say)
    return folder, query_head_ranking(recipe, rows, lm, folder, _prompt_maker(recipe, tokenizer), say)


def query_head_ranking(recipe: Recipe, rows: Stored[Chunk], lm: LanguageModel, folder: Path, make: PromptMaker, say: Say) -> list[Head]:
    """(layer, head, nDCG@10) of the heads that look from a question to its answer, best first; computed once per LM and cached."""
    return _cached_ranking("questions", lm, folder, lambda: score_query_heads(lm, _questions(recipe, rows, make)), say)


def _questions(recipe: Recipe, rows: Stored[Chunk], make: PromptMaker) -> Iterator[tuple[Batch, Batch, Tensor]]:
    """Prompt, tail with "N/A" as its last question, and the candidate that answers each of the others."""
    asked = 0
    for group in order_of_groups(recipe, rows)(0):
        members = [rows[i] for i in group]
        answers = [i for i, member in enumerate(members) if member.query]
        questions = [(members[i].query, i) for i in answers]
        prompt, tail = make([member.text for member in members], [*questions, ("N/A", 0)])
        yield prompt, tail, torch.tensor(answers)
        asked += len(answers)
        if asked >= PROBE_QUESTIONS:
            return


def _cached_ranking(kind: str, lm: LanguageModel, folder: Path, probe: Callable[[], Tensor | None], say: Say) -> list[Head]:
    path = cache_folder() / "heads" / f"{fingerprint(folder)}-{kind}.json"
    if path.is_file():
        return heads_from_file(path, folder)
    say(f"probing the {lm.n_layers * lm.n_heads} heads of {lm.name}, once")
    scores_LH = probe()
    if scores_LH is None:
        return []
    save_heads(path, lm.name, folder, ranked_heads(scores_LH))
    return heads_from_file(path, folder)


def save_heads(path: Path, name: str, folder: Path, ranking: Sequence[Head]) -> None:
    """Write a ranking of heads, with the model that it belongs to."""
    with whole(path) as temporary:
        temporary.write_text(json.dumps({"lm": name, "fingerprint": fingerprint(folder), "ranking": ranking}))


def heads_from_file(path: Path, folder: Path) -> list[Head]:
    """A ranking that ``save_heads`` wrote.

    Raises:
        RevelaError: it is none, or another model's.
    """
    try:
        saved = json.loads(path.read_text())
        ranking = [(int(layer), int(head), float(score)) for layer, head, score in saved["ranking"]]
        owner, name = saved["fingerprint"], saved["lm"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RevelaError(f"{path} is not a file of heads: make one with revela heads --objective dream --out {path}") from error
    if owner != fingerprint(folder):
        raise RevelaError(
            f"{path} ranks the heads of {name}, not of this run's --lm: make another with revela heads --objective dream --out"
        )
    return ranking


def _probe_groups(documents: Sequence[Document], seed: int) -> Iterator[tuple[list[str], list[int]]]:
    """Groups of four documents cut in four, so that every piece has siblings and strangers; none if all documents are too short."""
    pieces: list[list[str]] = []
    for i in random.Random(seed).sample(range(len(documents)), len(documents)):
        words = documents[i].text.split()
        size = min(PROBE_WORDS[1], len(words) // PROBE_PIECES)
        if size >= PROBE_WORDS[0]:
            pieces.append([" ".join(words[k * size : (k + 1) * size]) for k in range(PROBE_PIECES)])
        if len(pieces) == PROBE_GROUPS * PROBE_PIECES:
            break
    for start in range(0, len(pieces), PROBE_PIECES):
        members = pieces[start : start + PROBE_PIECES]
        if len(members) > 1:
            yield [t for texts in members for t in texts], [i for i, texts in enumerate(members) for _ in texts]


def find_weights(recipe: Recipe, name: str, say: Say) -> Path:
    """The folder of a model; the default falls back to ``offline_model`` when the hub is out of reach, and says so."""
    try:
        return resolve(name)
    except RevelaError:
        if name not in (Recipe.model, Recipe.lm) or not recipe.offline_model:
            raise
        say(f"{name} is neither cached nor in reach: using {recipe.offline_model} (setting offline_model)")
        return resolve(recipe.offline_model)
