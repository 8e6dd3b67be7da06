"""A whole run on tiny models: it learns, it resumes exactly, it saves whole folders or none."""

from __future__ import annotations

import errno
import json
import math
import shutil
import signal
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import tracking
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from transformers import AutoModel
from transformers.models.llama.modeling_llama import LlamaMLP

from conftest import TINY, logged, make_rows, tiny_retriever
from revela.encoders.load import load_encoder, resolve
from revela.encoders.model_files import commits
from revela.encoders.torch_model import open_model
from revela.errors import RevelaError
from revela.files import hidden_prefix, remove_whole, writing
from revela.training.checkpoint import (
    REPLACED,
    _move_run,
    load_checkpoint,
    output_folder,
    save_checkpoint,
    saved_checkpoints,
)
from revela.training.checks import NO_CHECKS, CheckPlan
from revela.training.methods.heads import save_heads
from revela.training.methods.registry import METHODS as NAMES
from revela.training.methods.revela import ChunkBatches, Revela, RevelaLoss
from revela.training.recipe import Recipe
from revela.training.record import Provenance, RunFile
from revela.training.retriever.card import Card, metadata_of
from revela.training.step import BatchReader, Budget, Progress
from revela.training.train import train
from revela.types import Document

SHORT = Recipe.of(**TINY, save_every=3, gate_heads=4)
LEARNED = dict(method="dream", queries="telling-sentence", chunk_words=30, query_heads=3)
# The preset's surrogate is MiniLM, which knows none of the words here.
CDE = {"method": "cde", "surrogate": ""}


@pytest.fixture
def recipe(tiny_lm_folder):
    return SHORT.replace(model=str(tiny_lm_folder), lm=str(tiny_lm_folder))


def losses(folder):
    return {row["step"]: row["loss"] for row in logged(folder)}


def assert_same_tensors(one, other, least=1):
    """Every saved tensor of one run is that of the other; there are so many files, or more."""
    files = sorted(file.relative_to(one) for file in one.rglob("*.safetensors"))
    assert len(files) >= least
    for file in files:
        ours, theirs = load_file(one / file), load_file(other / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), file


def stop_and_resume(recipe, documents, out):
    """Ctrl-C at step 3, then --resume; the fit, the order of clusters and the LM's heads are those
    of the first part, as no other can be made.

    The limit, and with it the learning rate, is the unbroken run's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "advance", ctrl_c_after(3))
        outcome = train(recipe, documents, out)
    assert outcome.signal and outcome.steps == 3
    with pytest.MonkeyPatch.context() as patch:
        made = "train.fit_to_corpus", "training_set.similar_order"
        methods = "methods.revela.cached_ranking", "methods.dream.cached_ranking"
        for name in (*made, *methods):
            patch.setattr(f"revela.training.{name}", None)
        train(recipe, documents, out, resume=True)


def assert_resume_equals_unbroken(recipe, documents, folder, files=1):
    """The losses of six steps, and every tensor that is saved."""
    train(recipe, documents, folder / "whole")
    stop_and_resume(recipe, documents, folder / "broken")
    assert losses(folder / "broken") == losses(folder / "whole")
    assert len(losses(folder / "whole")) == 6
    assert_same_tensors(folder / "whole", folder / "broken", files)


def test_it_learns_in_thirty_steps(taught_lm_folder, tiny_lm_folder, tmp_path, monkeypatch):
    """The LM is frozen, so only a better choice of what to read can lower its loss."""
    monkeypatch.setattr(Revela, "gate_first_layer", 0.0)
    documents = [Document(row["_id"], row["text"]) for row in make_rows(4, sentences=4, seed=3)]
    recipe = SHORT.replace(
        model=str(tiny_lm_folder), lm=str(taught_lm_folder), max_steps=30,
        learning_rate=1e-3, group_size=16, chunk_words=9, gate=0.5, gate_heads=0,
        tau=0.5, whitening=0.0, token_weighting=0.0, lexical=0.0,
        pooling="eos", lora_rank=8, query_side="whole",
    )  # fmt: skip
    train(recipe, documents, tmp_path / "out")
    first, *_, last = losses(tmp_path / "out").values()
    assert 0.03 < first - last < 1.0


def ctrl_c_after(steps, presses=1):
    """In place of ``Progress.advance``: Ctrl-C is pressed when so many steps are done."""
    original, done = Progress.advance, 0

    def advance(self):
        nonlocal done
        done += 1
        for _ in range(presses if done == steps else 0):
            signal.raise_signal(signal.SIGINT)
        original(self)

    return advance


SMALL = dict(layers=2, group_size=8, lora_rank=4, warmup_steps=2)
ASKED = dict(queries="telling-sentence", chunk_words=30)
CROP = dict(method="contrastive-crop", group_size=8)
PAPER = dict(groups_per_step=2, groups="cluster", max_steps=6, gate_heads=24, save_lm=True)
RESUMED = {
    "gated": {},
    "paper": {"method": "revela-paper"} | SMALL | PAPER,
    "crop": CROP | dict(crop_window=30, lora_rank=0, keep="last"),
    "dream": LEARNED | dict(groups_per_step=2, groups_per_batch=2),
    "cde": CDE | ASKED | dict(group_size=8, context=3),
    "whole": CDE | ASKED | dict(group_size=8, context=4, context_layers=2, lora_rank=0),
}


LOGGED = dict(gated="sim_entropy sim_hard_rows", paper="sim_entropy sim_hard_rows")
LOGGED |= dict(crop="accuracy", cde="accuracy", whole="accuracy", dream="tau gate")


@pytest.mark.parametrize("name", RESUMED)
def test_resume_equals_unbroken(recipe, documents, tiny_lm_folder, tmp_path, name):
    files = {"cde": 7, "whole": 7, "crop": 4}.get(name, 1)
    recipe = recipe.replace(**RESUMED[name] | ({"lm": recipe.lm.lm} if name == "paper" else {}))
    assert_resume_equals_unbroken(recipe, documents, tmp_path, files)
    assert (tmp_path / "whole" / "lm" / "model.safetensors").is_file() == (name == "paper")
    numbers = logged(tmp_path / "whole")[0]["method"]
    assert " ".join(numbers) == LOGGED[name]
    if name == "dream":  # where they start
        assert [*numbers.values()] == pytest.approx([0.2, 0.5], rel=1e-2)
    if name == "crop":  # of which all weights are trained
        start = load_file(tiny_lm_folder / "model.safetensors")
        found = load_file(tmp_path / "whole" / "model.safetensors")
        assert not any(torch.equal(found[k], start[f"model.{k}"]) for k in found)


def test_a_gradient_not_finite_leaves_the_last_checkpoint(recipe, documents, tmp_path, monkeypatch):
    """The loss is finite in the very step whose weights are not, and that step is saved."""
    original, calls = RevelaLoss.forward, 0

    def forward(self, features):
        nonlocal calls
        calls += 1
        zero = sum(p.sum() for p in self.model.parameters() if p.requires_grad) * 0
        return original(self, features) + (zero.sqrt() if calls == 4 else zero)

    out, recipe = tmp_path / "out", recipe.replace(save_every=2, log_every=100)
    with monkeypatch.context() as patch:
        patch.setattr(RevelaLoss, "forward", forward)
        message = "the loss or its gradient was not finite at step 4 .*: give a lower --learning"
        with pytest.raises(RevelaError, match=message):
            train(recipe, documents, out)
    (kept,) = saved_checkpoints(out / "checkpoints")
    tensors = load_file(kept / "trainable.safetensors")
    assert kept.name == "checkpoint-2" and all(t.isfinite().all() for t in tensors.values())
    assert train(recipe, documents, out, resume=True).steps == 6


def test_only_the_transformer_is_under_bf16_autocast(recipe, documents, tmp_path):
    """In the fit, in checks and in training: pooling, whitening and rotation are for fp32."""
    seen = defaultdict(set)

    def note(module, inputs):
        seen[type(module)].add(torch.is_autocast_enabled("cpu"))

    def check(encoder):
        encoder.encode_passages(["ocean1"])
        return {"task": 0.0}

    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        recipe = recipe.replace(precision="bf16", max_steps=1)
        train(recipe, documents, tmp_path / "out", plan=CheckPlan(check))
    finally:
        hook.remove()
    rest = [modules.Pooling, modules.Dense, modules.WordWeights, modules.WordEmbeddings]
    assert all(seen[kind] == {False} for kind in [*rest, modules.Normalize])
    assert seen[LlamaMLP] == {True, False}  # the frozen LM has bf16 weights


@pytest.mark.parametrize("ahead", [True, False])
def test_batches_are_made_while_a_step_computes(ahead):
    read = []

    def collate(rows):
        read.append((rows[0], threading.current_thread() is threading.main_thread()))
        return {}

    groups = [[0], [1]]
    one = dict(groups_per_step=1, groups_per_batch=1, is_shared=False)
    read_groups = BatchReader(lambda _: iter(groups), collate, Budget(3), ahead=ahead, **one)
    with read_groups as reader:
        for step in (1, 2, 3):
            (batch,), _ = reader.next_step()
            reader.wait()
            assert batch.number == step - 1
            assert len(read) == min(3, step + ahead)  # nothing for a step that never comes
    assert read == [((0, 0), True), ((0, 1), not ahead), ((1, 0), not ahead)]


def test_every_step_is_in_a_logged_loss(recipe, documents, tmp_path):
    """Also the last steps, and those before a checkpoint."""
    for name, every in (("all", 1), ("some", 4)):
        few = dict(log_every=every, save_every=3, max_steps=5)
        train(recipe.replace(**few), documents, tmp_path / name)
    one, some = losses(tmp_path / "all"), losses(tmp_path / "some")
    means = {3: (one[1] + one[2] + one[3]) / 3, 4: one[4], 5: one[5]}
    assert some == pytest.approx(means, rel=1e-6)
    row = logged(tmp_path / "some")[-1]
    assert row["tokens_read"] > 0 and row["learning_rate"] > 0 and row["grad_norm"] > 0


def test_a_second_ctrl_c_stops_at_once(recipe, documents, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Progress, "advance", ctrl_c_after(3, presses=2))
    with pytest.raises(KeyboardInterrupt):
        train(recipe.replace(save_every=2), documents, tmp_path / "out")
    assert [p.name for p in saved_checkpoints(tmp_path / "out" / "checkpoints")] == ["checkpoint-2"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_checkpoint_is_tensors_and_json(recipe, documents, tmp_path, monkeypatch):
    """No pickle, which could run code; and a parameter's moments stand under its name."""
    monkeypatch.setattr(Progress, "advance", ctrl_c_after(2))
    train(recipe.replace(**LEARNED), documents, tmp_path / "out")
    (folder,) = saved_checkpoints(tmp_path / "out" / "checkpoints")
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    moments = load_file(folder / "optimizer.safetensors")
    assert moments["log_tau/step"] == 2 and moments["log_tau/exp_avg_sq"] > 0


@pytest.mark.parametrize("name", ["trainable.safetensors", "optimizer.safetensors", "clock.json"])
def test_a_damaged_file_of_a_checkpoint_is_one_sentence(tmp_path, name):
    def state(width):
        module = torch.nn.Linear(4, width)
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.ones(4)).sum().backward()
        optimizer.step()
        return module, optimizer, Budget(6)

    folder = tmp_path / "checkpoint-3"
    save_checkpoint(tmp_path, 3, state(4))
    load_checkpoint(folder, *state(4))
    with pytest.raises(RevelaError, match="checkpoint-3 was saved by another recipe"):
        load_checkpoint(folder, *state(2))
    whole = (folder / name).read_bytes()
    message = rf"checkpoint-3/{name} cannot be read \(.*\): start again with another --out"
    for damaged in (whole[:-9], b"", b"\xff" * len(whole), b"{}"):
        (folder / name).write_bytes(damaged)
        with pytest.raises(RevelaError, match=message) as error:
            load_checkpoint(folder, *state(4))
        assert "\n" not in str(error.value)


class Scripted:
    """A label-free check that gives these scores, one after another."""

    def __init__(self, scores):
        self.scores = iter(scores)

    def __call__(self, encoder, _step=0):
        encoder.encode_passages(["ocean1"])
        return {"task": next(self.scores)}


def test_the_state_with_the_best_check_is_saved(recipe, documents, tmp_path):
    recipe = recipe.replace(check_every=3, save_every=2, learning_rate=1e-2)
    unchecked = recipe.replace(keep="last", check_every=0)
    train(unchecked.replace(learning_rate=1e-30), documents, tmp_path / "start")
    train(unchecked, documents, tmp_path / "end")
    cases = [
        ("best", [0, 0.1, 0.5, 0.3], 3),
        ("last", [0, 0.1, 0.5, 0.3], 6),
        ("best", [0, 0.5, 0.504, 0.504], 0),  # better by chance, for all we know
    ]
    for keep, scores, kept in cases:
        out = tmp_path / f"{keep}-{kept}"
        outcome = train(recipe.replace(keep=keep), documents, out, plan=CheckPlan(Scripted(scores)))
        assert (outcome.kept, outcome.steps) == (kept, 6)
        rows = {"start": scores[1], "last step": scores[-1], "saved": scores[1 + kept // 3]}
        assert {row: outcome.scores[row]["task"] for row in rows} == rows
        card = (out / "README.md").read_text()
        name, says_unchanged = Path(recipe.retriever.model).name, kept == 0
        assert (f"Unchanged start: {name} as it was before the first" in card) == says_unchanged
        assert ("left unchanged when trained without labels" in card) == says_unchanged
        assert ("next-token prediction" in card) != says_unchanged
        assert ("Not improved by training on a corpus" in card) == says_unchanged
        saved, start, end = (
            load_file(folder / "model.safetensors")
            for folder in (out, tmp_path / "start", tmp_path / "end")
        )
        assert all(torch.equal(saved[k], start[k]) for k in saved) == (kept == 0)
        assert all(torch.equal(saved[k], end[k]) for k in saved) == (kept == 6)


def test_a_stock_model_keeps_its_layers_prompts_and_licence(recipe, documents, tmp_path):
    def dense(model):
        return [m.linear.weight.clone() for m in model if isinstance(m, modules.Dense)]

    train(recipe.replace(max_steps=1, lexical=0.0), documents, tmp_path / "first")
    model = SentenceTransformer(str(tmp_path / "first"))
    model.insert(len(model) - 1, modules.Dense(model.get_embedding_dimension(), 8))
    model.prompts = {"query": "Q: ", "document": ""}
    model.save(str(tmp_path / "own"))
    (tmp_path / "own" / "README.md").write_text("---\nbase_model: a/b\nlicense: mit\n---\n")
    settings = recipe.replace(model=str(tmp_path / "own"), learning_rate=1e-30, max_steps=1)
    train(settings, documents, tmp_path / "out")
    after = SentenceTransformer(str(tmp_path / "out"))
    assert after.prompts["query"] == "Q: " and not after.prompts["document"]
    assert all(torch.equal(a, b) for a, b in zip(dense(model), dense(after), strict=True))
    found = ModelCard((tmp_path / "out" / "README.md").read_text()).data
    assert (found.base_model, found.license) == ("a/b", "mit")


def test_a_resumed_run_remembers_the_best_state_and_what_it_began_with(recipe, documents, tmp_path):
    """And run.json says so."""
    recipe = recipe.replace(check_every=2, save_every=1, learning_rate=1e-2)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(recipe, documents, whole, plan=CheckPlan(Scripted([0, 0.1, 0.5, 0.3, 0.2])))
    first, second = (Provenance("a folder", f"revela train {which}") for which in ("once", "twice"))
    plan, later = (CheckPlan(Scripted(s), {"task": 0.4}) for s in ([0, 0.1, 0.5], [0, 0.3, 0.2]))
    with pytest.raises(ZeroDivisionError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkBatches, "__call__", dying_after(3, ChunkBatches.__call__))
        train(recipe, documents, broken, plan=plan, provenance=first)
    again = train(recipe, documents, broken, plan=later, provenance=second, resume=True)
    assert again.kept == 2
    assert_same_tensors(whole, broken)
    run = json.loads((broken / "run.json").read_text())
    about = run.pop("about")
    assert run == recipe.to_dict()
    assert about["command"] == "revela train once" and about["corpus"] == "a folder"
    assert (about["documents"], about["bm25"]) == (len(documents), {"task": 0.4})
    assert about["chunks"] > about["groups"] > 0
    assert about["versions"]["torch"] == torch.__version__
    assert about["hardware"]["threads"] == torch.get_num_threads()


def dying_after(calls, method):
    count = 0

    def wrapped(*args):
        nonlocal count
        count += 1
        return method(*args) if count <= calls else 1 / 0

    return wrapped


def test_all_that_is_trained_is_clipped_together(recipe, documents, tmp_path, monkeypatch):
    """The LM's LoRA too; the norm that is logged is of both models' as well."""
    original, norms, step = RevelaLoss.forward, [], torch.optim.AdamW.step

    def steep(self, *args):
        return 10_000 * original(self, *args)

    def recorded(self, closure=None):
        moved = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad.norm() for p in moved if p.grad is not None]
        norms.append(torch.stack(gradients).norm().item())
        return step(self, closure)

    monkeypatch.setattr(RevelaLoss, "forward", steep)
    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    recipe = recipe.replace(lm_lora=True, max_steps=2)
    train(recipe, documents, tmp_path / "out")
    assert norms == pytest.approx([1, 1], abs=1e-3)
    assert all(row["grad_norm"] > 1000 for row in logged(tmp_path / "out"))


def test_an_output_folder_in_the_way_is_refused_and_kept(recipe, documents, tmp_path):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(RevelaError, match="exists: choose another --out"):
        train(recipe, documents, tmp_path)
    with pytest.raises(RevelaError, match="holds no run of revela"):
        train(recipe, documents, tmp_path, resume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


REFUSED = [
    (dict(group_size=5000), "give no group of 5000"),
    (dict(model="nowhere/at/all"), "neither a folder nor a hub id"),
    (dict(model="embedded:nothing"), "there are embedded:"),
    (dict(max_steps=0), "a run needs a limit: set --max-steps, --max-epochs, --max-min"),
    (dict(restart_optimizer=True), "--restart-optimizer needs mined negatives: give"),
    (dict(refresh_epochs=2), "--refresh-epochs needs mined negatives: give"),
    (dict(method="dream-infonce", queries="first-sentence", chunk_words=4), "no chunk has a query"),
    (dict(method="dwell-pairs"), "--queries judged are those of --pairs: give their folder"),
    (dict(method="replug", lm_lora=True), "--lm-lora has no effect on --method replug"),
    (LEARNED | dict(lm_tokens=256), "more than the 2,048"),
    (dict(method="revela-paper", gate_heads=4), "--gate-heads has no effect on --mix sum"),
    (dict(method="revela-gated", save_lm=True), "--save-lm saves an LM that is trained: give"),
    (dict(track="wandb"), "--track wandb needs its package: install it by pip"),
    (dict(whole_query_sources=("2",)), "--whole-query-sources 2: no stored group has this source"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refusals_leave_nothing(recipe, documents, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with pytest.raises(RevelaError, match=message):
        train(recipe.replace(**changes), documents, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_run_says_and_leaves(recipe, documents, tmp_path):
    train(recipe.replace(**CROP, max_steps=1), documents, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    name = Path(recipe.retriever.model).name
    assert (
        f"\n{name} learned to find another crop of the same text among crops of others.\n" in card
    )
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"modules.json", "README.md", "metrics.jsonl", "run.json"} <= names
    assert not [n for n in names if n.startswith(".")]


WARMUPS = [
    (dict(max_steps=4, warmup_steps=4), True),
    (dict(max_steps=4, warmup_steps=3), False),
    (dict(max_steps=0, max_tokens_read=0.001, warmup_steps=900), True),
]


@pytest.mark.parametrize(("limit", "warns"), WARMUPS)
def test_a_warmup_as_long_as_a_run_is_a_warning(recipe, documents, tmp_path, caplog, limit, warns):
    outcome = train(recipe.replace(**limit), documents, tmp_path / "out")
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    found, advice = f"the run of {outcome.steps} steps ends in its warm-up", "lower --warmup-steps"
    assert said == [f"{found}: {advice} {limit['warmup_steps']}"] * warns and outcome.steps > 1


@pytest.mark.parametrize("steps", [0, 2, 4])
def test_an_own_methods_error_keeps_a_folder_after_a_checkpoint(recipe, documents, tmp_path, steps):
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(RevelaLoss, "forward", dying_after(steps, RevelaLoss.forward))
        train(recipe, documents, out)
    assert out.exists() == bool(saved_checkpoints(out / "checkpoints")) == (steps == 4)


CARDS = [
    ("embedded:minilm-l6", None, ["sentence-transformers/all-MiniLM-L6-v2", "apache-2.0"]),
    ("folder", None, [None, None]),
    ("folder", "---\nlicense: mit\ntags: [a]\n---\n", [None, "mit"]),
    ("folder", "---\nbase_model: a/b\nlicense: mit\n---\n", ["a/b", "mit"]),
    ("folder", "---\nbase_model: [a/b, c/d]\nlicense: {no: yes}\n---\n", [None, None]),
    ("folder", "---\nbroken: [\n---\n", [None, None]),
    ("a/hub-model", "---\nbase_model: a/b\nlicense: mit\n---\n", ["a/hub-model", "mit"]),
]


@pytest.mark.parametrize(("name", "card", "expected"), CARDS)
def test_a_card_names_the_base_model_and_its_licence(tmp_path, monkeypatch, name, card, expected):
    folder = tmp_path / "models--a--hub-model" / "snapshots" / "1234"
    folder.mkdir(parents=True)
    if card is not None:
        (folder / "README.md").write_text(card)
    monkeypatch.setitem(commits, "a/hub-model", "1234")
    metadata = metadata_of(name, folder)
    text = Card("name", "", "docs", 1, "revela fit", {}, {}, 1.0, metadata=metadata).text()
    found = ModelCard(text).data
    assert [found.base_model, found.license] == expected and found.tags[-1] == "revela"


def test_every_method_says_what_it_learns_from():
    for name, kind in NAMES.items():
        sentence = kind.learned_from.format(**Recipe.of(kind()).to_dict())
        assert kind.name == name and "{" not in sentence


def test_another_model_finds_false_negatives(recipe, documents, tiny_lm_folder, tmp_path):
    tiny_retriever(tiny_lm_folder).save(str(tmp_path / "surrogate"))
    some = dict(queries="title", context=0, surrogate="", groups="document", lm_tokens=64)
    recipe = recipe.replace(method="cde", group_size=8, max_steps=1, **some)
    found, name = [], str(tmp_path / "surrogate")
    both, cut = {"surrogate": name, "filter": ""}, {"filter": name, "surrogate_tokens": 4}
    clusters = {**both, "groups": "cluster"}
    for changes in ({}, {"surrogate": name}, {"filter": name}, both, clusters, cut):
        out = tmp_path / f"out-{len(found)}"
        train(recipe.replace(**changes), documents, out)
        found.append(losses(out)[1])
    none, filtered, *_, cut_short = found
    assert none > filtered != cut_short and found[2:4] == [filtered, none]
    read = [{*RunFile.read(tmp_path / f"out-{i}").about.models} for i in range(len(found))]
    more = [set(), {"filter"}, {"filter"}, set(), {"surrogate"}, {"filter"}]
    assert read == [{"model"} | names for names in more]


def test_dream_takes_its_heads_from_a_file(recipe, taught_lm_folder, documents, tmp_path, caplog):
    recipe = recipe.replace(**LEARNED, group_size=8, max_steps=1)
    caplog.set_level("INFO", "revela")
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    ranked = [(3, 1, 0.9), (0, 2, 0.5), (1, 1, 0.1), (1, 2, 0.0)]
    save_heads(mine, "questions", "tiny", resolve(recipe.lm.lm), ranked)
    train(recipe.replace(heads=str(mine)), documents, tmp_path / "out")
    assert "3 heads that look from questions to answers: 3-1 0-2 1-1" in caplog.messages
    save_heads(other, "questions", "another", resolve(str(taught_lm_folder)), [(0, 0, 1.0)])
    none, kind = tmp_path / "none.json", tmp_path / "kind.json"
    save_heads(kind, "siblings", "tiny", resolve(recipe.lm.lm), ranked)
    refused = {
        other: "ranks the heads of another",
        none: "does not exist: give a file of revela heads, or one of published, random, random",
        kind: "ranks heads by how they look to a related document, and .* --method dream --out",
    }
    for file, message in refused.items():
        with pytest.raises(RevelaError, match=message):
            train(recipe.replace(heads=str(file)), documents, tmp_path / "no")
        assert not (tmp_path / "no").exists()


def test_gates_on_the_heads_of_a_file(recipe, documents, tmp_path, caplog):
    caplog.set_level("INFO", "revela")
    recipe, folder = recipe.replace(max_steps=1), resolve(recipe.lm.lm)
    files = {"siblings": [(3, 1, 0.9), (0, 2, 0.5), (2, 1, 0.1), (3, 0, 0.0)]}
    files |= {"low": [(0, 2, 0.5)], "none": []}
    for name, ranking in files.items():
        save_heads(tmp_path / name, "siblings", "tiny", folder, ranking)
    for count, heads in {2: [[3, 1], [2, 1]], 0: [[3, 1], [2, 1], [3, 0]]}.items():
        out = tmp_path / f"out-{count}"
        train(recipe.replace(heads=str(tmp_path / "siblings"), gate_heads=count), documents, out)
        assert json.loads((out / "run.json").read_text())["about"]["heads"] == heads
    refused = {"low": "names no head of layer 2 or above, where gates are", "none": "names no head"}
    for name, message in refused.items():
        with pytest.raises(RevelaError, match=message):
            train(recipe.replace(heads=str(tmp_path / name)), documents, tmp_path / "no")
    with pytest.raises(RevelaError, match=r"gate.*greater than 0"):
        recipe.replace(gate=0)


UNEQUAL = [
    Document(row["_id"], row["text"][: 80 + 60 * (i % 5)], row["title"] if i % 3 else "")
    for i, row in enumerate(make_rows(120))
]
WEIGHED = {
    "infonce": {"method": "dream-infonce", "queries": "title"},
    "dream": LEARNED,
    "spans": {"method": "dwell-spans", "model": "new:tiny", "lora_rank": 0},
}


@pytest.mark.parametrize("name", WEIGHED)
def test_groups_weigh_the_same_in_one_batch_and_in_two(recipe, tmp_path, name):
    """Whatever their lengths, and how many of their texts have a query."""
    few = dict(group_size=4, max_steps=1, groups_per_step=4, lm_tokens=64, lora_dropout=0.0)
    recipe, found = recipe.replace(**WEIGHED[name] | few), []
    for count in (1, 2):
        train(recipe.replace(groups_per_batch=count), UNEQUAL, tmp_path / str(count))
        found.append(losses(tmp_path / str(count))[1])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_run_in_a_thread_leaves_signals_alone(recipe, documents, tmp_path):
    before, outcomes = signal.getsignal(signal.SIGINT), []
    given = recipe.replace(max_steps=1), documents, tmp_path / "out"
    thread = threading.Thread(target=lambda: outcomes.append(train(*given)))
    thread.start()
    thread.join()
    assert outcomes[0].steps == 1 and signal.getsignal(signal.SIGINT) is before


def test_checks_leave_the_first_stage_alike(tiny_bert_folder, documents, tmp_path, monkeypatch):
    """With the dropout of its layers, which this model has."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_bert_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_dropout_prob": 0.5}))
    small = dict(model=str(folder), context=3, group_size=8, max_steps=2, keep="last")
    recipe = SHORT.replace(**CDE | ASKED | small)
    plans = {
        "plain": NO_CHECKS,
        "checked": CheckPlan(lambda encoder: {"task": float(encoder.encode_queries(["a"]).sum())}),
    }
    for name, plan in plans.items():
        train(recipe.replace(check_every=1), documents, tmp_path / name, plan=plan)
    assert losses(tmp_path / "plain") == losses(tmp_path / "checked")


@pytest.mark.parametrize("kind", ["bert", "lm"])
def test_both_stages_train_and_a_second_phase_goes_on(request, documents, tmp_path, kind):
    """Stock sentence-transformers opens what is saved; slots of a BERT still have no position."""
    start = request.getfixturevalue(f"tiny_{kind}_folder")
    some = dict(model=str(start), group_size=8, context=4, context_layers=0, lora_rank=0)
    first = SHORT.replace(**CDE | ASKED | some | dict(max_steps=2, keep="last", layers=0))
    one, two = tmp_path / "one", tmp_path / "two"
    train(first, documents, one)
    second = dict(model=str(one), negatives=1, query_prompt="search_query: ")
    train(first.replace(**second), documents, two)
    for stage in (".", "context"):
        states = [open_model(folder)[0].model.state_dict() for folder in (one / stage, two / stage)]
        states.insert(0, AutoModel.from_pretrained(start).state_dict())
        layers = [name for name in states[0] if ".layer" in f".{name}" and "weight" in name]
        assert len(layers) > 20 and all(name in state for state in states for name in layers)
        for old, new in pairwise(states):
            assert not any(torch.equal(old[name], new[name]) for name in layers)
    if kind == "bert":
        positions = open_model(two)[0].model.embeddings.position_embeddings.weight
        assert not positions[1:5].any() and positions[0].any() and positions[5].any()
    stock, texts = SentenceTransformer(str(two), device="cpu"), ["ocean1", "engine2 garden3"]
    assert "search_query:" in stock.prompts["query"] and "context-3" in stock.prompts["query"]
    found = load_encoder(two, "fp32").encode_queries(texts)
    np.testing.assert_allclose(found, stock.encode_query(texts), atol=1e-5)
    message = "has 4 slots, which --context 3 with 1 vectors per document does not fit"
    with pytest.raises(RevelaError, match=message):
        train(first.replace(model=str(one), context=3), documents, tmp_path / "three")


def test_metrics_go_to_a_tracker(recipe, documents, tmp_path, monkeypatch):
    tracked = []

    class Tracker(tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "tensorboard", True, None

        def __init__(self, run_name, logging_dir):
            super().__init__()
            tracked.append((run_name, logging_dir))

        def store_init_configuration(self, values):
            assert all(isinstance(value, str | int | float | bool) for value in values.values())
            tracked.append(values["group_size"])

        def log(self, values, step, **_):
            tracked.append((step, values))

        def finish(self):
            tracked.append("finished")

    monkeypatch.setattr(tracking, "_available_trackers", [tracking.LoggerType.TENSORBOARD])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Tracker)
    recipe = recipe.replace(max_steps=2, track="tensorboard")
    out = tmp_path / "out"
    plan = CheckPlan(Scripted([0, 0.1, 0.5]), judge=Scripted([0.2, 0.3]))
    train(recipe, documents, out, plan=plan)
    name, settings, *lines, end = tracked
    assert name == ("revela", str(out / "tracker")) and (settings, end) == (8, "finished")
    steps = losses(out)
    assert [(step, line["loss"]) for step, line in lines if "loss" in line] == list(steps.items())
    assert 0 < lines[1][1]["method/sim_entropy"] < math.log(7)
    both = lines[0], lines[3]
    checks = [(step, line["check/task"], line["judged/task"]) for step, line in both]
    assert checks == [(0, 0.1, 0.2), (2, 0.5, 0.3)]


def test_a_finished_run_is_extended_as_if_it_had_not_ended(recipe, documents, tmp_path, caplog):
    """With a constant rate the weights are an unbroken run's; the best state of its first part is
    not forgotten.
    """
    caplog.set_level("INFO", "revela")
    recipe = recipe.replace(schedule="constant", check_every=2, learning_rate=1e-2)
    longer, out, whole = recipe.replace(max_steps=10), tmp_path / "out", tmp_path / "whole"
    first, rest = [0, 0.1, 0.2, 0.9, 0.3], [0, 0.4, 0.5]
    train(longer, documents, whole, plan=CheckPlan(Scripted([*first[:4], 0.3, 0.4, 0.5])))
    train(recipe, documents, out, plan=CheckPlan(Scripted(first)), resume=True)
    assert f"{out} has no run yet: starting one" in caplog.messages
    names = {path.name for path in (out / "checkpoints").iterdir()}
    assert {n for n in names if "-" in n} == {"checkpoint-6", "best-4.safetensors"}
    message = r"is finished after 6 steps: raise --max-steps to extend it"
    with pytest.raises(RevelaError, match=message):
        train(recipe, documents, out, resume=True)
    outcome = train(longer, documents, out, plan=CheckPlan(Scripted(rest)), resume=True)
    assert (outcome.kept, outcome.steps) == (4, 10)
    assert f"{out}: extends the finished run of 6 steps" in caplog.messages
    assert losses(out) == losses(whole)
    assert_same_tensors(whole, out, 4)


def test_the_rate_of_an_extended_run_and_without_checkpoints(recipe, documents, tmp_path, caplog):
    caplog.set_level("INFO", "revela")
    out, longer = tmp_path / "out", recipe.replace(max_steps=12)
    train(recipe.replace(keep_checkpoints=3, save_every=1), documents, out)
    assert [p.name[11:] for p in saved_checkpoints(out / "checkpoints")] == ["4", "5", "6"]
    train(longer.replace(keep_checkpoints=0), documents, out, resume=True)
    message = "goes on at 5e-05, as --max-steps 12 gives it at step 6; before it was 0 there"
    assert f"the learning rate {message}" in caplog.messages
    assert not (out / "checkpoints").exists() and list(losses(out)) == list(range(1, 13))
    with pytest.raises(RevelaError, match="is finished and has no checkpoint to extend"):
        train(recipe.replace(max_steps=18), documents, out, resume=True)


def test_a_run_is_replaced_by_one_that_starts(recipe, documents, tmp_path, monkeypatch):
    out, recipe = tmp_path / "out", recipe.replace(max_steps=2)
    train(recipe, documents, out)
    (out / "notes.md").write_text("mine")
    with pytest.raises(RevelaError, match=r"has a notes.md that no run wrote: move it away"):
        train(recipe, documents, out, overwrite=True)
    (out / "notes.md").unlink()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for refused in (recipe.replace(group_size=5000), recipe.replace(whole_query_sources=("2",))):
        with pytest.raises(RevelaError):
            train(refused, documents, out, overwrite=True)
        assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    _move_run(out, out / f"{hidden_prefix(REPLACED)}run")  # killed before its first checkpoint
    with pytest.raises(RevelaError):
        train(refused, documents, out, overwrite=True)
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    train(recipe.replace(max_steps=3), documents, out, overwrite=True)
    assert list(losses(out)) == [1, 2, 3]
    assert not list(out.glob(".*"))
    (out / "run.json").unlink()
    with pytest.raises(RevelaError, match="holds no run of revela"):
        train(recipe, documents, out, overwrite=True)
    assert (out / "modules.json").is_file()


def test_a_retriever_with_dot_products_says_so(recipe, documents, tmp_path):
    out = tmp_path / "out"
    train(recipe.replace(**CROP, crop_window=40, max_steps=2, similarity="dot"), documents, out)
    model = open_model(out)
    saved = json.loads((out / "config_sentence_transformers.json").read_text())
    assert saved["similarity_fn_name"] == "dot" and not isinstance(model[-1], modules.Normalize)
    assert model.prompts["query"] == "query: " and len(losses(out)) == 2


def test_a_context_goes_around_another_method(recipe, documents, tmp_path):
    """Its head and its anchors are trained by whatever the method is."""
    changes = LEARNED | SMALL | dict(max_steps=2, context=3)
    train(recipe.replace(**changes), documents, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "context" / "rows.safetensors")
    table = open_model(tmp_path / "out")[0].model.get_input_embeddings().weight
    assert torch.equal(table[-3:].cpu(), tensors["rows_JD"])
    head = load_file(tmp_path / "out" / "context" / "4_Dense" / "model.safetensors")
    assert head["linear.weight"].abs().max() > 0


def test_a_run_killed_before_a_checkpoint_resumes_whole(recipe, documents, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "advance", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(recipe, documents, out)
    for name in (".run.json-abcd", ".metrics.jsonl-abcd", ".model-abcd"):
        (out / name).mkdir()
    for name in (".checkpoint-3-abcd", ".checkpoint-3-removed"):
        (out / "checkpoints" / name).mkdir(parents=True)
    train(recipe, documents, out, resume=True)
    assert not [*out.rglob(".*")]
    train(recipe, documents, tmp_path / "whole")
    assert losses(out) == losses(tmp_path / "whole")


def test_a_folder_killed_before_run_json_was_written_is_free(recipe, documents, tmp_path):
    (tmp_path / "out" / ".run.json-abcd").mkdir(parents=True)
    train(recipe.replace(max_steps=1), documents, tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*"))


def test_two_runs_do_not_write_to_one_folder(recipe, documents, tmp_path):
    out = tmp_path / "out"
    with writing(out), pytest.raises(RevelaError, match="another process is writing to"):
        train(recipe, documents, out)

    def check(encoder):
        with pytest.raises(RevelaError, match=r"another process is writing to|exists: choose"):
            train(recipe, documents, out)
        return {"task": 0.0}

    train(recipe.replace(max_steps=1), documents, out, plan=CheckPlan(check))
    assert (out / "modules.json").is_file() and not list(out.glob(".*"))


def test_a_refusal_leaves_a_folder_only_if_steps_were_taken(tmp_path):
    for steps in (False, True):
        with pytest.raises(RevelaError), output_folder(tmp_path / "out", resume=False):
            (tmp_path / "out" / "checkpoints").mkdir()
            row = {"step": 1, "loss": 2.0} if steps else {"step": 0, "check": {}}
            (tmp_path / "out" / "metrics.jsonl").write_text(json.dumps(row))
            raise RevelaError("for some reason")
        assert (tmp_path / "out").exists() == steps


def test_a_kill_while_a_checkpoint_is_removed_leaves_no_half_of_it(tmp_path, monkeypatch):
    for step in (3, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()

    def killed(folder, ignore_errors=False):
        if folder.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_whole(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-5.bak").mkdir()
    assert saved_checkpoints(tmp_path) == [tmp_path / "checkpoint-6"]


def test_a_full_disk_is_one_sentence_and_the_run_goes_on(recipe, documents, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("revela.training.checkpoint._moments", full)
        with pytest.raises(RevelaError, match=r"checkpoint-3 cannot be written \(no space left"):
            train(recipe, documents, out)
    train(recipe, documents, out, resume=True)
    assert list(losses(out)) == [1, 2, 3, 4, 5, 6] and not list(out.glob(".*"))
