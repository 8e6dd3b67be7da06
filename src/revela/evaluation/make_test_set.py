"""Make a test set of a corpus: queries that find their own chunk, as a folder in BEIR layout, or as
triplets with hard negatives to train on.

Shapes: Q queries, N passages, D width of a vector, K places of a ranking.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Literal, TypeVar

from revela.errors import RevelaError
from revela.files import atomic_write
from revela.groups.dataset import TrainingSet, training_chunks, training_rows
from revela.index.bm25 import BM25
from revela.index.exact import top_k
from revela.index.fusion import reciprocal_rank_fusion
from revela.model_files import commits, fingerprint, name_of, resolve
from revela.queries.generated import EXAMPLES, QueryLM, generate_answers
from revela.retriever.card import without_folders
from revela.retriever.load import load_encoder
from revela.settings import OFFLINE_EMBEDDER, Recipe
from revela.types import Chunk, Document

Form = Literal["beir", "triplets"]
T = TypeVar("T")
BM25_NAME = "BM25"
NEGATIVES_FROM = 50  # negatives are among the first passages of each ranking
# Maximum cosine of a negative, as a share of the positive's: a passage with a higher one may answer
# the query, too (NV-Retriever, 2024: TopK-PercPos).
NEGATIVE_BELOW = 0.95
SETTINGS = (
    *("queries", "max_queries", "seed", "chunk_words", "near_duplicates", "lm_tokens"),
    *("language", "precision"),
)


@dataclass(frozen=True)
class Question:
    """A query about some passages."""

    text: str
    relevant: Sequence[int]
    "The passages that answer it."
    found_by: tuple[str, ...] = ()
    "The retrievers that find one of these passages."
    negative: int = -1
    "A passage that ranks high and does not answer the query; -1: none."


@dataclass(frozen=True)
class QuerySet:
    """Passages, and queries about some of them.

    Attributes:
        n_requested: number of passages that a language model was asked about, or of queries taken
            from the text.
        dropped: reason -> number of dropped queries.
    """

    documents: Sequence[Document]
    passages: Sequence[Chunk]
    questions: list[Question]
    n_requested: int
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class RoundTrip:
    """Keep a query if BM25 or an embedder has one of its passages among the first ``depth``."""

    embedder: str = OFFLINE_EMBEDDER
    depth: int = 10


def make_test_set(
    data: TrainingSet, out: Path, form: Form, trip: RoundTrip, corpus: str = "", command: str = ""
) -> QuerySet:
    """Make queries about a corpus, drop those that do not find their passage, and save the rest.

    Args:
        data: the corpus, with a recipe that says where queries come from.
        out: a new folder.
        form: layout to write: BEIR's, or triplets.
        trip: which queries to keep.
        corpus, command: for the card.
    """
    folder = resolve(trip.embedder)
    made = _check_not_empty(_all_queries(data))
    made = _check_not_empty(_round_trip(made, data.recipe, folder, trip.depth))
    if form == "triplets":
        with_negative = [question for question in made.questions if question.negative >= 0]
        made = _check_not_empty(_keep(made, with_negative, "without a hard negative"))
    card = _card(made, data, trip, out.name, corpus, command)
    with atomic_write(out) as temporary:
        temporary.mkdir()
        if form == "beir":
            _write_collection(temporary, made)
        else:
            _write_lines(temporary / "train.jsonl", _triplets(made))
        (temporary / "README.md").write_text(card, encoding="utf-8")
    return made


def _check_not_empty(made: QuerySet) -> QuerySet:
    if not made.questions:
        raise RevelaError(
            f"no query is left of {made.n_requested:,} (dropped: {_counts(made.dropped)}): give "
            "more text, another --query-lm, or another --queries"
        )
    return made


def _all_queries(data: TrainingSet) -> QuerySet:
    """All passages, and queries about a sample of them, by a language model or from the text."""
    recipe, documents = data.recipe, [*data.documents, *data.held_out]
    chunks = training_chunks(recipe, documents)
    if recipe.queries.source != "lm":
        rows = training_rows(recipe, documents, chunks, None)
        relevant: dict[str, list[int]] = {}
        for number, row in enumerate(rows):
            relevant.setdefault(row.query, []).append(number)
        relevant.pop("", None)
        sample = _sample(list(relevant.items()), recipe)
        return QuerySet(documents, rows, [Question(*pair) for pair in sample], len(sample))
    places = _sample(range(len(chunks)), recipe)
    answers = generate_answers(recipe, [chunks[i].text for i in places], data.queries_file)
    questions = [Question(a.query, [i]) for i, a in zip(places, answers, strict=True) if a.query]
    dropped = Counter(answer.rejected for answer in answers if answer.rejected)
    return QuerySet(documents, chunks, questions, len(places), dropped)


def _sample(items: Sequence[T], recipe: Recipe) -> list[T]:
    """``max_queries`` random items, in their order."""
    count = min(recipe.queries.max_queries or len(items), len(items))
    indices = random.Random(recipe.training.seed).sample(range(len(items)), count)
    return [items[i] for i in sorted(indices)]


def _round_trip(made: QuerySet, recipe: Recipe, folder: Path, depth: int) -> QuerySet:
    """Drop queries that neither BM25 nor an embedder finds a passage of, and mine negatives."""
    name, texts = name_of(folder), [passage.text.strip() for passage in made.passages]
    encoder = load_encoder(folder, recipe.training.precision)
    queries = [question.text for question in made.questions]
    passages_ND = encoder.encode_passages(texts, progress=True)
    queries_QD = encoder.encode_queries(queries)
    near_QK, _ = top_k(queries_QD, passages_ND, max(depth, NEGATIVES_FROM))
    words_QK, scores_QK = BM25(texts, recipe.corpus.language).top_k(queries, near_QK.shape[1])
    questions = []
    for question, vector, near, words, scores in zip(
        made.questions, queries_QD, near_QK.tolist(), words_QK, scores_QK, strict=True
    ):
        rankings = {BM25_NAME: words[scores > 0].tolist(), name: near}
        relevant = {*question.relevant}
        found_by = [who for who, ranking in rankings.items() if relevant & {*ranking[:depth]}]
        fused = list(reciprocal_rank_fusion(list(rankings.values())))
        max_cosine = NEGATIVE_BELOW * (passages_ND[question.relevant] @ vector).max()
        candidates = compress(fused, passages_ND[fused] @ vector < max_cosine)
        own_texts = {texts[i] for i in relevant}
        negative = next((i for i in candidates if texts[i] not in own_texts), -1)
        questions.append(replace(question, found_by=tuple(found_by), negative=negative))
    kept = [question for question in questions if question.found_by]
    return _keep(made, kept, f"found among the first {depth} by neither {BM25_NAME} nor {name}")


def _keep(made: QuerySet, kept: list[Question], why: str) -> QuerySet:
    """Keep these questions, and count the others as dropped for the reason ``why``."""
    dropped = Counter({why: len(made.questions) - len(kept)})
    return replace(made, questions=kept, dropped=made.dropped + dropped)


def _passage_ids(made: QuerySet) -> list[str]:
    """An id for each passage: its document's without spaces, and its number in the document."""
    count, names = Counter[str](), []
    for passage in made.passages:
        name = re.sub(r"\s+", "_", made.documents[passage.document].id)
        names.append(f"{name}#{count[name]}")
        count[name] += 1
    return names


def _write_collection(folder: Path, made: QuerySet) -> None:
    """Write BEIR layout. ``document_id`` is the id of the passage's document in an index."""
    ids = _passage_ids(made)
    corpus = (
        {
            "_id": id_,
            "text": passage.text.strip(),
            "document_id": made.documents[passage.document].id,
        }
        for id_, passage in zip(ids, made.passages, strict=True)
    )
    queries = (
        {"_id": f"q{number}", "text": question.text, "found_by": list(question.found_by)}
        for number, question in enumerate(made.questions)
    )
    qrels = (
        f"q{number}\t{ids[i]}\t1\n"
        for number, question in enumerate(made.questions)
        for i in question.relevant
    )
    _write_lines(folder / "corpus.jsonl", corpus)
    _write_lines(folder / "queries.jsonl", queries)
    (folder / "qrels").mkdir()
    text = "query-id\tcorpus-id\tscore\n" + "".join(qrels)
    (folder / "qrels" / "test.tsv").write_text(text, encoding="utf-8")


def _triplets(made: QuerySet) -> Iterator[dict[str, str]]:
    for question in made.questions:
        yield {
            "anchor": question.text,
            "positive": made.passages[question.relevant[0]].text.strip(),
            "negative": made.passages[question.negative].text.strip(),
        }


def _write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {what}" for what, number in counts.items() if number) or "none"


def summary(made: QuerySet) -> str:
    """The number of queries kept, and the reasons why others were dropped."""
    found = Counter(" and ".join(question.found_by) for question in made.questions)
    by = _counts({f"found by {names}": number for names, number in found.most_common()})
    dropped = _counts(dict(made.dropped.most_common()))
    return f"{len(made.questions):,} queries of {made.n_requested:,}: {by}; dropped: {dropped}"


CARD = """---
tags: [sentence-transformers, information-retrieval, revela]
---
# {name}

{count:,} queries about {passages:,} passages of {corpus} ({documents:,} documents), made by
`revela queries`. {author}.

- {kept}.
- Queries that neither of the two finds are dropped, so the rest are easier than people's questions,
  and easiest for these two. They repeat words of their passages, which favours BM25. Other passages
  than the judged one may answer, too.
- Do not test a retriever on these queries if it was trained on them.

    {command}

```
{settings}
```
{prompt}"""

PROMPT = """
The prompt, with a passage in its middle:

```
{before}[...]{after}
```
"""


def _card(
    made: QuerySet, data: TrainingSet, trip: RoundTrip, name: str, corpus: str, command: str
) -> str:
    """The card: who wrote the queries, how, and which were dropped."""
    recipe, by_lm = data.recipe, data.recipe.queries.source == "lm"
    author = f"They are taken from the text ({recipe.queries.source})"
    if by_lm:
        folder = QueryLM(recipe, data.queries_file).folder
        commit = commits.get(recipe.queries.query_lm or recipe.lm.model)
        revision = f"commit {commit}" if commit else f"fingerprint {fingerprint(folder)}"
        author = f"{name_of(folder)} ({revision}) has written them, greedily"
    flat = recipe.to_dict()
    settings = {key: flat[key] for key in SETTINGS}
    settings |= {"embedder": without_folders(trip.embedder), "top": trip.depth}
    return CARD.format(
        name=name,
        count=len(made.questions),
        passages=len(made.passages),
        corpus=without_folders(corpus),
        documents=len(made.documents),
        author=author,
        kept=summary(made),
        command=shlex.join(map(without_folders, shlex.split(command))),
        settings="\n".join(f"{key} = {value!r}" for key, value in settings.items()),
        prompt=PROMPT.format(before=EXAMPLES.before, after=EXAMPLES.after) if by_lm else "",
    )
