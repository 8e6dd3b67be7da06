"""Queries by a language model: which outputs are kept, and a file that survives a kill."""

from __future__ import annotations

import sys
from collections import Counter
from multiprocessing import get_context

import pytest

from revela.errors import RevelaError
from revela.training.generated_queries import (
    EXAMPLES,
    INSTRUCTION,
    Answer,
    QueryFile,
    QueryLM,
    check_output,
    without_repeats,
)
from revela.training.lm import generate
from revela.training.settings import LM, Queries, Retriever, Training

PASSAGE = (
    "The mitral valve has two leaflets. "
    "It lies between the left atrium and the left ventricle, and closes in systole."
)
VALVE = "Which valve closes when it contracts?"


OUTPUTS = [
    (f"{VALVE}</question> More.", Answer(VALVE)),
    ("<question>\nWhich  valve closes\nwhen it contracts? And why?", Answer(VALVE)),
    ("", Answer(rejected="empty")),
    ("  </question>", Answer(rejected="empty")),
    ("The mitral valve has two leaflets.", Answer(rejected="not a question")),
    ("Why so?", Answer(rejected="too short or too long")),
    ("How do bees tell one another where flowers are?", Answer(rejected="repeats an example")),
    ("What is the name of the method?", Answer(rejected="says nothing of the passage")),
    ("What is the main topic of this passage?", Answer(rejected="speaks of the passage")),
    ("Lies between the left atrium and the left ventricle?", Answer(rejected="copied")),
    ("It lies between the left atrium?", Answer(rejected="copied")),
]


@pytest.mark.parametrize(("output", "answer"), OUTPUTS)
def test_a_question_is_taken_out_of_an_output_or_rejected(output, answer):
    assert check_output(output, PASSAGE) == answer


@pytest.fixture
def lm(tiny_lm_folder, tmp_path, monkeypatch):
    """A file of queries, opened with a language model that answers by a function."""

    def opened(write, prompt=""):
        monkeypatch.setattr("revela.training.lm.generate.writer", lambda *_: write)
        monkeypatch.setattr("revela.training.generated_queries.WRITING_BATCH", 2)
        lm, queries = LM(lm=str(tiny_lm_folder)), Queries(question_prompt=prompt)
        return QueryLM(tmp_path / "queries.jsonl", queries, lm, Retriever(), Training())

    return opened


def test_the_file_keeps_answers_and_goes_on_after_a_kill(lm, tmp_path):
    passages = [f"{PASSAGE} Number {i}." for i in range(5)]
    asked: list[str] = []

    def write(prompts):
        asked.extend(prompts)
        if len(asked) > 4:
            raise KeyboardInterrupt
        return [VALVE, "no"][: len(prompts)]

    with pytest.raises(KeyboardInterrupt):
        lm(write).answers(passages)
    path = tmp_path / "queries.jsonl"
    with path.open("a") as handle:
        handle.write('{"passage": "cut sho')  # killed in the middle of a line
    done: list[str] = []

    def write_on(prompts):
        done.extend(prompts)
        return ["Which valve is it that closes there?"] * len(prompts)

    again = lm(write_on)
    kept = Counter(answer.rejected for answer in again.file.answers.values())
    assert kept == {"": 2, "not a question": 2}
    answers = again.answers([*passages, passages[0]])
    assert len(done) == 1 and len(answers) == 6 and answers[0] == answers[5] != Answer()
    assert len(QueryFile(path, again.file.by).answers) == path.read_bytes().count(b"\n") - 1 == 5
    assert QueryFile(path, "another model").answers == {}


def test_the_prompt_is_three_examples_our_instruction_or_one_s_own(lm, tmp_path, monkeypatch):
    read, file = [], tmp_path / "prompt.txt"
    file.write_text("Ask about {passage}\n")
    for prompt in ("", "instruction", "On {passage}:", str(file)):
        opened = lm(len, prompt)
        monkeypatch.setattr(generate, "writer", lambda _, text, *__: read.append(text) or len)
        assert opened.missing([PASSAGE]) and opened._writer  # the answers to one are not another's
        opened.file.add([PASSAGE], [Answer(VALVE)])
    assert read == [EXAMPLES, INSTRUCTION, "On {passage}:", "Ask about {passage}"]
    with pytest.raises(RevelaError, match="--question-prompt Why has no "):
        lm(len, "Why")


def test_a_question_to_several_passages_is_one_to_none():
    atrium = "What is an atrium for?"
    answers = [Answer(q) for q in ("What is a valve for?", "What is a Valve for?", atrium, "")]
    assert [answer.query for answer in without_repeats(answers)] == ["", "", atrium, ""]


SOMETHING_ELSE = [
    b'{"text": "a corpus"}\n',
    b'{"text": "a corpus", "title": "on one line"}',  # no newline at its end
    b"notes\nof mine, and no newline",
    b'{"passage": "p", "by": "m", "query": "", "rejected": "empty"}\nnotes',
    b"\x8c\xff\n{",
]


@pytest.mark.parametrize("content", SOMETHING_ELSE)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(RevelaError, match=r"x\.jsonl:\d is not a line of queries"):
        QueryFile(path, "m")
    assert path.read_bytes() == content


def test_a_line_that_was_cut_short_costs_nothing_but_itself(tmp_path):
    path = tmp_path / "x.jsonl"
    one, two, three = Answer("Which one is it?"), Answer(rejected="empty"), Answer("Which is it?")
    QueryFile(path, "m").add(["one"], [one])
    first = path.read_bytes()
    for cut in (1, 20, len(first) - 1):
        path.write_bytes(first + first[:cut])
        again, other = QueryFile(path, "m"), QueryFile(path, "m")
        assert path.read_bytes() == first + first[:cut]
        again.add(["two"], [two])
        other.add(["three"], [three])
        assert path.read_bytes().startswith(first)
        read = QueryFile(path, "m")
        assert [read.get(passage) for passage in ("one", "two", "three")] == [one, two, three]


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_processes_that_write_at_once_lose_nothing(tmp_path):
    path = tmp_path / "corpus.queries.jsonl"

    def write(name):
        file = QueryFile(path, "tiny")
        for i in range(30):
            file.add([f"{name}{i}"], [Answer("why? " * 3000)])

    writers = [get_context("fork").Process(target=write, args=(name,)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    read = QueryFile(path, "tiny")
    assert len(read.answers) == 60 == path.read_bytes().count(b"\n")


OTHER_SCRIPTS = [
    ("蜜蜂通过舞蹈告诉同伴花丛的位置。", "蜜蜂怎样告诉同伴花在哪里？"),
    ("ミツバチは踊りで花の場所を仲間に教える。", "ミツバチはどうやって花の場所を伝えますか？"),
    ("يرقص النحل ليدل رفاقه على مكان الزهور.", "كيف يدل النحل رفاقه على الزهور؟"),
    ("Οι μέλισσες χορεύουν για να δείξουν τα λουλούδια.", "Πώς δείχνουν οι μέλισσες τα άνθη;"),
    ("Մեղուները պարով ցույց են տալիս ծաղիկները։", "Ինչպե՞ս են մեղուները ցույց տալիս տեղը։"),
    ("मधुमक्खियाँ नाचकर फूलों की जगह बताती हैं।", "मधुमक्खियाँ फूलों की जगह कैसे बताती हैं?"),
    ("ผึ้งเต้นรำเพื่อบอกเพื่อนว่าดอกไม้อยู่ที่ไหน", "ผึ้งบอกเพื่อนเรื่องดอกไม้อย่างไร?"),
]


@pytest.mark.parametrize(("passage", "question"), OTHER_SCRIPTS)
def test_questions_in_other_scripts(passage, question):
    assert check_output(question + " And more.", passage) == Answer(question)
    said = "says nothing of the passage"
    assert check_output(question, "Something else entirely is written here.").rejected == said


def test_a_copied_question_is_found_without_spaces():
    question = "蜜蜂通过跳舞来告诉其他同伴花丛的确切位置吗"
    passage = f"据说{question}没有人知道。"
    assert check_output(f"{question}？", passage).rejected == "copied"
    assert check_output("蜜蜂？", passage).rejected == "too short or too long"
