"""A query for each chunk, with no person in the loop: written by a language model, or taken from
the text itself.

A language model is shown three examples, or asked for one question that only the passage answers
(DREAM, appendix A; our words). What it writes is kept only if it is a question, is about the
passage without being copied, and does not speak of "the passage". Every answer, kept or not, goes
to a file beside the corpus at once, so that a stopped run goes on where it was and the next has
nothing to write.

Without a language model: the document's title, the chunk's first sentence, or its most telling one.
A sentence that becomes the query is cut out of its passage (the inverse cloze task; Lee et al., ACL
2019), or matching words would be all there is to learn. Best is what an author wrote for whoever
searches (docs/log.md): a function's docstring, a title.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from revela.corpus.chunk import sentences
from revela.corpus.code import documented_functions
from revela.errors import RevelaError
from revela.types import Chunk, Document


@dataclass(frozen=True)
class Prompting:
    """How a language model is asked: what comes before every passage, what after, and whether its
    chat template goes around.
    """

    before: str
    after: str
    chat: bool


INSTRUCTION = Prompting(
    "Read this passage:\n\n",
    "\n\nWrite one question that can be answered from this passage and from nothing else, and whose answer takes more than one of its "
    "sentences. Do not mention the passage. Write it inside <question> and </question>.",
    chat=True,
)
# A small model follows examples where it only repeats an instruction (docs/log.md).
EXAMPLES = Prompting(
    "Passage: Bees tell one another where flowers are by dancing. The angle of the dance gives the direction, and its length the "
    "distance.\nQuestion: How do bees tell one another where flowers are?\n\n"
    "Passage: Water boils at a lower temperature on high mountains, because the air pressure is lower there. Food therefore takes "
    "longer to cook.\nQuestion: Why does food take longer to cook on high mountains?\n\n"
    "Passage: def area(radius): return math.pi * radius ** 2\nQuestion: How is the area of a circle computed from its radius?\n\n"
    "Passage: ",
    "\nQuestion:",
    chat=False,
)
PROMPTINGS = {"examples": EXAMPLES, "instruction": INSTRUCTION}
OPENING, CLOSING = "<question>", "</question>"
BEGINNING = b'{"passage": "'  # of every line of a QueryFile
MIN_WORDS, MAX_WORDS = 4, 40  # of a query
COPIED = 8  # words in a row that a question may not share with its passage
SATURATION = 1.2  # BM25's k1
_WORD = re.compile(r"\w+")
_SPEAKS_OF_ITSELF = re.compile(
    r"\b(passage|paragraph|text above|this text|the text|excerpt|author of this|this question)\b",
    re.IGNORECASE,
)
_SAYS_NOTHING = frozenset(
    _WORD.findall(
        "about according also answer between call called code does from function have into main mean method most name part purpose "
        "question role should some that their them there these they this three type used using value what when where which with work your"
    )
)

Writer = Callable[[Sequence[str]], list[str]]
"""Passages -> what a language model says when it is asked for a question to each."""


@dataclass(frozen=True)
class Answer:
    """A query, or why there is none."""

    query: str = ""
    rejected: str = ""


def judged(output: str, passage: str) -> Answer:
    """What to make of a language model's output."""
    question = " ".join(output.split(CLOSING)[0].replace(OPENING, " ").split())
    if "?" in question:
        question = question[: question.index("?") + 1]
    words = _WORD.findall(question.lower())
    if not words:
        return Answer(rejected="empty")
    if not question.endswith("?"):
        return Answer(rejected="not a question")
    if not MIN_WORDS <= len(words) <= MAX_WORDS:
        return Answer(rejected="too short or too long")
    if _SPEAKS_OF_ITSELF.search(question):
        return Answer(rejected="speaks of the passage")
    if question in EXAMPLES.before:
        return Answer(rejected="repeats an example")
    of_passage = f" {' '.join(_WORD.findall(passage.lower()))} "
    if not any(len(w) > 3 and w not in _SAYS_NOTHING and w in of_passage for w in words):
        return Answer(rejected="says nothing of the passage")
    if any(
        f" {' '.join(words[i : i + COPIED])} " in of_passage
        for i in range(max(1, len(words) - COPIED + 1))
    ):
        return Answer(rejected="copied")
    return Answer(question)


class QueryFile:
    """Answers by passage, in a JSONL file that only grows. A line that a kill cut short is dropped
    when the next answer comes.

    Args:
        path: of the file; made when the first answer comes.
        by: who writes, e.g. a model's fingerprint: answers by others are left alone.

    Raises:
        RevelaError: the file is something else; nothing is changed in it.
    """

    def __init__(self, path: Path, by: str) -> None:
        self.path, self.by = path, by
        self.answers: dict[str, Answer] = {}
        content = path.read_bytes() if path.exists() else b""
        self._whole = content.rfind(b"\n") + 1  # bytes; what follows was cut short
        lines, half = content[: self._whole].splitlines(), content[self._whole :]
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if row["by"] == by:
                    self.answers[row["passage"]] = Answer(row["query"], row["rejected"])
            except (ValueError, KeyError, TypeError):
                raise self._not_ours(number) from None
        if half[: len(BEGINNING)] != BEGINNING[: len(half)]:
            raise self._not_ours(len(lines) + 1)
        self._cut_short = bool(half)

    def _not_ours(self, number: int) -> RevelaError:
        return RevelaError(
            f"{self.path}:{number} is not a line of queries: delete the file, or give another --queries-file"
        )

    def get(self, passage: str) -> Answer | None:
        return self.answers.get(_digest(passage))

    def add(self, passages: Sequence[str], answers: Sequence[Answer]) -> None:
        """Remember, and write at once."""
        try:
            with self.path.open("a", encoding="utf-8") as handle:
                if self._cut_short:
                    handle.truncate(self._whole)
                    self._cut_short = False
                for passage, answer in zip(passages, answers, strict=True):
                    key = _digest(passage)
                    self.answers[key] = answer
                    row = {
                        "passage": key,
                        "by": self.by,
                        "query": answer.query,
                        "rejected": answer.rejected,
                    }
                    handle.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise RevelaError(
                f"{self.path} cannot be written ({error.strerror}): give another --queries-file"
            ) from error


def _digest(passage: str) -> str:
    return hashlib.blake2b(passage.encode(), digest_size=12).hexdigest()


def write_queries(
    passages: Sequence[str],
    file: QueryFile,
    write: Writer,
    batch: int,
    progress: Callable[[int], object],
) -> None:
    """Have every passage that has no answer yet answered, the longest first.

    Args:
        passages: whatever has to have a query.
        file: keeps the answers.
        write: a language model.
        batch: passages at a time.
        progress: is told how many are done, after each batch.
    """
    missing = sorted({p for p in passages if file.get(p) is None}, key=lambda p: (-len(p), p))
    for start in range(0, len(missing), batch):
        some = missing[start : start + batch]
        outputs = write([p.strip() for p in some])
        file.add(
            some, [judged(output, passage) for output, passage in zip(outputs, some, strict=True)]
        )
        progress(len(some))


def without_repeats(answers: Sequence[Answer]) -> list[Answer]:
    """Reject questions that were asked of several passages: they say too little of each."""
    counts = Counter(a.query.lower() for a in answers)
    return [
        Answer(rejected="asked of several passages")
        if a.query and counts[a.query.lower()] > 1
        else a
        for a in answers
    ]


def with_titles(chunks: Iterable[Chunk], documents: Sequence[Document]) -> Iterator[Chunk]:
    """Each chunk with its document's title as query, and without it in its text."""
    for chunk in chunks:
        title = documents[chunk.document].title
        yield replace(chunk, text=_without(chunk.text, title) if title else chunk.text, query=title)


def with_first_sentences(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Each chunk with its first sentence as query, and without it in its text."""
    for chunk in chunks:
        yield _with_sentence(chunk, next(iter(_candidates(chunk.text)), ""))


def with_telling_sentences(chunks: Sequence[Chunk]) -> Iterator[Chunk]:
    """Each chunk with its most telling sentence as query, and without it in its text.

    Telling is a high mean BM25 weight of its words, idf(w) tf / (tf + k1), tf counted in the chunk
    (Robertson & Zaragoza, 2009).
    """
    frequency = Counter[str]()
    for chunk in chunks:
        frequency.update(set(_WORD.findall(chunk.text.lower())))
    n_chunks = len(chunks)

    def weight(sentence: str, counts: Counter[str]) -> float:
        words = set(_WORD.findall(sentence.lower()))
        idf = {
            w: math.log(1 + (n_chunks - frequency[w] + 0.5) / (frequency[w] + 0.5)) for w in words
        }
        # A set has another order in every process; fsum does not depend on it.
        return math.fsum(idf[w] * counts[w] / (counts[w] + SATURATION) for w in words) / len(words)

    for chunk in chunks:
        counts = Counter(_WORD.findall(chunk.text.lower()))
        yield _with_sentence(
            chunk, max(_candidates(chunk.text), key=lambda s: weight(s, counts), default="")
        )


def _candidates(text: str) -> list[str]:
    """Sentences that can be a query, if something is left of the text without them."""
    found = sentences(text)
    if len(found) < 2 or len(_WORD.findall(text)) < 2 * MIN_WORDS:
        return []
    return [s for s in found if MIN_WORDS <= len(_WORD.findall(s)) <= MAX_WORDS]


def _with_sentence(chunk: Chunk, sentence: str) -> Chunk:
    return (
        replace(chunk, text=_without(chunk.text, sentence), query=" ".join(sentence.split()))
        if sentence
        else chunk
    )


def _without(text: str, part: str) -> str:
    rest = text.replace(part, "", 1)
    return rest if rest.strip() else text


def with_authors_words(chunks: Sequence[Chunk], documents: Sequence[Document]) -> Iterator[Chunk]:
    """What the author wrote about a text, as its query: docstrings to functions, titles to chunks;
    else the most telling sentence.

    Of code with docstrings only the documented functions are given, whole and without them.
    """
    for document, pairs in groupby(
        zip(chunks, with_telling_sentences(chunks), strict=True), key=lambda pair: pair[0].document
    ):
        source = documents[document]
        functions = list(documented_functions(source.text)) if source.kind == "code" else []
        if functions:
            yield from (Chunk(document, function, docstring) for docstring, function in functions)
        elif source.title:
            yield from with_titles((chunk for chunk, _ in pairs), documents)
        else:
            yield from (telling for _, telling in pairs)


def documents_with_chunks(owners: Sequence[int], at_most: int, seed: int) -> set[int]:
    """Documents drawn at random until they have ``at_most`` chunks; all if 0."""
    counts = Counter(owners)
    order = sorted(counts)
    random.Random(seed).shuffle(order)
    chosen: set[int] = set()
    total = 0
    for document in order:
        if at_most and total + counts[document] > at_most and chosen:
            break
        chosen.add(document)
        total += counts[document]
    return chosen
