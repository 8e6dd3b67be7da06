"""The stages of research.gpu.run, each in a process of its own.

    python -m research.gpu.stages attention --out attention.json --seconds 60

A stage yields rows. The file holds those that there are, so that a stage that is stopped leaves
what it has measured. A row that fails has a note in place of numbers, and the others follow.

``--tiny`` takes models and texts of a few kilobytes, on a CPU too, to test the stage itself.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from research.benchmarks import from_raw, steps
from research.benchmarks.hardening import made
from research.benchmarks.options import parser_of, read_table
from research.gpu.parts import COLLECTIONS, ROWS, TEXT, TEXTS
from revela import Document, Retriever
from revela.evaluation.collection import Collection, save_collection
from revela.files import atomic_write
from revela.quiet_libraries import silence_libraries
from revela.training.distributed import available_cores
from revela.training.lm.document_attention import V_NORM_EPS, DocumentWeights, document_attention
from revela.training.methods.registry import PRESETS
from revela.training.recipe import Recipe
from revela.training.train import train
from tests.naive import reference_attention

Row = dict[str, Any]
GROUP, TOKENS = 16, 128  # chunks of a group, tokens of a chunk
REFERENCE = "reference"
MADE_UP = "made-up"
TINY_RECIPE = """
corpus = {{ held_out = 0.0, chunk_words = 12 }}
retriever = {{ model = "{0}", layers = 2, lora_rank = 4 }}
fit = {{ token_weighting = 0.0, whitening = 0.0, lexical = 0.0 }}
lm = {{ lm = "{0}", lm_tokens = 32 }}
training = {{ max_steps = 2, max_minutes = 0, keep = "last", check_every = 0 }}
method = {{ method = "revela-gated", gate_heads = 0 }}
[variants.gated]
"""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a stage is given.

    Attributes:
        home: where the parts were unpacked.
        work: a folder for models and runs, removed at the end.
        seconds: time of the stage.
    """

    device: torch.device
    home: Path
    work: Path
    seconds: float
    tiny: bool
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


# Stage 0


def smoke(setting: Setting) -> Iterator[Row]:
    """One training step of every preset (of every method, with --tiny) on a tiny random model; fit,
    encode, save and load.
    """
    documents = made_up_documents(80)
    model = random_model(setting.work / "tiny", small_config())
    of_method = {type(Recipe.of(preset).method): preset for preset in reversed(PRESETS)}
    for preset in of_method.values() if setting.tiny else PRESETS:
        run = partial(smoke_step, setting, preset, documents, model)
        yield attempt(f"a step of {preset}", run)
    yield attempt("fit, encode, save and load", partial(fit_and_load, setting, documents, model))


def smoke_step(setting: Setting, preset: str, documents: Sequence[Document], model: Path) -> Row:
    """The loss of a step of a preset, in bf16 where the device has it."""
    recipe = small_recipe(preset, model)
    if not setting.is_gpu:
        groups_per_step = min(2, recipe.training.groups_per_step)
        recipe = recipe.replace(groups_per_step=groups_per_step, groups_per_batch="auto")
    out = setting.work / f"step-{preset}"
    train(recipe, documents, out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    loss = next(row["loss"] for row in rows if "loss" in row)
    about = json.loads((out / "run.json").read_text())["about"]
    vectors = Retriever(out).encode_queries(["ocean engine"])
    assert vectors.shape[0] == 1 and abs(float((vectors**2).sum()) - 1) < 1e-3
    shutil.rmtree(out)
    return {"loss": loss, "groups_per_batch": about["groups_per_batch"]}


def small_recipe(preset: str, model: Path) -> Recipe:
    """A preset at the size of the tiny model, for one step."""
    settings: Row = dict(
        layers=2, chunk_words=12, group_size=8, lora_rank=4, lora_alpha=8, lm_tokens=64,
        max_tokens=64, max_minutes=0, max_steps=1, warmup_steps=1, log_every=1, check_every=0,
        threads=torch.get_num_threads(), model=str(model), lm=str(model),
    )  # fmt: skip
    recipe = Recipe.of(preset)
    names = recipe.to_dict()
    if names.get("mix") != "sum" and "gate_heads" in names:
        settings |= dict(gate_heads=0)
    if recipe.method.reads == "queries":
        settings |= dict(queries="telling-sentence", chunk_words=30)
    if "query_heads" in names:
        settings |= dict(query_heads=3)
    if "crop_window" in names:
        settings |= dict(crop_window=40)
    if preset.startswith("dwell-spans"):
        settings |= dict(model="new:tiny", lora_rank=0)
    if recipe.groups.surrogate:
        settings |= dict(surrogate="", filter="same", context=min(16, recipe.context.context))
    return recipe.replace(**settings)


def fit_and_load(setting: Setting, documents: Sequence[Document], model: Path) -> Row:
    """Whether a fitted retriever gives the same vectors when it is loaded again."""
    file = setting.work / "corpus.jsonl"
    lines = (json.dumps({"_id": d.id, "title": d.title, "text": d.text}) for d in documents)
    file.write_text("".join(f"{line}\n" for line in lines))
    out = setting.work / "fitted"
    texts = [document.text for document in documents]
    first = Retriever.fit(file, out, model=str(model), layers=2).encode_passages(texts)
    again = Retriever(out).encode_passages(texts)
    difference = float(abs(first - again).max())
    assert difference < 1e-2, f"vectors differ by {difference}"
    return {"difference": difference}


# Stage 1


def attention(setting: Setting) -> Iterator[Row]:
    """Seconds of document attention, forward and backward, in all its forms, and their errors."""
    configs = {"tiny": small_config()} if setting.tiny else steps.configurations()
    tokens, several = (6, 2) if setting.tiny else (TOKENS, 8)
    for name, config in configs.items():
        for weights, v_norm, groups in (
            *(("all pairs", False, 1), ("sharp", True, 1), ("all pairs", True, 1)),
            *(("all pairs", False, several), ("sharp", True, several)),
        ):
            if groups > 1 and name != next(iter(configs)):
                continue
            what = f"{name}, {weights}{', V-norm' if v_norm else ''}, {groups} x {GROUP} x {tokens}"
            yield from attention_rows(setting, what, config, (weights, v_norm, groups, tokens))


def attention_rows(
    setting: Setting, what: str, config: Any, case: tuple[str, bool, int, int]
) -> Iterator[Row]:
    weights, v_norm, groups, tokens = case
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size // heads
    generator = torch.Generator().manual_seed(0)
    chunks = GROUP * groups
    inputs = [
        torch.randn(n, chunks * tokens, width, generator=generator).to(setting.device)
        for n in (heads, shared, shared)
    ]
    direction = torch.randn(heads, chunks * tokens, width, generator=generator).to(setting.device)
    cosines = torch.randn(groups, GROUP, GROUP, generator=generator)
    scale = 1.0 if weights == "all pairs" else 50.0  # standard scores at tau 1; tau 1e-4
    diagonal = torch.eye(GROUP, dtype=torch.bool)
    blocks = (scale * cosines).masked_fill(diagonal, -torch.inf).softmax(-1)
    weights_BB = torch.block_diag(*blocks).to(setting.device)  # type: ignore[no-untyped-call]
    epsilon = 1e-4 if weights == "all pairs" else 0.0

    def run(kernel: Any, dtype: torch.dtype, rounded_to: torch.dtype) -> list[Tensor]:
        given = [t.to(rounded_to).to(dtype).requires_grad_() for t in inputs]
        given.append(weights_BB.clone().requires_grad_())
        documents = DocumentWeights(given[3], [tokens] * chunks, epsilon=epsilon)
        if kernel == REFERENCE:
            norm_eps = V_NORM_EPS if v_norm else None
            output = reference_attention(*given[:3], documents, width**-0.5, norm_eps)
        else:
            output = document_attention(*given[:3], documents, v_norm=v_norm, kernel=kernel)
        return [output.detach(), *torch.autograd.grad(output, given, direction.to(output.dtype))]

    half = torch.bfloat16
    references = {
        dtype: run(REFERENCE, torch.float32, rounded_to=dtype) for dtype in (torch.float32, half)
    }
    forms: list[tuple[str, Any]] = [("torch", torch.float32), ("torch", half), (REFERENCE, half)]
    if setting.is_gpu:
        forms += [("varlen", half)]
    for kernel, dtype in forms:
        precision = "bf16" if dtype == half else "fp32"
        row = attempt(
            f"attention, {what}",
            lambda kernel=kernel, dtype=dtype: {
                **error_of(run(kernel, dtype, dtype), references[dtype]),
                "seconds": median_seconds(lambda: run(kernel, dtype, dtype), setting, 3),
            },
        )
        tolerance = 1e-2 if dtype == half else 2e-5
        yield {**row, "form": f"{kernel}, {precision}", "tolerance": tolerance}


def error_of(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Row:
    """The greatest relative error (by norm) of outputs and gradients."""
    pairs = zip(found, wanted, strict=True)
    return {"error": max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)}


def median_seconds(run: Callable[[], Any], setting: Setting, repeats: int) -> float:
    """The median of some runs, after one that has warmed up."""
    return statistics.median(steps.timed(run, setting.device) for _ in range(repeats))


# Stage 2


def step(setting: Setting) -> Iterator[Row]:
    """Training steps at the sizes of the papers, with random weights."""
    if setting.tiny:
        configs = {"tiny": small_config()}
        yield from step_cells(
            setting, configs, "tiny", "revela-gated", {1: [steps.OURS, steps.BOUND]}
        )
        yield from step_cells(
            setting, configs, "tiny", "revela-paper", {2: [steps.OURS, steps.BOUND]}, full=True
        )
        yield from trained_cells(setting, small_config())
        return
    configs = steps.configurations()
    ours, varlen, bound = steps.FORMS
    presets = ("revela-gated", "revela-paper")
    few = {1: [varlen, bound], 8: [varlen, bound]}
    for name, preset in product(("0.5B/135M", "1B"), presets):
        yield from step_cells(setting, configs, name, preset, few)
    yield from trained_cells(setting, configs["135M"])
    yield from step_cells(setting, configs, "135M", "revela-paper", {8: [varlen, bound]}, full=True)
    for preset in presets:
        forms = {1: [ours, varlen, bound], 8: [varlen, bound], 32: [varlen, bound]}
        yield from step_cells(setting, configs, "135M", preset, forms)


def step_cells(
    setting: Setting,
    configs: dict[str, Any],
    name: str,
    preset: str,
    forms: dict[int, list[str]],
    full: bool = False,
) -> Iterator[Row]:
    """A preset's step at some numbers of groups a pass, each in some forms."""
    reader, _, lm = name.rpartition("/")
    tokens = 6 if setting.tiny else TOKENS
    what = f"step, {preset}{', all weights' if full else ''}, {name}"
    if setting.left < 0:
        return
    try:
        models = steps.build(
            configs[lm], preset, setting.device, reader=configs.get(reader), full=full
        )
        flops = steps.flops_of_a_group(models, tokens)
    except Exception as error:  # of memory, say; the other cells follow
        yield {"what": what, "note": first_line(error)}
        return
    for groups, wanted in forms.items():
        if setting.left < 0:
            return
        features = steps.batch(models, groups, tokens)
        cell = f"{what}, {groups} x {models.group_size} x {tokens} tokens"
        repeats = 2 if groups < 32 else 1
        for row in steps.step_rows(cell, models, features, repeats, wanted, flops):
            yield {**row, "groups": groups, "flops_of_a_group": flops}
        if setting.is_gpu and name == "135M" and groups == 8:
            yield attempt(f"profile of {cell}", partial(profile, models, features, wanted[0]))
    del models
    torch.cuda.empty_cache()


def profile(models: steps.Models, features: steps.Features, form: str) -> Row:
    """Where the time of a step goes: kernels by their milliseconds, and the share of the step in
    which no kernel runs.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    run = models.step(form)
    run(features).backward()  # warm
    models.drop_gradients()
    seconds = steps.timed(lambda: run(features).backward(), models.device)
    models.drop_gradients()
    with profiled(activities=[ProfilerActivity.CUDA]) as found:
        run(features).backward()
        torch.cuda.synchronize()
    models.drop_gradients()
    events = [e for e in found.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in events) / 1e6
    about = {"seconds": seconds, "idle": max(0.0, 1 - busy / seconds)}
    about["launches"] = sum(event.count for event in events)
    largest = [[e.key[:160], round(e.self_device_time_total / 1e3, 2)] for e in events[:15]]
    return {**about, "form": form, "kernels": largest}


def trained_cells(setting: Setting, config: Any) -> Iterator[Row]:
    """Tokens per second of whole training runs of DREAM, CDE and random crops."""
    documents = made_up_documents(80 if setting.tiny else 3000)
    model = random_model(setting.work / "135M", config)
    size = 8 if setting.tiny else 16
    for preset in ("dream", "cde", "contrastive-crop"):
        recipe = small_recipe(preset, model).replace(group_size=size)
        count = 4 if setting.tiny else 20
        recipe = recipe.replace(max_steps=count, log_every=count // 2)
        if not setting.tiny:
            recipe = recipe.replace(lora_rank=64, layers=6, chunk_words=96, lm_tokens=156)
        yield attempt(
            f"training, {preset}", partial(trained_cell, setting, recipe, documents, preset)
        )


def trained_cell(
    setting: Setting, recipe: Recipe, documents: Sequence[Document], preset: str
) -> Row:
    out = setting.work / f"run-{preset}"
    train(recipe, documents, out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    first, last = [row for row in rows if "loss" in row][-2:]
    steps_between, minutes = last["step"] - first["step"], last["minutes"] - first["minutes"]
    shutil.rmtree(out)
    return {
        "tokens_per_second": last["tokens_per_second"],
        "seconds": 60 * minutes / steps_between,
        "loss": last["loss"],
    }


# Stage 3


def encode(setting: Setting) -> Iterator[Row]:
    """Passages per second."""
    words, count = (12, 60) if setting.tiny else (120, 4_000)
    rng = random.Random(1)
    vocabulary = sorted({word for d in made_up_documents(80) for word in d.text.split()})
    texts = [" ".join(rng.choices(vocabulary, k=words)) for _ in range(count)]
    for name, make in {"MiniLM's shape": minilm, "six layers of 135M": six_layers}.items():
        yield attempt(f"encode, {name}", partial(encode_cell, make, setting, texts))


def encode_cell(make: Callable[[Setting], Retriever], setting: Setting, texts: list[str]) -> Row:
    retriever = make(setting)
    retriever.encode_passages(texts[: len(texts) // 10])
    start = time.perf_counter()
    vectors = retriever.encode_passages(texts)
    seconds = time.perf_counter() - start
    return {"passages_per_second": len(vectors) / seconds, "words": len(texts[0].split())}


def minilm(setting: Setting) -> Retriever:
    """A retriever of the shape of all-MiniLM-L6-v2, with random weights."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from transformers import BertConfig, BertModel

    folder, out = setting.work / "bert", setting.work / "minilm"
    sizes = dict(hidden_size=384, intermediate_size=1536, num_attention_heads=12)
    sizes |= dict(num_hidden_layers=1 if setting.tiny else 6)
    BertModel(BertConfig(vocab_size=30522, **sizes)).save_pretrained(folder)
    made.tokenizer(folder)
    transformer = modules.Transformer(str(folder), max_seq_length=512)
    pooling = modules.Pooling(384, pooling_mode="mean")
    SentenceTransformer(modules=[transformer, pooling, modules.Normalize()]).save(str(out))
    return Retriever(out)


def six_layers(setting: Setting) -> Retriever:
    """A retriever of the lower six layers of SmolLM2-135M's shape, fitted."""
    config = small_config() if setting.tiny else steps.configurations()["135M"]
    model = random_model(setting.work / "lm", config)
    file = setting.work / "corpus.jsonl"
    made.write_corpus(file)
    layers = 2 if setting.tiny else 6
    return Retriever.fit(file, setting.work / "six", model=str(model), layers=layers)


# Stage 4


def rows(setting: Setting) -> Iterator[Row]:
    """The rows of research.benchmarks.from_raw, from raw weights and from the fit, at the same
    time; those that end in time have their scores.
    """
    if setting.tiny:
        texts = made_up_texts(setting.work)
        recipe = setting.work / "tiny.toml"
        recipe.write_text(TINY_RECIPE.format(random_model(setting.work / "tiny", small_config())))
        plans = {recipe: ([MADE_UP], ["0"], 1)}
    else:
        texts, cores = setting.home / TEXTS, available_cores()
        raw, fit = (from_raw.RECIPE.with_name(f"from-{name}.toml") for name in ("raw", "fit"))
        at_once = max(1, cores // 2)  # of each recipe
        plans = {
            raw: ([*from_raw.JUDGED], ["0", "1"], at_once),
            fit: ([*COLLECTIONS], ["0"], at_once),
        }
    results = setting.home / ROWS
    running = []
    for recipe, (judged, seeds, together) in plans.items():
        words = ["--text", texts / TEXT, "--data", texts, "--recipe", recipe, "--judged", *judged]
        words += ["--seeds", *seeds, "--at-once", together, "--threads", 1]
        words += ["--runs", setting.home / "runs" / recipe.stem, "--results", results]
        command = [sys.executable, "-m", "research.benchmarks.from_raw", *map(str, words)]
        running.append(subprocess.Popen(command, start_new_session=True))
    try:
        for child in running:
            child.wait(max(0.0, setting.left))
    except subprocess.TimeoutExpired:
        for child in running:
            os.killpg(child.pid, signal.SIGINT)  # which reaches the runs through their parents
    for recipe, child in zip(plans, running, strict=True):
        if child.poll():
            yield {"what": recipe.stem, "note": f"ended with {child.returncode}"}
        for line in read_table(results / f"{recipe.stem}.csv"):
            yield {"what": f"{recipe.stem}, {line.pop('row')}", **line}


# What stages share


def small_config() -> Any:
    """A language model of 4 layers whose heads flash attention can compute."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip


def made_up_documents(count: int) -> list[Document]:
    """Documents that each keep to one topic's words, so that chunks of one are alike."""
    return [Document(str(r["_id"]), str(r["text"]), str(r["title"])) for r in made.rows(count)]


def made_up_texts(folder: Path) -> Path:
    """A text, and a collection whose documents are found by three of their words."""
    short = [document.text for document in made_up_documents(160)]
    texts = [" ".join(short[i : i + 4]) for i in range(0, len(short), 4)]
    ids = [*map(str, range(len(texts)))]
    queries = [" ".join(text.split()[:3]) for text in texts]
    qrels = {name: {name: 1} for name in ids}
    collection = Collection(MADE_UP, ids, texts, ids, queries, qrels)
    save_collection(collection, folder / MADE_UP)
    with gzip.open(folder / TEXT, "wt") as lines:
        lines.writelines(f"{json.dumps({'text': text})}\n" for text in texts)
    return folder


def random_model(folder: Path, config: Any) -> Path:
    """The folder of a causal LM with random weights, and a tokenizer of made-up text."""
    from transformers import AutoModelForCausalLM

    if not folder.is_dir():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        made.tokenizer(folder)
    return folder


def attempt(what: str, run: Callable[[], Row]) -> Row:
    """A row; with the reason, in place of numbers, if it fails."""
    began = time.monotonic()
    try:
        found = run()
        return {"what": what, "seconds": round(time.monotonic() - began, 2), **found}
    except Exception as error:  # whatever it is, the other rows follow
        return {"what": what, "note": first_line(error)}


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


STAGES: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "smoke": smoke,
    "attention": attention,
    "step": step,
    "encode": encode,
    "rows": rows,
}


def main(given: Sequence[str] | None = None) -> None:
    parser: ArgumentParser = parser_of(__doc__)
    add = parser.add_argument
    add("stage", choices=STAGES)
    add("--out", type=Path, required=True, help="JSON file")
    add("--home", type=Path, default=Path(), help="where the parts were unpacked")
    add("--seconds", type=float, default=60.0)
    add("--tiny", action="store_true")
    a = parser.parse_args(given)
    silence_libraries()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if a.tiny:
        torch.set_num_threads(1)
    record: Row = {"stage": a.stage, "device": device_name(device), "torch": torch.__version__}
    record |= {"tiny": a.tiny, "finished": False, "rows": []}
    with tempfile.TemporaryDirectory() as work:
        setting = Setting(device, a.home, Path(work), a.seconds, a.tiny)
        for row in STAGES[a.stage](setting):
            record["rows"].append(row)
            record["seconds"] = round(time.monotonic() - setting.began, 1)
            write(record, a.out)
            print_row(row)
        record["finished"] = True
        write(record, a.out)


def write(record: Row, out: Path) -> None:
    with atomic_write(out) as temporary:
        temporary.write_text(json.dumps(record, indent=1))


def print_row(row: Row) -> None:
    numbers = (f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float | int))
    form = f" ({row['form']})" if "form" in row else ""
    print(f"{row['what']}{form}: {row.get('note') or ', '.join(numbers)}", flush=True)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    main()
