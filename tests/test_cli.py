"""The command line as a user meets it: verbs, errors in one sentence with exit code 2, and a help
that loads nothing heavy.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from conftest import logged, make_rows, tiny_retriever
from research.plot_run import read_folders
from revela.errors import RevelaError
from revela.evaluation.label_free import HeldOutCheck
from revela.training.commands import is_finished
from revela.training.compare import Comparison
from revela.training.methods.registry import METHODS, PRESETS
from revela.training.recipe import SECTIONS, Recipe, read_recipe, settings_of
from revela.training.step import Progress
from revela.training.training_set import TrainingSet, default_queries_file
from tests.collection_folder import write_judged, write_lines


@pytest.fixture
def recipes(monkeypatch, tiny_lm_folder):
    """The recipes that a corpus would be read for; no corpus and no large model is read."""
    seen = []

    def stop(recipe, *_, **__):
        seen.append(recipe)
        raise RevelaError("stop")

    monkeypatch.setattr(TrainingSet, "read", stop)
    monkeypatch.setattr("revela.training.training_set.read_for", lambda *_: ([], None))
    monkeypatch.setattr("revela.training.rank_heads.rank_heads", stop)
    rows = "revela.training.compare.compare"
    monkeypatch.setattr(rows, lambda rows, *_, **__: stop(Recipe.of(**next(iter(rows.values())))))
    monkeypatch.setattr("revela.training.check_settings._check_lm", lambda *_: None)
    monkeypatch.setattr("revela.encoders.model_files.embedded_folder", lambda _: tiny_lm_folder)
    return seen


TINY_FLAGS = (
    "--layers 2 --chunk-words 20 --gate-heads 4 --lora-rank 4 --precision fp32 --threads 1",
    *("--max-steps 2 --max-minutes 0", "--held-out", "0.2"),
)
WITHOUT_MODELS = """
import sys
import revela.cli
for command in sys.argv[1:]:
    sys.argv = ["revela", *command.split()]
    print(f"## {command}", flush=True)
    try:
        revela.cli.main()
    except SystemExit:
        pass
    assert not {"transformers", "sentence_transformers"} & {*sys.modules}, command
"""


def test_refusals_load_no_library_of_models():
    here = Path(__file__)
    said = {
        "train nowhere --out out": "nowhere does not exist: give a folder",
        "train nowhere --out out --tau 0": "--tau 0.0: it should be",
        f"train {here} --out {here.parent}": "exists: choose another",
    }
    command, both = [sys.executable, "-c", WITHOUT_MODELS, *said], subprocess.STDOUT
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=both, text=True)
    assert done.returncode == 0, done.stdout
    parts = done.stdout.split("## ")[1:]
    for part, (command, message) in zip(parts, said.items(), strict=True):
        assert part.startswith(f"{command}\n") and message in part


def test_from_text_to_search(
    doing, succeeds, refused, corpus_file, tiny_lm_folder, tmp_path, models
):
    model, index = tmp_path / "model", tmp_path / "index"
    out = succeeds("train", corpus_file, f"--out {model}", models, *TINY_FLAGS)
    assert "read 80 documents" in out and "BM25" in out and "held out 16 documents" in out
    assert [row["step"] for row in logged(model, "check")] == [0, 2]
    folder = write_judged(tmp_path / "beir", make_rows(20))
    succeeds("eval", model, f"--on {folder} --json {tmp_path / 'scores.json'}")
    scores = json.loads((tmp_path / "scores.json").read_text())["beir"]
    assert set(scores) == {"BM25", "model", "model + BM25", "model + BM25 (RRF)"}
    assert scores["BM25"]["means"]["ndcg@10"] == 1.0
    succeeds("index", corpus_file, f"--model {model} --out {index}")
    found = json.loads(succeeds("search", index, "ocean01 ocean02", "--json --top 3"))["data"]
    assert len(found) == 3 and found[0]["id"] == "d0"
    assert "About the ocean0" in succeeds("search", index, "ocean01")
    out = succeeds("search", index, "ocean01", "--explain --min-score 0.01")
    assert re.search(r"\n   vectors 0\.\d\d, words 0\.\d\d, weight 0\.\d", out)
    code, out, _ = doing("search", index, "ocean01", "--min-score 1.5")
    assert code == 1 and out.endswith("nothing found\n")
    err = refused("search", index, "ocean01", f"--model {tiny_lm_folder}")
    assert "is not the model that made" in err
    flags = f"--chunk-words 20 --precision fp32 --top 3 --out {tmp_path / 'heads.json'}"
    assert "layer" in succeeds("heads", corpus_file, f"--lm {tiny_lm_folder}", flags)
    assert len(json.loads((tmp_path / "heads.json").read_text())["ranking"]) == 16


def test_an_index_grows_shrinks_and_filters(succeeds, refused, static_folder, tmp_path):
    shutil.copytree(static_folder, tmp_path / "model")
    settings = tmp_path / "model" / "config_sentence_transformers.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"matryoshka_dims": [4, 8]}))
    corpus, more, out = tmp_path / "corpus.csv", tmp_path / "more.csv", tmp_path / "index"
    corpus.write_text(
        "id,text,year,lang\na,red planet mars,2019,en\nb,engine piston,2021,en\nc,violin,,de\n"
    )
    more.write_text("id,text,year,lang\nb,violin violin,2022,en\nd,mars mars,2023,de\n")

    made = ("index", corpus, f"--model {tmp_path / 'model'} --out {out} --metadata year lang")
    assert "was trained for 4, 8 only" in refused(*made, "--dimensions 5") and not out.exists()
    counts = "3 documents are new, 0 replaced, 0 unchanged"
    assert f"{counts}; {out} holds 3 passages" in succeeds(*made, "--dimensions 4")
    err = refused(*made)
    advice = "update this index with --sync, or add to it with --append"
    assert f"exists: choose another --out, {advice}" in err
    append = ("index", more, f"--out {out} --append")
    counts = "1 document is new, 1 replaced, 0 unchanged"
    assert f"{counts}; {out} holds 4 passages" in succeeds(*append)
    assert "made with other settings" in refused(*append, "--chunk-words 9")
    where = "year > 2020 and lang = 'en'"
    (hit,) = json.loads(succeeds("search", out, "violin", "--json --where", where))["data"]
    assert (hit["id"], hit["text"]) == ("b", "violin violin")
    assert hit["metadata"] == {"year": 2022, "lang": "en"}
    err = refused("index", f"--out {out} --delete c nobody")
    assert "has no document nobody: nothing was deleted" in err
    said = succeeds("index", f"--out {out} --delete c a")
    assert f"deleted 2 documents, 2 passages; {out} holds 2" in said
    _, first, second, *_ = succeeds("search", out, "violin", "--mode lexical").splitlines()
    assert first.startswith("1. b  [") and second == "   violin violin"


def test_queries_are_kept_apart_from_the_corpus_and_found_where_they_were(monkeypatch, tmp_path):
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    sources = ("hub:owner/name:en", "b.jsonl", "../a/b.jsonl", ".")
    kept = {source: default_queries_file([Path(source)], "") for source in sources}
    assert {file.parent for file in kept.values()} == {tmp_path / "cache" / "queries"}
    assert kept["b.jsonl"] == kept["../a/b.jsonl"] and len(set(kept.values())) == 3
    assert default_queries_file([Path("b.jsonl")], "mine.jsonl") == Path("mine.jsonl")


BAD_CORPORA = [
    ("a.png", b"", "no document found"),
    ("a.jsonl", b'{"text": "one two three four five six"}\n{broken\n', "a.jsonl:2"),
    ("a.jsonl", '{"text": "fünf Wörter sind hier genug"}'.encode("latin-1"), "not UTF-8"),
    ("a.txt", b"too short", "shorter than a sentence"),
    ("a.txt", b"One single sentence that has enough words.", "give no group of"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_CORPORA)
def test_bad_corpora_are_refused_in_a_sentence(refused, tmp_path, models, name, content, message):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_bytes(content)
    err = refused("train", tmp_path / "corpus", f"--out {tmp_path / 'out'}", models)
    assert message in err and not (tmp_path / "out").exists()


ADDRESS = "--out s3://bucket/a"
BAD = {
    "eval {tmp} --on {tmp}": "neither config.json nor modules.json",
    "index {tmp} --model {tmp}/none/at/all --out {tmp}/index": "no document found",
    "index {tmp} --model x --out {tmp}/../": "exists: choose another --out\n",
    "train {tmp} --out {tmp}/o --language klingon": '"klingon" is not known',
    "eval m --text {tmp} --rerank none": "--candidates, --rerank, --runs and --weight need --on",
    "eval m --on {tmp} --depth 9": "--depth has no effect without --candidates: leave it out",
    "train --out {tmp}/out --resume": "out names no corpus to train on: give its folders or files",
    "train {tmp} --out {tmp}/out --resume --overwrite": "--overwrite replaces it: leave one out",
    "train {tmp} --out {tmp} --overwrite": "holds no run of revela (no run.json)",
    "train {tmp} --out {tmp}/out --learning-rate 0": "it should be greater than 0",
    "search {tmp} x --weight 1.5": "give the vectors' share, from 0",
    "index --out {tmp}/index": "give a corpus to index",
    "index {tmp} --out {tmp} --append": "is not an index",
    **{
        f"index --out {{tmp}} {more} --delete d1": "--delete takes ids and --out alone"
        for more in ("{tmp}", "--append", "--sync", "--model x", "--chunk-words 9")
    },
    "index {tmp} --out {tmp}/index --sync --append": "leave --append out",
    "index {tmp} --out {tmp}/index --yes --model x": "--yes has no effect without --sync",
    "index {tmp} --out {tmp}/index --sync --join-titles --model x": "--join-titles joins rows",
    "search {tmp} query --top 0": "--top must be 1 or more (got 0)",
    "search {tmp} query": "no document found in",
    "search {tmp}/a.bin query": "binary (a.bin)",
    "search {tmp}/none query": "none is not an index",
    "serve {tmp}/none --port 0": "none is not an index",
    "mcp {tmp}/none": "none is not an index",
    "serve {tmp} --sync 0": "--sync must be a positive number of seconds (got 0)",
    "serve {tmp} --port 99999": "--port must be from 0",
    "serve {tmp} --max-texts 0": "give numbers above 0",
    "serve {tmp} --token-env NO_SUCH_TOKEN": "empty or not set",
    "cache {tmp}": "leave ",
    "cache {tmp} --clear": "the cache holds no index of",
    **{
        f"{command} {{tmp}} {ADDRESS}": f"{ADDRESS.replace(' ', ' is ')}, a URL"
        for command in ("train", "groups", "heads", "encode --model x")
    },
    "train {tmp} --out {tmp}/out --recipe {tmp}/none.toml": "none.toml",
    "train {tmp} --out {tmp}/out --held-out 1.5":
        "--held-out 1.5: it should be less than or equal to 1",
    "train {tmp} --out {tmp}/out --learning-rate nan":
        "--learning-rate nan: it should be a finite number",
}  # fmt: skip


@pytest.mark.parametrize("command", BAD)
def test_bad_arguments_are_one_sentence(refused, tmp_path, command):
    (tmp_path / "a.bin").write_bytes(b"x\0")
    assert BAD[command] in refused(*(word.format(tmp=tmp_path) for word in command.split()))


def test_no_number_of_a_recipe_is_below_0():
    for method in METHODS:
        defaults = Recipe.of(method).to_dict()
        for name in (name for name in defaults if type(defaults[name]) in (int, float)):
            message = rf"^--{name.replace('_', '-')} -1(\.0)?: it should be greater than"
            with pytest.raises(RevelaError, match=message):
                Recipe.of(method, **{name: -1})


def test_typos_are_refused(doing, tmp_path):
    (tmp_path / "r.toml").write_text("[training]\nlerning_rate = 1.0\n")
    for flags in ("--lerning-rate 1", f"--recipe {tmp_path / 'r.toml'}"):
        code, out, err = doing("train", tmp_path, f"--out {tmp_path / 'out'}", flags)
        assert code == 2 and re.search("lerning.rate", out + err)


def test_flag_beats_recipe_beats_preset(recipes, refused, models, tmp_path):
    (tmp_path / "r.toml").write_text("[method]\ntau = 0.3\n[retriever]\nlora_rank = 7\n")
    command = ("train", tmp_path, f"--out {tmp_path / 'o'}")
    refused(*command, f"--method revela-paper --recipe {tmp_path / 'r.toml'} --lora-rank 9", models)
    refused(*command)
    paper, plain = recipes
    assert (paper.method.tau, paper.retriever.lora_rank) == (0.3, 9)
    assert paper.method.lm_lora and paper.retriever.pooling == "eos"
    assert plain == Recipe.of()


@pytest.mark.parametrize("verb", ["train", "compare", "heads", "groups", "queries"])
def test_a_method_in_a_recipe_brings_its_settings_as_a_flag_does(recipes, refused, tmp_path, verb):
    (tmp_path / "r.toml").write_text('[method]\nmethod = "dream"\ngate = 0.3\n')
    more = {"heads": (), "queries": (), "compare": (f"--on {tmp_path}",)}.get(verb, ())
    rest = () if verb in ("heads", "queries") else (f"--out {tmp_path / 'o'}",)
    flag = "--methods" if verb == "compare" else "--method"
    for flags in (f"{flag} dream --gate 0.3", f"--recipe {tmp_path / 'r.toml'}"):
        assert "stop" in refused(verb, tmp_path, *rest, *more, flags)
    by_flag, by_file = recipes
    assert by_flag == by_file
    assert (by_file.method.name, by_file.method.gate) == ("dream", 0.3)
    (tmp_path / "r.toml").write_text('[method]\nmethod = "dream"\n')
    crop = f"--recipe {tmp_path / 'r.toml'} {flag} contrastive-crop"
    refused(verb, tmp_path, *rest, *more, crop)
    # Queries are written for a method that reads them.
    kept = "contrastive-pairs" if verb == "queries" else "contrastive-crop"
    assert recipes[2].method.name == kept
    assert recipes[2].groups.group_size == PRESETS["contrastive-crop"]["group_size"]


def test_several_numbers_after_one_flag(recipes, refused, tmp_path):
    (tmp_path / "r.toml").write_text("[optimizer]\nbetas = [0.8, 0.98]\n")
    for flags in ("--betas 0.8 0.98 --seed 1", f"--recipe {tmp_path / 'r.toml'}"):
        refused("train", tmp_path, f"--out {tmp_path / 'o'}", flags)
    assert [recipe.optimizer.betas for recipe in recipes] == [(0.8, 0.98)] * 2
    assert recipes[0].training.seed == 1


def test_a_recipe_may_set_what_shares_its_name_with_a_verb(recipes, refused, tmp_path):
    (heads := tmp_path / "heads.json").touch()
    text = f'[method]\nmethod = "dream"\nheads = "{heads}"\n[queries]\nqueries = "title"\n'
    (tmp_path / "r.toml").write_text(text)
    given = (tmp_path, f"--out {tmp_path / 'o'} --recipe {tmp_path / 'r.toml'}")
    refused("train", *given)
    refused("compare", *given, f"--on {tmp_path}")
    found = [(recipe.queries.queries, recipe.method.heads) for recipe in recipes]
    assert found == [("title", str(heads))] * 2
    (tmp_path / "r.toml").write_text("tau = = 1\n")
    assert "r.toml is not TOML" in refused("train", *given)


def test_compare_puts_flags_and_recipe_over_presets(monkeypatch, refused, corpus_file, tmp_path):
    seen: dict[str, Recipe] = {}

    def stop(rows, *_, **__):
        seen.update({name: Recipe.of(**settings) for name, settings in rows.items()})
        raise RevelaError("stop")

    monkeypatch.setattr("revela.training.compare.compare", stop)
    (tmp_path / "r.toml").write_text("[method]\ntau = 0.3\n[retriever]\nlora_rank = 7\n")
    err = refused("compare", corpus_file, f"--on {tmp_path} --out {tmp_path / 'o'}",
        f"--methods revela-gated contrastive-crop revela-paper --recipe {tmp_path / 'r.toml'}",
        "--lora-rank 9 --no-lm-lora --group-size", Recipe.of().groups.group_size,
    )  # fmt: skip
    assert "stop" in err
    assert list(seen) == ["revela-gated", "contrastive-crop", "revela-paper"]
    given = dict(tau=0.3, lora_rank=7) | dict(lora_rank=9, lm_lora=False)
    given["group_size"] = Recipe.of().groups.group_size
    for preset, recipe in seen.items():
        flat = recipe.to_dict()
        expected = {k: v for k, v in (PRESETS[preset] | given).items() if k in flat}
        assert {k: flat[k] for k in expected} == expected
        assert ("lm_lora" in flat) == (preset != "contrastive-crop")


NO_EFFECT = {
    "train --method contrastive-crop --pairs x":
        "--pairs has no effect on --method contrastive-crop: leave it out, or train cde or contr",
    "train --method replug --lm-lora": "--lm-lora has no effect on --method replug",
    "train --method cde --groups random --cluster-size 4":
        "--cluster-size has no effect on --method cde without --groups cluster: leave it out, or g",
    "train --method cde --context 0 --context-layers 2":
        "--context-layers has no effect on --method cde without --context",
    "train --recipe {tmp}/r.toml":
        "--query-heads has no effect on --method revela: leave it out, or train dream",
    "train --method revela-paper --crop-window 99":
        "--crop-window has no effect on --method revela",
    # what the preset says nobody gave
    "train --method dream --recipe {tmp}/r.toml": "stop",
    "train --method contrastive-pairs --lm x": "stop",
    "train --method contrastive-crop --query-lm x":
        "--query-lm has no effect on --method contrastive-crop",
    "train --method contrastive-crop --lm x": "leave it out, or train revela or replug or",
    "train --method dwell-spans --lm x": "--lm has no effect on --method dwell-spans",
    "train --method dream --heads random --probe-questions 9":
        "--probe-questions has no effect on --method dream without --heads '': leave it out, or gi",
    "train --method contrastive-crop --check-questions 9 --queries-file q --query-lm {tmp}":
        "neither config.json nor modules.json",
    "train --method dream --surrogate {tmp}/none": "none",
    "train --method contrastive-crop --queries title --check-questions 9":
        "--queries has no effect on --method contrastive-crop",
    "compare --methods contrastive-crop contrastive-pairs --lm-lora --on {tmp}":
        "--lm-lora has no effect on --method contrastive-crop and contrastive-pairs: leave it out",
    "compare --methods contrastive-crop revela-paper --no-lm-lora --gate-heads 3 --on {tmp}":
        "stop",
    "compare --methods revela-gated dream --recipe {tmp}/r.toml --on {tmp}": "stop",
    "train --method dream --groups split --queries title": "split cannot be combined with --q",
    "groups --method contrastive-crop --groups split": "combined with --method contrastive-crop",
    "train --method dream --questions {tmp}/r.toml --queries title":
        "--questions replaces --queries title: leave one out",
    "train --method dream --questions {tmp}/q.jsonl": "q.jsonl does not exist: give a JSONL file",
    "train --method dream --lm-lora --lora-rank 0": "--lm-lora uses the rank of --lora-rank",
}  # fmt: skip


@pytest.mark.parametrize("command", NO_EFFECT)
def test_a_setting_that_the_method_does_not_read_is_refused(recipes, refused, tmp_path, command):
    (tmp_path / "r.toml").write_text("[method]\nquery_heads = 3\n")
    verb, *flags = command.format(tmp=tmp_path).split()
    assert NO_EFFECT[command] in refused(verb, tmp_path, f"--out {tmp_path / 'o'}", *flags)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_set_what_their_method_reads(preset):
    flat = Recipe.of(preset).to_dict()
    assert {k: flat[k] for k in PRESETS[preset]} == PRESETS[preset]


def test_a_setting_has_one_name():
    """So that flags and keyword arguments need no section."""
    for method in METHODS.values():
        sections = {**SECTIONS, "method": method}.values()
        names = [item.name for section in sections for item in dataclasses.fields(section)]
        assert sorted(names) == sorted(settings_of(method)) and "method" not in names
    for flag in ("groups", "lm", "lower_case"):  # as the error calls it, too
        with pytest.raises(RevelaError, match=f"^--{flag.replace('_', '-')} 3: it should be "):
            Recipe.of(**{flag: 3})


def test_written_queries_are_kept(succeeds, corpus_file, models):
    small = "--chunk-words 30 --precision fp32 --threads 1 --max-queries 20 --show 2"
    out = succeeds("queries", corpus_file, models, small)
    kept = default_queries_file([corpus_file], "")
    assert "rejected" in out and f"queries are saved in {kept}" in out and kept.is_file()


def test_checks_by_questions_that_are_written(monkeypatch, doing, succeeds, models, tmp_path):
    texts = ({"text": row["text"]} for row in make_rows(60, sentences=1))
    corpus = write_lines(tmp_path / "snippets.jsonl", texts)
    small = "--group-size 8 --layers 2 --lora-rank 4 --precision fp32 --threads 1"
    limits = "--max-steps 2 --max-minutes 0 --held-out 0.2 --out"
    command = ("train", corpus, models, "--method contrastive-crop", small, limits)
    asking = f"--check-questions 12 --queries-file {tmp_path / 'noise.jsonl'}"
    out = succeeds(*command, tmp_path / "rambling", asking)  # the tiny model writes noise
    assert "queries for 0 of 12 held-out chunks" in out
    assert "fewer than 5 questions were accepted: the label-free check has none" in out
    assert "held out 12 documents, too few for a label-free check\n" in out
    asked = []

    def ask(passages):
        asked.extend(passages)
        return [f"What is known about {p.split()[1]}?" for p in passages]

    monkeypatch.setattr("revela.training.lm.generate.writer", lambda *_: ask)
    out = succeeds(*command, tmp_path / "guarded", "--check-questions 10")
    assert "queries for 10 of 10 held-out chunks" in out
    assert "(question: 10 queries over 12 passages)" in out and ", query_lm " in out
    code, out, err = doing(*command, tmp_path / "guarded", "--check-questions 11")
    assert code == 2 and "exists: choose another --out" in err
    assert not out and len(asked) == 10, "refused before it writes"
    checks = [row["check"]["question"] for row in logged(tmp_path / "guarded", "check")]
    assert len(checks) == 2 and all(0 < score <= 1 for score in checks)
    assert "| nDCG@10 | question |" in (tmp_path / "guarded" / "README.md").read_text()


def test_compare_keeps_what_is_done(succeeds, refused, corpus_file, models, tmp_path, in_process):
    folder, out = write_judged(tmp_path / "judged", make_rows(20, seed=5)), tmp_path / "out"
    methods = "--methods revela-gated contrastive-crop --points 2 --group-size 4"
    command = ("compare", corpus_file, f"--on {folder} --out {out}", methods, models, *TINY_FLAGS)
    said = succeeds(*command)
    rows = ["BM25", "start", "revela-gated", "contrastive-crop"]
    assert all(re.search(rf"^  {row} +judged [01]\.\d+$", said, re.M) for row in rows)
    assert re.search(r"^  revela-gated - contrastive-crop +judged [+-]0\.\d+ ± .* \(p ", said, re.M)
    made = TypeAdapter(Comparison).validate_json((out / "compare.json").read_bytes())
    assert [*made.scores] == rows and len(made.differences) == 6
    assert [len(panel.marks) for panel in read_folders([out], "tokens")] == [6]
    for curve in made.curves.values():
        assert len(curve) == 3 and all(0 <= point.judged["judged"] <= 1 for point in curve)
        assert curve[0].judged == pytest.approx(made.scores["start"])
    for name in rows[2:]:  # the last state is saved
        end = made.curves[f"{name}, seed 0"][-1].judged
        assert end == pytest.approx(made.scores[name], abs=1e-3)
    files = [out / "revela-gated-0" / "metrics.jsonl", out / "scores/revela-gated-0/judged.json"]
    written = [file.stat().st_mtime_ns for file in files]
    succeeds(*command)
    assert [file.stat().st_mtime_ns for file in files] == written
    err = refused(*command, "--learning-rate 0.5")
    assert "gated-0 has other settings (learning_rate): give the same, or" in err


def test_an_interrupted_run_exits_so_and_looks_unfinished(doing, corpus_file, models, tmp_path):
    run, advance = tmp_path / "out", Progress.advance
    given = ("train", corpus_file, f"--out {run} --group-size 4", *TINY_FLAGS, models)

    def interrupted(self):
        signal.raise_signal(signal.SIGINT)
        advance(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "advance", interrupted)
        code, said, errors = doing(*given)
    assert code == 128 + signal.SIGINT, errors
    assert (run / "modules.json").is_file() and (run / "checkpoints" / "checkpoint-1").is_dir()
    assert not is_finished(run)
    assert "after 1 step, continue with --resume; " in said and f"saved to {run}\n" in said
    code, _, errors = doing(*given, "--resume")
    assert code == 0, errors
    assert is_finished(run)


def test_a_stopped_comparison_stops_its_run_and_goes_on(
    corpus_file, models, tmp_path, succeeds, in_process
):
    folder, out = write_judged(tmp_path / "judged", make_rows(20, seed=5)), tmp_path / "out"
    model = models.partition(" --lm")[0]
    flags = f"--on {folder} --methods contrastive-crop --points 1 --out {out} {model}"
    tiny = " ".join(TINY_FLAGS).replace("--gate-heads 4", "--group-size 4")
    line = [sys.executable, "-m", "revela", "compare", str(corpus_file), *f"{flags} {tiny}".split()]
    metrics = out / "contrastive-crop-0" / "metrics.jsonl"
    place = line.index("--max-steps") + 1
    long = [*line[:place], "100000", *line[place + 1 :]]
    with subprocess.Popen(long, stderr=subprocess.PIPE, text=True) as process:
        while not (metrics.is_file() and '"loss"' in metrics.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        errors = process.communicate()[1]
    assert process.returncode == 143 and "run the same command again" in errors.splitlines()[-1]
    assert not is_finished(metrics.parent) and [*metrics.parent.glob("checkpoints/check*")]
    succeeds(*line[3:])
    compared = json.loads((out / "compare.json").read_text())
    assert is_finished(metrics.parent) and "contrastive-crop" in compared["scores"]


def test_the_last_table_has_saved_beside_last(succeeds, monkeypatch, corpus_file, models, tmp_path):
    """Training makes it worse, so the start is saved."""
    scores = iter([0.3, 0.4, 0.2])
    monkeypatch.setattr(HeldOutCheck, "__call__", lambda *_: {"title": next(scores)})
    small = f"--out {tmp_path / 'out'} --group-size 4 --check-every 0"
    said = succeeds("train", corpus_file, small, models, *TINY_FLAGS)
    first, _, table = said.rpartition("label-free check,")
    assert first.endswith("\ntraining did not improve the label-free check: the start was saved\n")
    rows = re.findall(r"^│ (.+?) +│ +([\d.]+) │$", table, re.M)
    expected = {"untrained": "0.300", "start": "0.400", "last step": "0.200", "saved": "0.400"}
    assert dict(rows[1:]) == expected and rows[0][0] == "BM25"


OF_SEVERAL = [
    ("train", "2 processes were started (WORLD_SIZE) and cannot reach each other"),
    ("compare", "this command runs in one process (WORLD_SIZE is 2): leave out torchrun"),
]


@pytest.mark.parametrize(("verb", "message"), OF_SEVERAL)
def test_one_of_several_is_refused(monkeypatch, refused, corpus_file, tmp_path, verb, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    more = (f"--on {tmp_path}",) if verb == "compare" else ()
    err = refused(verb, corpus_file, f"--out {tmp_path / 'out'}", *more)
    assert err.startswith(f"revela: {message}") and not (tmp_path / "out").exists()


def test_eval_compares_and_asks_mteb(succeeds, refused, tiny_lm_folder, tmp_path, monkeypatch):
    mteb = pytest.importorskip("mteb")
    from tests.mteb_folder import folder_task

    for name, layers in (("a", 1), ("b", 2)):
        how = dict(layers=layers, query_prompt="", passage_prompt="")
        tiny_retriever(tiny_lm_folder, **how).save(str(tmp_path / name))
    folder = write_judged(tmp_path / "judged", make_rows(20, seed=5))
    scores, out = tmp_path / "scores.json", tmp_path / "mteb"
    flags = f"--on {folder} --json {scores} --precision fp32"
    printed = succeeds("eval", tmp_path / "a", tmp_path / "b", flags)
    local = json.loads(scores.read_text())["judged"]
    models = {name + more for name in "ab" for more in ("", " + BM25", " + BM25 (RRF)")}
    assert "p, BM25" in printed and set(local) == {"BM25", *models}
    assert set(local["b"]["p"]) == {"BM25", "a"} and len(local["b"]["queries"]) == 20
    with monkeypatch.context() as patched:
        patched.setattr(mteb, "get_task", lambda name: folder_task(folder))
        flags = f"--benchmark judged --out {out} --json {scores} --precision fp32"
        assert "judged, a" in succeeds("eval", tmp_path / "a", flags)
    means = json.loads(scores.read_text())["judged (mteb)"]["a"]["means"]
    assert means["ndcg@10"] == pytest.approx(local["a"]["means"]["ndcg@10"], abs=1e-4)
    assert [file.name for file in out.rglob("judged.json")] == ["judged.json"]
    assert "nothing to score on" in refused("eval", tmp_path / "a")


ODD_RECIPES = [
    ("[variants]\na = 1", "variant 'a' must be a table"),
    ("seed = 1", "seed is not a section: docs"),
    ("[method]\ntau = inf", "--tau inf: it should be a finite number"),
    ("[optimizer]\nbetas = 0.5", "--betas 0.5: it should be a valid tuple"),
    ("[method]\nmethod = 3", "--method 3 is unknown: give FILE.py:Class, or one of"),
]


@pytest.mark.parametrize(("toml", "message"), ODD_RECIPES)
def test_a_recipe_of_odd_values_is_refused(tmp_path, toml, message):
    file = tmp_path / "r.toml"
    file.write_text(toml)
    with pytest.raises(RevelaError, match=message):
        settings, _ = read_recipe(file)
        Recipe().merge(settings)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_that_are_no_text_are_refused_or_shown(succeeds, refused, corpus_file, tmp_path):
    flags = "--group-size 4 --chunk-words 12 --groups random --out"
    odd = tmp_path / "caf\udce9"
    err = refused("groups", corpus_file, flags, odd)
    assert "is not valid UTF-8: give another name" in err and not odd.exists()
    succeeds("groups", corpus_file, flags, tmp_path / "groups")
    (tmp_path / "groups").rename(odd)
    assert "caf\\udce9" in succeeds("groups", odd)


def test_odd_files_as_a_corpus_are_one_sentence(refused, tmp_path):
    damaged, link = tmp_path / "caf\udce9.parquet", tmp_path / "self.txt"
    damaged.write_bytes(b"PAR1")
    link.symlink_to(link)
    for source in (damaged, link):
        refused("groups", source, f"--out {tmp_path / 'groups'}")


def test_a_full_disk_is_one_sentence_anywhere(monkeypatch, refused, tmp_path):
    def full(*_args, **_more):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))

    monkeypatch.setattr("revela.searching.sync.Scan", full)
    flags = f"--out {tmp_path / 'out'} --model embedded:minilm-l6"
    assert "x cannot be written (no space" in refused("index", tmp_path, flags)


def test_a_line_longer_than_the_model_reads_is_found_by_all(succeeds, tmp_path, tiny_bert_folder):
    before, after = ("".join(f"{n:03}" for n in range(count)) for count in (90, 30))
    (tmp_path / "line.txt").write_text(f"{before}ocean{after}")
    index = (tmp_path / "line.txt", "--model", tiny_bert_folder, f"--out {tmp_path / 'index'}")
    out = succeeds("index", *index)
    assert "longer than the model's maximum length, and split again" in out
    out = succeeds("search", tmp_path / "index", "ocean", "--json")
    assert len(json.loads(out)["data"][0]["text"]) < 80
