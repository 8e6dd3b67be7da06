"""Let a language model write queries for chunks, before or during training; check and store them.

The prompt has three examples of a passage and a question that it answers; DREAM's appendix A has an
instruction, and ``INSTRUCTION`` is one in our words. Every answer, accepted or not, is appended to
a file at once, so that a stopped run can continue.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from revela.encoders.model_files import fingerprint, name_of
from revela.errors import RevelaError
from revela.files import disk_errors
from revela.ranking.queries import MAX_QUERY_WORDS, MIN_QUERY_WORDS
from revela.terminal import progress_bar
from revela.text.spool import ArrowList, arrow_list
from revela.text.words import count_terms, runs, terms
from revela.training.distributed import cores
from revela.training.groups.strategies import Groups
from revela.training.lm import generate
from revela.training.lm.generate import CLOSING, PLACE, Writer
from revela.training.models import find_model
from revela.training.settings import LM, Queries, Retriever, Training
from revela.types import Chunk

log = logging.getLogger(__name__)

WRITING_BATCH = 32
BLOCK = 64  # chunks whose queries are written at a time during training
NO_QUERY = "no chunk has a query: try another --queries than {}, or another --query-lm"

# A small model follows examples; it repeats an instruction instead of following it.
EXAMPLES = (
    "Passage: Bees tell one another where flowers are by dancing. The angle of the dance gives the "
    "direction, and its length the distance.\n"
    "Question: How do bees tell one another where flowers are?\n\n"
    "Passage: Water boils at a lower temperature on high mountains, because the air pressure is "
    "lower there. Food therefore takes longer to cook.\n"
    "Question: Why does food take longer to cook on high mountains?\n\n"
    "Passage: def area(radius): return math.pi * radius ** 2\n"
    "Question: How is the area of a circle computed from its radius?\n\n"
    f"Passage: {PLACE}\nQuestion:"
)
INSTRUCTION = (
    "Write one question that the passage below answers. Readers of the question have not seen the "
    f"passage. Write only the question.\n\nPassage: {PLACE}\n\nQuestion:"
)
OPENING = "<question>"
BEGINNING = b'{"passage": "'  # of every line of a file of queries
COPIED = 8  # a question with this many consecutive words of its passage is rejected
# The end of a question: a question mark; in Greek a semicolon. In Armenian the mark is inside.
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


@dataclass(frozen=True)
class Answer:
    """What a language model answered about a passage, as a ``QueryFile`` keeps it: a query, or the
    reason why it was rejected.
    """

    query: str = ""
    rejected: str = ""


REPEATED = Answer(rejected="asked of several passages")


def check_output(output: str, passage: str) -> Answer:
    """Extract the question from a language model's output, or give the reason to reject it.

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
    if question in EXAMPLES:
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
    """An append-only JSONL file of answers by passage; several processes may write to it.

    Truncated lines, and answers of other models than ``by``, are ignored.

    Raises:
        RevelaError: the file holds something else, and is left as it was.
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
                        f"{path}:{number} is not a line of queries: give another --queries-file"
                    ) from None

    def get(self, passage: str) -> Answer | None:
        return self.answers.get(_digest(passage))

    def add(self, passages: Sequence[str], answers: Sequence[Answer]) -> None:
        """Append answers to the file at once."""
        from filelock import FileLock

        new = dict(zip(map(_digest, passages), answers, strict=True))
        rows = ({"passage": key, "by": self.by, **asdict(answer)} for key, answer in new.items())
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
            with lock, self.path.open("ab+") as handle:
                handle.seek(max(0, handle.tell() - 1))
                is_whole = handle.read() in (b"", b"\n")
                handle.write((lines if is_whole else f"\n{lines}").encode())
        self.answers |= new


def _digest(passage: str) -> str:
    return hashlib.blake2b(passage.encode(), digest_size=12).hexdigest()


def without_repeats(answers: Sequence[Answer]) -> list[Answer]:
    """Reject a question that several passages have: it says too little about each."""
    counts = Counter(a.query.lower() for a in answers)
    return [REPEATED if a.query and counts[a.query.lower()] > 1 else a for a in answers]


def read_prompt(prompt: str) -> str:
    """The examples (""), our instruction, or the prompt in a text or file; RevelaError if it has no
    place for the passage.
    """
    text = {"": EXAMPLES, "instruction": INSTRUCTION}.get(prompt, prompt)
    with suppress(OSError, ValueError):  # it may be no path
        text = text if PLACE in text else Path(text).read_text(encoding="utf-8").rstrip("\n")
    if PLACE not in text:
        raise RevelaError(f"--question-prompt {prompt} has no {PLACE}: give a text or file with it")
    return text


def draw_targets(chunks: ArrowList[Chunk], targets: int, seed: int) -> NDArray[np.bool_]:
    """Which chunks to ask about: ``targets`` random ones of each document, those with a query
    before others; 0: all.
    """
    owners = chunks.column("document")
    if not targets:
        return np.ones(len(owners), np.bool_)
    drawn = np.random.default_rng(seed).random(len(owners))
    order = np.lexsort((drawn, chunks.column("query") == "", owners))
    place_R = np.empty(len(owners), np.int64)  # within its document
    place_R[order] = np.arange(len(owners)) - np.searchsorted(owners[order], owners[order])
    return place_R < targets


def sample_chunks(chunks: ArrowList[Chunk], max_queries: int, targets: int = 0) -> ArrowList[Chunk]:
    """The chunks to write queries for: all of some random documents, of which ``targets`` (0: all)
    are asked about, at most ``max_queries`` in all, but of at least one document.

    The sample is the same in every run, so that queries are written once.
    """
    owners = chunks.column("document")
    documents, counts = np.unique(owners, return_counts=True)
    counts = np.minimum(counts, targets or counts)
    order = list(range(len(documents)))
    random.Random(0).shuffle(order)
    n_fitting = int((np.cumsum(counts[order]) <= max_queries).sum()) if max_queries else len(order)
    sample = documents[order[: max(1, n_fitting)]]
    return chunks.select(np.flatnonzero(np.isin(owners, sample)))


def generate_queries(
    lm: QueryLM, chunks: ArrowList[Chunk], is_target_R: NDArray[np.bool_]
) -> ArrowList[Chunk]:
    """Chunks, the targets with queries from a language model."""
    rows = np.flatnonzero(is_target_R).tolist()
    query_of = dict(zip(rows, write_queries(lm, [chunks[i].text for i in rows]), strict=True))
    asked = (replace(chunk, query=query_of.get(i, "")) for i, chunk in enumerate(chunks))
    return arrow_list(Chunk, asked)


def with_questions(chunks: ArrowList[Chunk], file: Path) -> ArrowList[Chunk]:
    """The chunks of all documents that a JSONL file asks about, with its questions.

    Raises:
        RevelaError: a line has no chunk and question, or its chunk is not of these.
    """
    asked: dict[str, tuple[int, str]] = {}  # text -> its line and question
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            asked[row["chunk"].strip()] = number, " ".join(row["question"].split())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RevelaError(
                f'{file}:{number} has no "chunk" and "question": see revela queries --chunks'
            ) from None
    rows = [i for i, chunk in enumerate(chunks) if chunk.text.strip() in asked]
    if unknown := asked.keys() - {chunks[i].text.strip() for i in rows}:
        raise RevelaError(
            f"{file}:{min(asked[text][0] for text in unknown)} asks about a chunk that the corpus "
            "does not have: make the chunks by revela queries --chunks, with the settings of this "
            "run"
        )
    owners = chunks.column("document")
    kept = chunks.select(np.flatnonzero(np.isin(owners, owners[np.array(rows, np.int64)])))
    asking = (replace(chunk, query=asked.get(chunk.text.strip(), (0, ""))[1]) for chunk in kept)
    return arrow_list(Chunk, asking)


def write_queries(lm: QueryLM, texts: Sequence[str], unit: str = "chunks") -> list[str]:
    """A language model's query about each text, or ""; the log calls the texts ``unit``."""
    if missing := lm.missing(texts):
        log.info(f"{lm}: {len(missing):,}")
    answers = without_repeats(lm.answers(texts))
    lm.unload()
    log.info(_summary(answers, unit))
    return [answer.query for answer in answers]


def _summary(answers: Collection[Answer], unit: str) -> str:
    """Count the answers with a query, and the reasons of the others."""
    rejected = Counter(a.rejected for a in answers if a.rejected)
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in rejected.most_common())
    summary = f"queries for {len(answers) - rejected.total():,} of {len(answers):,} {unit}"
    return f"{summary}; rejected: {reasons}" if reasons else summary


class QueryLM:
    """A language model that writes queries, and the ``QueryFile`` of its answers.

    The model is loaded for the first text without an answer, and stays in memory.

    Raises:
        RevelaError: the model cannot be found, or the file cannot be used.
    """

    def __init__(
        self, path: Path | None, queries: Queries, lm: LM, retriever: Retriever, training: Training
    ) -> None:
        if path is None:
            raise RevelaError("no file for the written queries: give --queries-file")
        self.lm_tokens, self.training = lm.lm_tokens, training
        self.name, self.folder = find_model(queries.query_lm or lm.lm, retriever.offline_model)
        self.prompt = read_prompt(queries.question_prompt)
        about = _digest(self.prompt) if queries.question_prompt else "examples"
        self.file = QueryFile(path, f"{fingerprint(self.folder)}, {about}")

    def __str__(self) -> str:
        return f"{name_of(self.folder)} writes queries into {self.file.path}"

    def missing(self, texts: Iterable[str]) -> set[str]:
        """Those of these texts without an answer."""
        return {text for text in texts if self.file.get(text) is None}

    def answers(self, texts: Sequence[str]) -> list[Answer]:
        """The answer to each text; missing ones are written, those of the longest texts first."""
        if missing := sorted(self.missing(texts), key=lambda text: (-len(text), text)):
            torch.set_num_threads(cores(self.training.threads))
            with progress_bar("writing queries", "query", total=len(missing)) as bar:
                for start in range(0, len(missing), WRITING_BATCH):
                    batch = missing[start : start + WRITING_BATCH]
                    outputs = self._writer([text.strip() for text in batch])
                    self.file.add(batch, list(map(check_output, outputs, batch)))
                    bar.update(len(batch))
        return [self.file.get(text) or Answer() for text in texts]

    @cached_property
    def _writer(self) -> Writer:
        return generate.writer(self.folder, self.prompt, self.lm_tokens, self.training.precision)

    def unload(self) -> None:
        """Free the memory of the model."""
        self.__dict__.pop("_writer", None)
        gc.collect()  # models of transformers have reference cycles


class GeneratedQueries:
    """Queries written during training, a block of groups at a time.

    A question that a second chunk repeats is dropped from then on. Queries do not depend on what is
    in the file already, so a resumed or repeated run reads the same.
    """

    def __init__(self, lm: QueryLM, rows: ArrowList[Chunk], is_target_R: NDArray[np.bool_]) -> None:
        self.lm, self.rows, self.is_target_R = lm, rows, is_target_R
        self._answers, self._chunks_of = dict[int, Answer](), dict[str, set[int]]()

    def row(self, index: int) -> Chunk:
        """A row with its query; its group must have been yielded by ``groups``."""
        return replace(self.rows[index], query=self._query(index))

    def _query(self, index: int) -> str:
        return self._answers[index].query if self.is_target_R[index] else ""

    def groups(self, order: Groups) -> Groups:
        """Epoch -> the groups of ``order`` in which any chunk has a query; RevelaError if none."""

        def epoch_groups(epoch: int) -> Iterator[list[int]]:
            groups, is_empty = order(epoch), True
            for group in groups:
                size = max(1, int(self.is_target_R[group].sum()))
                block = [group, *islice(groups, max(0, BLOCK // size - 1))]
                self._write(sorted({i for group in block for i in group if self.is_target_R[i]}))
                for group in block:
                    if any(map(self._query, group)):
                        is_empty = False
                        yield group
            if is_empty:
                raise RevelaError(NO_QUERY.format("lm"))

        return epoch_groups

    def summary(self) -> str:
        """Count the chunks read so far that have a query, and the reasons of the others."""
        return _summary(self._answers.values(), "chunks")

    def _write(self, rows: Sequence[int]) -> None:
        answers = dict(zip(rows, self.lm.answers([self.rows[i].text for i in rows]), strict=True))
        for i, answer in answers.items():
            self._chunks_of.setdefault(answer.query.lower(), set()).add(i)
        for i, answer in answers.items():
            is_repeated = answer.query and len(self._chunks_of[answer.query.lower()]) > 1
            self._answers[i] = REPEATED if is_repeated else answer
