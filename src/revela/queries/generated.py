"""A query for each passage, written by a language model, checked, and kept in a file.

The model is shown three examples, or asked for one question that only the passage answers (DREAM,
appendix A; our wording). Every answer, kept or not, is appended to a file at once, so that a
stopped run continues where it was.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from revela.corpus.words import count_terms, runs, terms
from revela.errors import RevelaError
from revela.queries.from_text import MAX_QUERY_WORDS, MIN_QUERY_WORDS


@dataclass(frozen=True)
class Prompting:
    """A prompt: the text before and after the passage."""

    before: str
    after: str


# A small model follows examples, where it only repeats an instruction.
EXAMPLES = Prompting(
    "Passage: Bees tell one another where flowers are by dancing. The angle of the dance gives the "
    "direction, and its length the distance.\n"
    "Question: How do bees tell one another where flowers are?\n\n"
    "Passage: Water boils at a lower temperature on high mountains, because the air pressure is "
    "lower there. Food therefore takes longer to cook.\n"
    "Question: Why does food take longer to cook on high mountains?\n\n"
    "Passage: def area(radius): return math.pi * radius ** 2\n"
    "Question: How is the area of a circle computed from its radius?\n\n"
    "Passage: ",
    "\nQuestion:",
)
OPENING, CLOSING = "<question>", "</question>"
BEGINNING = b'{"passage": "'  # of every line of a file of queries
COPIED = 8  # words in a row that a question may not share with its passage
# Where a question ends: at its mark, in Greek a semicolon; in Armenian the mark stands inside.
_ASKED = re.compile(
    "[?\u037e\u061f\u1367\ua60f\uff1f]|(?<=[\u0370-\u03ff\u1f00-\u1fff]);"
    "|\u055e[^\u0589:]*[\u0589:]?"
)
_SPEAKS_OF_ITSELF = re.compile(
    r"\b(passage|paragraph|text above|this text|the text|excerpt|author of this|this question)\b",
    re.IGNORECASE,
)
_SAYS_NOTHING = frozenset(
    terms(
        "about according also answer between call called code does from function have into main "
        "mean method most name part purpose question role should some that their them there these "
        "they this three type used using value what when where which with work your"
    )
)

Writer = Callable[[Sequence[str]], list[str]]
"""Passages -> the output of a language model that is asked for a question to each."""


@dataclass(frozen=True)
class Answer:
    """A query, or the reason why it was rejected."""

    query: str = ""
    rejected: str = ""


REPEATED = Answer(rejected="asked of several passages")  # it says too little about each


def check_output(output: str, passage: str) -> Answer:
    """The question in a language model's output, or why it is rejected.

    >>> check_output("Bees dance.", "Bees tell one another where flowers are by dancing.")
    Answer(query='', rejected='not a question')
    """
    question = " ".join(output.split(CLOSING)[0].replace(OPENING, " ").split())
    asked = _ASKED.search(question)
    question = question[: asked.end()] if asked else question
    words = terms(question.lower())
    if not words:
        return Answer(rejected="empty")
    if not asked:
        return Answer(rejected="not a question")
    if not MIN_QUERY_WORDS <= count_terms(words) <= MAX_QUERY_WORDS:
        return Answer(rejected="too short or too long")
    if _SPEAKS_OF_ITSELF.search(question):
        return Answer(rejected="speaks of the passage")
    if question in EXAMPLES.before:
        return Answer(rejected="repeats an example")
    of_passage = f" {' '.join(terms(passage.lower()))} "
    telling = [w for w in words if len(w) > 3 and w not in _SAYS_NOTHING]
    telling += [" ".join(terms(run)) for run in runs(question)]
    if not any(w in of_passage for w in telling):
        return Answer(rejected="says nothing of the passage")
    copied = COPIED * len(words) // count_terms(words)  # a word of Chinese is two terms
    starts = range(max(1, len(words) - copied + 1))
    if any(f" {' '.join(words[i : i + copied])} " in of_passage for i in starts):
        return Answer(rejected="copied")
    return Answer(question)


class QueryFile:
    """Answers by passage, in a JSONL file that is only appended to, by several processes if need
    be. A line that a kill has cut short is ignored, and so are answers by others than ``by``.

    Raises:
        RevelaError: the file holds something else; it is not changed.
    """

    def __init__(self, path: Path, by: str) -> None:
        self.path, self.by = path, by
        self.answers: dict[str, Answer] = {}
        lines = path.read_bytes().splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if row["by"] == by:
                    self.answers[row["passage"]] = Answer(row["query"], row["rejected"])
            except (ValueError, KeyError, TypeError):
                if line[: len(BEGINNING)] != BEGINNING[: len(line)]:
                    raise RevelaError(
                        f"{path}:{number} is not a line of queries: delete the file, or give "
                        "another --queries-file"
                    ) from None

    def get(self, passage: str) -> Answer | None:
        return self.answers.get(_digest(passage))

    def add(self, passages: Sequence[str], answers: Sequence[Answer]) -> None:
        """Append answers to the file at once."""
        from filelock import FileLock

        new = dict(zip(map(_digest, passages), answers, strict=True))
        rows = ({"passage": key, "by": self.by, **asdict(answer)} for key, answer in new.items())
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
            with lock, self.path.open("ab+") as handle:
                handle.seek(max(0, handle.tell() - 1))
                is_whole = handle.read() in (b"", b"\n")
                handle.write((lines if is_whole else f"\n{lines}").encode())
        except OSError as error:
            message = f"{self.path} cannot be written ({error.strerror})"
            raise RevelaError(f"{message}: give another --queries-file") from error
        self.answers |= new


def _digest(passage: str) -> str:
    return hashlib.blake2b(passage.encode(), digest_size=12).hexdigest()


def write_queries(
    passages: Sequence[str],
    file: QueryFile,
    write: Writer,
    batch: int,
    progress: Callable[[int], object],
) -> None:
    """Write a query for every passage without an answer, the longest passages first; ``progress``
    is called with the number of passages after each batch.
    """
    missing = sorted({p for p in passages if file.get(p) is None}, key=lambda p: (-len(p), p))
    for start in range(0, len(missing), batch):
        some = missing[start : start + batch]
        outputs = write([p.strip() for p in some])
        file.add(some, [check_output(*pair) for pair in zip(outputs, some, strict=True)])
        progress(len(some))


def without_repeats(answers: Sequence[Answer]) -> list[Answer]:
    """Reject questions to several passages."""
    counts = Counter(a.query.lower() for a in answers)
    return [REPEATED if a.query and counts[a.query.lower()] > 1 else a for a in answers]
