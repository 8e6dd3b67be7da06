"""A whole run on tiny models: it learns, it resumes exactly, it saves whole folders or none."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from conftest import make_rows
from revela.config import PAPER, Recipe
from revela.data.text import read_corpus
from revela.errors import RevelaError
from revela.models.retriever import load_retriever
from revela.train.run import train
from revela.train.trainer import GroupCollator
from revela.types import Document

TINY = Recipe(
    layers=2, chunk_words=12, group_size=8, lora_rank=4, lora_alpha=8, max_minutes=0, max_steps=6, log_every=1, save_every=3, check_every=0,
    gate_heads=4, gate_first_layer=0.3, precision="fp32", threads=1, lm_tokens=64, max_tokens=64, warmup_steps=2,
)  # fmt: skip


@pytest.fixture
def recipe(tiny_lm_folder):
    return dataclasses.replace(TINY, model=str(tiny_lm_folder), lm=str(tiny_lm_folder))


@pytest.fixture
def documents(corpus_file):
    return read_corpus([corpus_file])[0]


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.parametrize(("rate", "fall"), [(1e-3, (0.03, 1.0)), (0.0, (-1e-5, 1e-5))])
def test_it_learns_in_thirty_steps(taught_lm_folder, tiny_lm_folder, tmp_path, rate, fall):
    """The LM is frozen, so only a better choice of what to read can lower its loss; without a step nothing changes."""
    documents = [Document(row["_id"], row["text"]) for row in make_rows(4, sentences=4, seed=3)]
    recipe = dataclasses.replace(
        TINY, model=str(tiny_lm_folder), lm=str(taught_lm_folder), max_steps=30, learning_rate=rate, group_size=16, chunk_words=9, gate=0.5,
        gate_heads=0, gate_first_layer=0.0, tau=0.5, whitening=0.0, token_weighting=0.0, lexical=0.0, pooling="eos", lora_rank=8,
        query_side="whole",
    )  # fmt: skip
    train(recipe, documents, tmp_path / "out", say=lambda _: None)
    first, *_, last = losses(tmp_path / "out").values()
    assert fall[0] < first - last < fall[1]


@pytest.mark.parametrize(
    "changes",
    [{}, {"learn_tau": True, "learn_gates": True}, {**PAPER, "layers": 2, "groups_per_step": 2, "lora_rank": 4, "warmup_steps": 2}],
)
def test_resume_equals_unbroken(recipe, documents, tmp_path, changes):
    recipe = dataclasses.replace(recipe, **changes)
    train(recipe, documents, tmp_path / "whole", say=lambda _: None)
    # Stopped at step 3 by Ctrl-C: the limit, and with it the learning rate, is the unbroken run's.
    calls = 0

    def stop(_line):
        nonlocal calls
        calls += 1

    from revela.train import watch

    original = watch.Watch.on_step_end

    def interrupting(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.interrupted = True
        return original(self, args, state, control, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch.Watch, "on_step_end", interrupting)
        outcome = train(recipe, documents, tmp_path / "broken", say=stop)
    assert outcome.interrupted and outcome.steps == 3 and calls
    train(recipe, documents, tmp_path / "broken", resume=True, say=lambda _: None)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 6
    for file in ("model.safetensors",):
        whole, broken = load_file(tmp_path / "whole" / file), load_file(tmp_path / "broken" / file)
        assert all(torch.equal(whole[k], broken[k]) for k in whole)


class Scripted:
    """A label-free check that gives these scores, one after another."""

    def __init__(self, scores):
        self.scores = iter(scores)

    def __call__(self, encoder):
        encoder.encode_passages(["ocean1"])
        return {"task": next(self.scores)}


@pytest.mark.parametrize(
    ("keep", "scores", "kept"),
    [
        ("best", [0, 0.1, 0.5, 0.3], 3),
        ("last", [0, 0.1, 0.5, 0.3], 6),
        ("best", [0, 9, 1, 1], 0),
        ("best", [0, 0.5, 0.504, 0.504], 0),  # by chance, for all we know
    ],
)
def test_the_state_that_the_check_liked_best_is_saved(recipe, documents, tmp_path, keep, scores, kept):
    recipe = dataclasses.replace(recipe, check_every=3, save_every=2, keep=keep, learning_rate=1e-2)
    outcome = train(recipe, documents, tmp_path / "out", check=Scripted(scores), say=lambda _: None)
    assert (outcome.kept, outcome.steps) == (kept, 6)
    assert outcome.after == {"task": scores[1 + kept // 3]}
    same = dataclasses.replace(recipe, keep="last", check_every=0, max_steps=6)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    if kept == 0:  # LoRA starts at zero: nothing was learned
        train(dataclasses.replace(same, learning_rate=0.0), documents, tmp_path / "other", say=lambda _: None)
    else:
        train(same, documents, tmp_path / "other", say=lambda _: None)
    other = load_file(tmp_path / "other" / "model.safetensors")
    assert all(torch.equal(saved[k], other[k]) for k in saved) == (kept in (0, 6))


def test_a_sentence_transformers_model_keeps_its_own_layers_and_prompts(recipe, documents, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense

    train(dataclasses.replace(recipe, max_steps=1, lexical=0.0), documents, tmp_path / "first", say=lambda _: None)
    model = SentenceTransformer(str(tmp_path / "first"))
    model.insert(len(model) - 1, Dense(model.get_embedding_dimension(), 8))
    model.prompts = {"query": "Q: ", "document": ""}
    model.save(str(tmp_path / "own"))
    before = [m.linear.weight.clone() for m in model if isinstance(m, Dense)]
    settings = dataclasses.replace(recipe, model=str(tmp_path / "own"), learning_rate=0.0)
    train(settings, documents, tmp_path / "out", say=lambda _: None)
    after = SentenceTransformer(str(tmp_path / "out"))
    assert after.prompts["query"] == "Q: " and not after.prompts["document"]
    assert all(torch.equal(a, m.linear.weight) for a, m in zip(before, [m for m in after if isinstance(m, Dense)], strict=True))


def test_a_resumed_run_remembers_the_best_state(recipe, documents, tmp_path):
    recipe = dataclasses.replace(recipe, check_every=2, save_every=1, learning_rate=1e-2)
    train(recipe, documents, tmp_path / "whole", check=Scripted([0, 0.1, 0.5, 0.3, 0.2]), say=lambda _: None)
    with pytest.raises(ZeroDivisionError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupCollator, "__call__", dying_after(3, GroupCollator.__call__))
        train(recipe, documents, tmp_path / "broken", check=Scripted([0, 0.1, 0.5]), say=lambda _: None)
    outcome = train(recipe, documents, tmp_path / "broken", check=Scripted([0, 0.3, 0.2]), resume=True, say=lambda _: None)
    assert outcome.kept == 2
    whole, broken = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(whole[k], broken[k]) for k in whole)


def dying_after(calls, method):
    count = 0

    def wrapped(*args):
        nonlocal count
        count += 1
        return method(*args) if count <= calls else 1 / 0

    return wrapped


def test_the_paper_preset_trains_both_models(recipe, documents, tmp_path):
    recipe = dataclasses.replace(
        recipe, **{**PAPER, "layers": 2, "groups_per_step": 1, "lora_rank": 4, "warmup_steps": 0, "learning_rate": 1e-2}
    )
    train(recipe, documents, tmp_path / "out", say=lambda _: None)
    assert load_retriever(tmp_path / "out").prompts["query"] == "query: "
    first, *_, last = losses(tmp_path / "out").values()
    assert last < first


def test_checkpoints_go_when_a_run_ends_and_stay_whole_until_then(recipe, documents, tmp_path):
    train(recipe, documents, tmp_path / "out", say=lambda _: None)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert "checkpoints" not in names and {"modules.json", "README.md", "metrics.jsonl", "training.png", "run.json"} <= names
    assert not [n for n in names if n.startswith(".")]
    assert "revela" in (tmp_path / "out" / "README.md").read_text()


def test_killed_at_any_time_it_resumes(recipe, documents, corpus_file, tmp_path):
    out = tmp_path / "out"
    flags = [
        f"--{f.name.replace('_', '-')}={getattr(recipe, f.name)}"
        for f in dataclasses.fields(recipe)
        if f.type in ("str", "int", "float", "Pooling", "Precision")
    ]
    flags = [f for f in flags if not f.startswith(("--max-steps", "--save-every"))]
    command = [
        sys.executable,
        "-m",
        "revela.cli",
        "train",
        str(corpus_file),
        "--out",
        str(out),
        "--save-every=1",
        "--max-steps=300",
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.time() + 120
    while time.time() < deadline and not list(out.glob("checkpoints/checkpoint-*")):
        time.sleep(0.01)
        assert process.poll() is None, process.stderr.read().decode()
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    command = [c if c != "--max-steps=300" else "--max-steps=12" for c in command]
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    assert load_retriever(out) is not None
    steps = list(losses(out))
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(group_size=5000), "fewer than a group of 5000"),
        (dict(model="nowhere/at/all"), "neither a folder nor a hub id"),
        (dict(model="embedded:nothing"), "there are embedded:"),
    ],
)
def test_bad_settings_are_one_sentence(recipe, documents, tmp_path, change, message):
    with pytest.raises(RevelaError, match=message):
        train(dataclasses.replace(recipe, **change), documents, tmp_path / "out", say=lambda _: None)
    assert not (tmp_path / "out").exists()


def test_an_output_folder_in_the_way_is_refused_and_kept(recipe, documents, tmp_path):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(RevelaError, match="exists: choose another --out"):
        train(recipe, documents, tmp_path, say=lambda _: None)
    with pytest.raises(RevelaError, match="no run to resume"):
        train(recipe, documents, tmp_path, resume=True, say=lambda _: None)
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


def test_resuming_with_other_settings_is_refused(recipe, documents, tmp_path):
    train(recipe, documents, tmp_path / "out", say=lambda _: None)
    with pytest.raises(RevelaError, match=r"other settings \(tau\)"):
        train(dataclasses.replace(recipe, tau=0.5), documents, tmp_path / "out", resume=True, say=lambda _: None)
