"""Terms of BM25 in every script, the same for bm25s, LanceDB and the statistics; the language of a
text.
"""

from __future__ import annotations

import sys
import tempfile
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from revela.errors import RevelaError
from revela.ranking.bm25 import BM25
from revela.searching.index import Index
from revela.text.analyzer import Analyzer, check_language, detect, searched
from revela.text.letters import normalised, wholes
from revela.types import Document
from tests.searching.letters import Letters, build, extend

TEXTS = {
    "de": "Die Häuser der Stadt wurden im vergangenen Jahrhundert gebaut und stehen noch heute.",
    "ru": "В прошлом веке в этом городе были построены дома, которые стоят до сих пор.",
    "ar": "بنيت بيوت المدينة في القرن الماضي وما زالت قائمة حتى اليوم.",
    "zh": "这座城市的房屋建于上个世纪，至今仍然屹立不倒。",
    "ja": "この町の家は前の世紀に建てられ、今でも立っています。",
    "ko": "이 도시의 집들은 지난 세기에 지어졌으며 오늘날까지도 서 있습니다.",
    "th": "บ้านเรือนในเมืองนี้สร้างขึ้นในศตวรรษที่แล้วและยังคงตั้งอยู่จนถึงทุกวันนี้",
    "hi": "इस शहर के घर पिछली सदी में बनाए गए थे और आज भी खड़े हैं।",
    "tr": "Bu şehrin evleri geçen yüzyılda inşa edilmiş ve bugün hâlâ ayakta duruyor.",
    "pl": "Domy w tym mieście zbudowano w ubiegłym wieku i stoją do dziś.",
}


@pytest.mark.parametrize("language", TEXTS)
def test_the_language_of_a_text(language):
    assert detect([TEXTS[language]] * 3) == language


def test_a_script_may_have_several_languages():
    assert set(detect([TEXTS["ru"]] * 6 + [TEXTS["de"]] * 6).split("+")) == {"ru", "de"}
    assert set(detect([TEXTS["pl"] * 9, TEXTS["de"] * 9]).split("+")) == {"pl", "de"}
    assert detect([TEXTS["de"] * 9] * 9 + [TEXTS["pl"] * 9]) == "de+pl"
    assert detect([TEXTS["de"] * 9] * 29 + [TEXTS["pl"] * 9]) == "de"
    for texts in ([], ["42", "--"], ["Hello"], ["OK"], ["Да"]):  # a word or two have no language
        assert detect(texts) == "none"


def test_a_language_of_most_text_is_stemmed_beside_many_small_ones():
    """A folder of one person: German, and a note in each of five other languages."""
    small = [
        "Les maisons de la ville ont été construites au siècle dernier et sont encore debout.",
        "Las casas de la ciudad se construyeron en el siglo pasado y todavía están en pie.",
        "Le case della città furono costruite nel secolo scorso e sono ancora in piedi.",
    ]
    small += TEXTS["tr"], TEXTS["pl"]
    assert detect([TEXTS["de"] * 9] * 17 + [text * 9 for text in small]) == "de"


def test_each_text_is_stemmed_by_its_own_language():
    mixed = Analyzer("de+pl+tr+ru")
    for language in ("de", "pl", "tr", "ru"):
        alone = Analyzer(language)
        assert mixed(TEXTS[language]) == alone(TEXTS[language]) != Analyzer("none")(TEXTS[language])
        assert [*mixed.places(TEXTS[language])] == [*alone.places(TEXTS[language])]
        assert {*alone(TEXTS[language])} - {*mixed.of_query(TEXTS[language])} <= {"i"}, (
            "Polish: and"
        )


def test_a_query_is_stemmed_by_each_language_and_loses_the_stop_words_of_all():
    mixed = Analyzer("en+de+fr+ru")
    assert mixed.of_query("houses") == ["hous"]
    assert mixed.of_query("die maisons города") == ["die", "di", "maison", "город"]
    assert mixed.of_query("gardening") == ["garden", "gardening"]
    assert Analyzer("en").of_query("The gardening") == Analyzer("en")("The gardening") == ["garden"]


def test_a_word_that_a_query_repeats_counts_once_and_a_whole_string_twice():
    terms = Analyzer("en")
    assert terms.of_query("a list of lists in a list, sorted") == ["list", "sort"]
    assert Counter(terms.of_query("was 2024-05-06 before 2024-05-06?"))["2024-05-06"] == 2
    mixed = Analyzer("en+fr")
    assert mixed.of_query("gardens of the garden", likely=True) == ["garden"]


TWO_WAYS = [
    ("de", "Häuser", "hausern"),
    ("fr", "prévisions", "PREVISION"),
    ("ru", "за́мок", "замок"),
    ("ar", "الكِتَابُ", "الكتاب"),
    ("he", "שָׁלוֹם", "שלום"),
    ("tr", "İSTANBUL ILIK", "istanbul ılık"),
    ("none", "ｶﾞﾗｽ １２３ ﬁsh", "ガラス 123 fish"),
    ("none", "in\u00adfor\u00admation", "information"),
    ("el", "ΛΌΓΟΣ", "λογος"),
    ("uk", "п'ять", "п’ять"),
    ("uk", "пʼять м`який", "п'ять м'який"),
    ("hi", "क़लम ज़रूर", "कलम जरूर"),
    ("ar", "١٢٣ عام", "123 عام"),
    ("hi", "२०२६ में", "2026 में"),
    ("ru+en", "Houses города", "house город"),
    ("en", "in\u200bvo\ufeffic\u200ees \u2068garden\u2069", "invoices garden"),
    ("de", "Auf\u200clage", "Auflage"),
    ("hi", "क्\u200dष न्\u200cम", "क्ष न्म"),
    ("ml", "അവൻ പാൽ", "അവന്\u200d പാല്"),
    ("en", "کتاب علی أحمد مسؤول خانۀ", "كتاب علي احمد مسوول خانه"),
    ("none", "کتاب رئیس", "كتاب رييس"),
    ("ar", "مکتبة", "مكتبة"),
    ("fa", "كتابها", "کتابها"),
    ("tr", "Istanbul", "istanbul"),
]


@pytest.mark.parametrize(("language", "text", "same"), TWO_WAYS)
def test_what_is_written_in_two_ways_is_one_term(language, text, same):
    terms = Analyzer(language)
    assert terms(text) == terms(same) != []


FORMS = [
    ("tr", "API WIFI", ["api", "API", "wifi", "wıfı"]),
    ("fa", "کتاب\u200cخانه\u200cها", ["کتاب\u200cخانه\u200cها", "کتابخانهها", "کتاب خانه"]),
    ("en", "The NW-1007, C++17 and COVID19", ["NW1007", "nw 1007", "C++", "COVID-19", "c++17"]),
]


@pytest.mark.parametrize(("language", "text", "asked"), FORMS)
def test_a_word_is_found_in_each_of_its_forms(language, text, asked):
    terms = Analyzer(language)
    for query in asked:
        assert {*terms(text)} & {*terms.of_query(query)}, query


WITH_DIGITS = [
    ("on 2024-06-05.", ["2024-06-05"]),
    ("2024/06/05, 05.06.2024 and 5/6/24", ["2024-06-05", "05-06-2024", "5-6-24"]),
    ("2024-06-05T10:30", ["2024-06-05", "10-30"]),
    ("会议2024年6月5日开始", ["2024-06-05", "06-05"]),
    ("2024년 6월 5일", ["2024-06-05", "06-05"]),
    ("٢٠٢٤-٠٦-٠٥", ["2024-06-05"]),
    ("v1.2.3 and 1.2.3-rc1", ["v1-2-3", "1-2-3", "1-2-3rc1"]),
    ("10.0.0.1:8080", ["10-0-0-1"]),
    ("<mailto:anna.berg@example.org>, or otto@b.org!", ["anna-berg@example-org", "otto@b-org"]),
    ("邮箱anna@b.org谢谢", ["anna@b-org"]),
    ("+49 30 1234567", ["49-30-1234567"]),
    ("(030) 123-4567", ["030-123-4567"]),
    ("call 06 12 34 56 78 now", ["06-12-34-56-78"]),
    ("C++17, C#12 and IL\u20112", ["c++17", "c#12", "il2"]),
    ("1 000 000 or 1,000,000", ["1-000-000"]),
    ("backup_2024-06-05_v2.zip", ["2024-06-05"]),
]


@pytest.mark.parametrize(("text", "found"), WITH_DIGITS)
def test_a_string_with_digits_is_a_term_as_a_whole_and_its_parts_are_terms_as_before(text, found):
    terms = Analyzer("en")
    assert {*found} <= {term for *_, term in wholes(text)} <= {*terms(text)}
    assert {*found} <= {*terms.of_query(text)} and {*found} <= {*Analyzer("en+zh").of_query(text)}
    parts = {term for *_, term in terms.places(text)} - {term for *_, term in wholes(text)}
    assert parts <= {*terms(text)} and parts


def test_what_has_no_sign_or_no_digit_is_no_whole():
    assert wholes("well-known and/or 42 items, os.path, page 3 of 2024") == []
    assert wholes("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16") == wholes("a" * 99 + "-1") == []


SIMILAR = ["2024-05-06", "2024-06-05", "1.2.3", "3.2.1", "10.0.1.2", "10.2.1.0", "5/6/2024"]
SIMILAR += ["6/5/2024", "2024年5月6日", "2024年6月5日", "06 12 34 56 78", "06 78 56 34 12"]
SIMILAR += ["anna@otto.org", "otto@anna.org"]


@pytest.mark.parametrize("asked", SIMILAR)
def test_strings_of_the_same_parts_are_told_apart(asked):
    bm25 = BM25([f"The meeting of {string} was short." for string in SIMILAR], "en")
    for query in (asked, f"the meeting of {asked}"):
        (best, second), *_ = bm25.top_k([query], 2)[1].tolist()
        assert SIMILAR[bm25.top_k([query], 1)[0][0][0]] == asked and best > 1.1 * second


def test_a_query_loses_only_what_is_a_stop_word_in_all_its_languages():
    mixed = Analyzer("en+fr+de+nl+es")
    words = ("car", "war", "MIT", "comment", "plus", "mine", "van", "over", "door", "solo")
    assert all(mixed.of_query(word) for word in words)
    assert all([*mixed.query_places(word)] for word in words), "they are marked and weighed too"
    assert mixed.of_query("car insurance")[0] == "car"
    surely = mixed.of_query("wie lange werden die Rechnungen der Firma aufbewahrt")
    assert "rechnung" in surely and surely[0] == "lang" and "die" not in surely
    assert "the" not in mixed.of_query("what is the price of the car in the garden of the museum")


@pytest.mark.parametrize("language", ["en", "en+fr"])
def test_a_name_in_capitals_is_no_stop_word(language, tmp_path):
    texts = ["The IT department moves. It is near.", "It is in the garden, and no one is there."]
    index = build(tmp_path / "index", [Document(f"d{i}", t) for i, t in enumerate(texts)])
    assert [hit.id for hit in index.search("IT", mode="lexical")] == ["d0"]
    terms = Analyzer(language)
    assert terms.of_query("IT US NO") == ["it", "us", "no"] and "it" in terms("IT moves, it does")
    assert terms("It is A") == [] and (language != "en" or terms.of_query("it is") == [])


def test_signs_and_accents_that_tell_words_apart_are_kept():
    terms = Analyzer("none")
    assert " ".join(terms("C++, C# and c; i++; #tag Foo++")) == "c++ c# and c i tag foo"
    assert terms("学C++语言") == ["学", "c++", "语", "语言", "言"]
    # Who types no accents finds all.
    assert Analyzer("vi")("bánh bành") == ["bánh", "banh", "bành", "banh"]


def test_marks_belong_to_their_word_or_character():
    assert Analyzer("none")("हिन्दी में") == ["हिन्दी", "में"]
    assert Analyzer("none")("ที่นี่") == ["ที่นี่"]  # two characters, with two marks each
    assert all(unicodedata.category(term[0])[0] != "M" for term in Analyzer("none")(TEXTS["th"]))


def test_identifiers_are_found_by_their_parts_and_as_a_whole():
    terms = Analyzer("none")("read_csvFile HTTPServer iPhone McDonald x1")
    assert {"read", "csvfile", "csv", "file", "http", "server", "httpserver", "x1"} <= {*terms}


# Any text, and words of ASCII beside what is changed, left out or split in other ways.
MIXED = st.text(max_size=80) | st.text(
    "abC1-_.@(: \n\x1c\u00a0\u3000\u00ad\u200b\u200c\u200d\u0301é½ﬁ日月本کก", max_size=80
)


@settings(max_examples=500, deadline=None)
@given(MIXED, st.sampled_from(["none", "en", "tr", "ar", "hi+en", "zh", "th", "en+de+fr"]))
def test_terms_are_letters_and_digits_and_stand_where_they_say(text, language):
    terms = Analyzer(language)
    found, plain = list(terms.places(text)), normalised(text)
    assert terms(text) == [term for *_, term in found] == " ".join(terms(text)).split()
    for begin, end, term in found:
        assert term and not any(map(str.isspace, term))
        letters = plain[begin:end].rstrip("+#")
        if (begin, end, term) in wholes(text):
            letters = letters.lstrip("+(")[:: max(1, len(letters) - 1)]  # the first and the last
        assert letters and all(unicodedata.category(letter)[0] not in "PSZ" for letter in letters)
    if unicodedata.is_normalized("NFKC", text) and language == "none":
        covered = {i for begin, end, _ in found for i in range(begin, end)}
        letters = {i for i, letter in enumerate(plain) if letter.isalnum() or letter == "々"}
        assert letters <= covered, "no letter is outside of all terms"


ANY = st.lists(st.text(min_size=1, max_size=30), min_size=4, max_size=12)
# English or German: a space at the end decides whether "A" is a stop word.
EITHER = ["0", "0", "0", "A\x80\U00010028vyÈÑìù\U0002bd12\U00102b00"]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ANY, st.text(max_size=30), st.sampled_from(["auto", "none", "en", "ar", "th+en", "en+de"]))
@example(EITHER, "A", "en+de")
def test_bm25s_lancedb_and_the_statistics_agree_on_all_of_unicode(texts, query, language):
    # LanceDB does not count rows without a term, such as "--".
    docs = [Document(f"d{i}", f"{''.join(text.split())}x {i}") for i, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as scratch:
        index = build(Path(scratch, "index"), docs, language=language)
        table = index.table.lance.search().with_row_id(True).limit(10**6).to_list()
        assume(all(row["terms"] for row in table))  # unassigned characters may be a chunk
        rows = {row["_rowid"]: searched(row["id"], row["passage"]) for row in table}
        bm25 = BM25(list(rows.values()), index.info.language)
        for asked in (query, texts[0], texts[-1] + texts[1]):
            found = index.table.matching(asked, len(rows))
            places, scores = bm25.top_k([asked], len(rows))
            ranked = zip(places[0], scores[0], strict=True)
            wanted = {list(rows)[place]: score for place, score in ranked if score > 0}
            assert set(found) == set(wanted)
            np.testing.assert_allclose(
                [found[row][1] for row in wanted], list(wanted.values()), rtol=1e-4
            )
            terms = [term for *_, term in index.table.query_terms.query_places(asked)]
            np.testing.assert_allclose(index.state.idf(terms), bm25.idf(terms), rtol=1e-5)


NOTE = Document("README.md", "Notes about the animals of the sea, which are read in English first.")
CITIES = ["Москве", "Казани", "Самаре", "Туле", "Твери", "Омске", "Перми", "Уфе", "Пскове", "Сочи"]
HOMES = [
    Document(f"r{i}", f"Дома в {city} были построены в {1900 + i} году и стоят до сих пор.")
    for i, city in enumerate(CITIES * 3)
]
ASKED = ("дом Казани построен 1911", "стоявшие дома Туле", "notes about animal")


def same_by_words(index: Index, other: Index) -> None:
    """Language, terms, counts and rankings are the same."""
    assert index.info.language == other.info.language
    rows = [made.table.lance.search().to_list() for made in (index, other)]
    kept = [sorted((row["id"], row["chunk"], row["terms"]) for row in some) for some in rows]
    assert kept[0] == kept[1]
    for query in ASKED:
        terms = other.table.query_terms(query)
        np.testing.assert_array_equal(index.state.idf(terms), other.state.idf(terms))
        found = [
            {hit.id: round(hit.score, 4) for hit in made.search(query, 40, "lexical")}
            for made in (index, other)
        ]
        assert found[0] == found[1] != {}


def test_the_language_is_found_again_when_the_text_has_doubled(tmp_path):
    grown = build(tmp_path / "grown", [NOTE])
    assert grown.info.language == "en"
    reader = Index.open(tmp_path / "grown", encoder=Letters())
    assert [hit.id for hit in reader.search("note animal", mode="lexical")] == ["README.md"]
    encoder = Letters()
    extend(grown, HOMES, encoder)
    at_once = build(tmp_path / "at-once", [NOTE, *HOMES])
    assert grown.info.language == "ru"
    assert not any("animals" in text for text in encoder.seen[:30]), "rows are not encoded again"
    reader.search("дома")  # which is when a reader looks
    for index in (grown, reader, Index.open(tmp_path / "grown", encoder=Letters())):
        same_by_words(index, at_once)


def test_the_language_stays_until_then_and_if_it_was_given(tmp_path):
    made = build(tmp_path / "ru", HOMES[:20])
    extend(made, [Document("c", TEXTS["de"])])
    assert made.info.language == "ru"
    given = build(tmp_path / "en", [NOTE], language="en")
    extend(given, HOMES)
    assert given.info.language == "en"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*TEXTS.values(), "Hello", "OK", "42", "漢字 カナ"]), max_size=12))
def test_every_language_that_is_found_can_be_used(texts):
    found = detect([text * (3 + i) for i, text in enumerate(texts)])
    check_language(found)
    Analyzer(found)


def test_chinese_and_japanese_together_are_indexed(tmp_path):
    texts = [TEXTS["zh"] * 30, TEXTS["ja"] * 30] * 3
    docs = [Document(f"d{i}", f"{text} {i}") for i, text in enumerate(texts)]
    index = build(tmp_path / "index", docs)
    assert index.info.language == "ja+zh"
    assert index.search("城市的房屋", mode="lexical")[0].id in ("d0", "d2", "d4")
    assert index.search("前の世紀に", mode="lexical")[0].id in ("d1", "d3", "d5")


def test_a_folder_of_several_languages_is_searched_by_the_stems_of_each(tmp_path):
    texts = {language: f"{TEXTS[language]} " * 9 for language in ("de", "pl", "tr")}
    docs = [Document(name, text) for name, text in texts.items()]
    index = build(tmp_path / "index", docs)
    assert set(index.info.language.split("+")) == set(texts)
    for query, name in (("Haus Städte", "de"), ("domów miasta", "pl"), ("evler şehir", "tr")):
        assert [hit.id for hit in index.search(query, mode="lexical")] == [name]


def test_a_language_that_the_text_is_not_in_is_a_sentence(tmp_path, caplog):
    build(tmp_path / "index", [Document("a", TEXTS["ru"] * 3)], language="de")
    assert "the text looks like ru" in caplog.text
    caplog.clear()
    build(tmp_path / "again", [Document("a", TEXTS["ru"] * 3)], language="none")
    assert not caplog.text


@pytest.mark.parametrize("language", ["klingon", "en+", "", "EN"])
def test_an_unknown_language_is_one_sentence(language):
    with pytest.raises(RevelaError, match="--language"):
        check_language(language)


def test_long_words_are_not_remembered():
    terms = Analyzer("none", cache_size=10)
    for i in range(100):
        terms(f"word{i} {'x' * 200}{i}")
    (known,) = terms._words.values()
    assert sys.getsizeof(known) < 2000 and len(known) <= 10
