"""``revela fit`` and ``Retriever.fit``: from text and a language model to a stock folder."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from conftest import make_rows
from revela import Retriever, RevelaError
from revela.encoders.load import load_encoder
from revela.training import word_table as training
from revela.training.retriever.fit import WORDS_TO_VECTORS
from tests.collection_folder import write_lines

SMALL = ("--layers", "2", "--precision", "fp32")


@pytest.fixture
def corpus(tmp_path):
    """400 documents: enough to hold some out."""
    return write_lines(tmp_path / "corpus.jsonl", make_rows(400))


def table_of(said):
    """The cells of a printed table, by the first of each row."""
    lines = [re.split("[┃│]", line)[1:-1] for line in said.splitlines() if line[:1] in ("┃", "│")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_text_and_lm_become_a_retriever(succeeds, refused, corpus_file, tiny_lm_folder, tmp_path):
    out = tmp_path / "retriever"
    given = ("fit", corpus_file, "--model", tiny_lm_folder, "--out", out, *SMALL)
    said = succeeds(*given)
    assert "read 80 documents" in said
    assert "held out 4 documents, too few for a label-free check" in said
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e6
    last = said.splitlines()[-1]
    saved = rf"saved to {out} \({size:,.0f} MB\)"
    assert re.match(rf"fitted in \d+\.\d seconds, {saved}: next, run revela ", last)
    go_on = last.partition("next, run revela ")[2].replace("INDEX", str(tmp_path / "index"))
    said = succeeds(*go_on.split())
    assert "80 documents are new" in said
    assert load_encoder(out, "auto").words_to_vectors == WORDS_TO_VECTORS
    kinds = [type(part).__name__ for part in SentenceTransformer(str(out))]
    assert kinds[:4] == ["Transformer", "WordWeights", "Pooling", "WordEmbeddings"]
    card = (out / "README.md").read_text()
    assert "A dense retriever fitted without labels" in card
    assert f"revela fit {corpus_file.name}" in card
    assert f"Fitted to {corpus_file.name} (76 documents) in " in card and "layers = 2" in card
    assert "a half of the vector for words, trained so that titles, docstrings" in card
    assert re.search(r" in \d+\.\d seconds:$", card, re.MULTILINE)
    assert not re.search("steps|learning_rate|nDCG", card)
    err = refused(*given)
    assert err == f"revela: {out} exists: choose another --out\n"


def test_held_out_documents_say_whether_it_helped(succeeds, corpus, tiny_lm_folder, tmp_path):
    out = tmp_path / "out"
    said = succeeds("fit", corpus, "--model", tiny_lm_folder, "--out", out, *SMALL)
    assert "held out 20 documents" in said
    rows = table_of(said)
    assert list(rows) == ["system", "BM25", "untrained", "fitted"]
    title = rows["system"].index("title")
    assert float(rows["fitted"][title]) > float(rows["untrained"][title])
    card = (out / "README.md").read_text()
    assert "| untrained |" in card and f"| fitted | {rows['fitted'][0]} |" in card


def test_python_fits_as_the_command_does(succeeds, corpus_file, tiny_lm_folder, tmp_path):
    texts = [row["text"] for row in make_rows(6)]
    settings = dict(layers=2, precision="fp32", lexical=2.0, seed=3)
    fitted = Retriever.fit(corpus_file, tmp_path / "one", model=tiny_lm_folder, **settings)
    flags = [word for k, v in settings.items() for word in (f"--{k}", v)]
    model = ("--model", tiny_lm_folder, "--out", tmp_path / "two")
    succeeds("fit", corpus_file, *model, *flags)
    vectors = SentenceTransformer(str(tmp_path / "two")).encode_query(texts)
    np.testing.assert_allclose(fitted.encode_queries(texts), vectors, atol=1e-5)
    with pytest.raises(RevelaError, match="a fit does not take max_minutes: it takes text_"):
        Retriever.fit(corpus_file, tmp_path / "three", model=tiny_lm_folder, max_minutes=5)


def test_what_cannot_be_fitted_is_refused_before_text_is_read(
    refused, saved_retriever, tiny_lm_folder, tmp_path
):
    none, out = tmp_path / "none", tmp_path / "out"
    for given, sentence in (
        (("--model", saved_retriever), f"{saved_retriever} is an embedder, which a fit would harm"),
        (("--model", "new:tiny"), "new:tiny is made by revela train"),
        (("--model", tmp_path), "neither config.json nor modules.json"),
        (("--model", tiny_lm_folder), f"{none} does not exist"),
    ):
        assert sentence in refused("fit", none, *given, "--out", out)
    (tmp_path / "one.txt").write_text("One sentence of six words only.")
    err = refused("fit", tmp_path / "one.txt", "--model", tiny_lm_folder, "--out", out)
    assert "a fit takes two chunks of text or more: give more text" in err
    assert not out.exists()


def test_a_language_model_can_be_made_a_retriever(refused, corpus_file, tiny_lm_folder, tmp_path):
    err = refused("index", corpus_file, "--model", tiny_lm_folder, "--out", tmp_path / "index")
    offer = f"revela fit TEXT --model {tiny_lm_folder} --out RETRIEVER"
    assert err.startswith(f"revela: {tiny_lm_folder} is not a Sentence-Transf") and offer in err


def test_a_table_of_words_is_trained_saved_and_searched(succeeds, corpus, tiny_lm_folder, tmp_path):
    out = tmp_path / "out"
    given = ("fit", corpus, "--model", tiny_lm_folder, "--static", "--steps", "3")
    said = succeeds(*given, "--out", out)
    assert "held out 20 documents" in said
    assert list(table_of(said)) == ["system", "BM25", "fitted", "trained"]
    model = SentenceTransformer(str(out), device="cpu")
    assert [type(part).__name__ for part in model] == ["StaticEmbedding", "Normalize"]
    texts = [row["text"] for row in make_rows(20)]
    ours = load_encoder(out, "auto").encode_passages(texts)
    np.testing.assert_allclose(model.encode_document(texts), ours, atol=1e-3)
    assert model.get_embedding_dimension() == 64  # twice the language model's
    card = (out / "README.md").read_text()
    assert "a row for each word" in card and "near_duplicates" in card and "layers" not in card
    assert load_encoder(out, "auto").words_to_vectors == WORDS_TO_VECTORS
    succeeds("index", corpus, "--model", out, "--out", tmp_path / "index")
    row = make_rows(400)[7]
    query = row["text"].split(".")[0]
    said = succeeds("search", tmp_path / "index", query, "-k", "1", "--mode", "dense")
    assert f"\n1. {row['title']} " in said


def test_training_without_gain_is_unsaved(succeeds, corpus, tiny_lm_folder, tmp_path, monkeypatch):
    def spoiled(table, *_given, **_settings):
        return dataclasses.replace(table, rows_SD=table.rows_SD[:1].expand_as(table.rows_SD))

    monkeypatch.setattr(training, "train_table", spoiled)
    given = ("fit", corpus, "--model", tiny_lm_folder, "--static", "--out")
    said = succeeds(*given, tmp_path / "out")
    assert "training did not help on this text" in said
    monkeypatch.undo()
    succeeds(*given, tmp_path / "begun", "--steps", "0")
    assert "trained to find" not in (tmp_path / "begun" / "README.md").read_text()
    both = [load_encoder(tmp_path / name, "auto") for name in ("out", "begun")]
    texts = [row["text"] for row in make_rows(5)]
    np.testing.assert_array_equal(*(encoder.encode_passages(texts) for encoder in both))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--steps 3 --lexical 0", "--steps trains the lexical half: leave --lexical 0 out, or -"),
        ("--static --steps -1", "--steps -1: give 0, which does not train, or more"),
        ("--static --layers 2", "--layers has no effect with --static"),
    ],
)
def test_what_is_unread_is_refused(refused, corpus_file, tiny_lm_folder, tmp_path, flags, sentence):
    given = ("--model", tiny_lm_folder, "--out", tmp_path / "out", *flags.split())
    err = refused("fit", corpus_file, *given)
    assert err.startswith(f"revela: {sentence}") and not (tmp_path / "out").exists()


def test_a_table_reads_no_setting_of_a_tokenizer(tiny_lm_folder, tmp_path):
    with pytest.raises(RevelaError, match="--lower-case has no effect with --static"):
        Retriever.fit(["text"], tmp_path, model=tiny_lm_folder, static=True, lower_case="no")
