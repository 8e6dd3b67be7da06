"""The GPU benchmark on the CPU with tiny models; its kernels compile for a GPU without one."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from conftest import tiny_config
from research.benchmarks import forms, gpu
from revela.lm.document_attention import document_attention
from revela.lm.document_weights import DocumentWeights

CPU = torch.device("cpu")
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(gpu, "has_fast_bf16", lambda _: False)
    monkeypatch.setattr(gpu, "BLOCKS", [10, 23])
    monkeypatch.setattr(gpu, "peak_flops", lambda _: (1e12, "a test"))
    return lambda *flags: arguments(
        "--gpu-models", "tiny", "--gpu-tokens", "6", "--gpu-repeats", "1", *flags
    )


def arguments(*flags):
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    return parser.parse_args(flags)


@NEEDS_TRITON
@pytest.mark.parametrize("preset", ["gated", "paper"])
def test_a_cell_has_all_its_numbers_and_both_kernels_the_same_loss(tiny, preset):
    models = gpu.build(tiny_config("qwen2"), preset, CPU)
    models.group_size = 2
    rows = list(gpu.step_rows("tiny", preset, models, 2, 6, 1, gpu.FORMS, 1e12))
    assert [r["form"] for r in rows] == gpu.FORMS and not any("note" in r for r in rows)
    ours, triton, bound = rows
    assert ours["loss"] == pytest.approx(triton["loss"], abs=1e-4)
    assert bound["to_bound"] == 1 and ours["to_bound"] > 0
    for row in rows:
        assert (
            row["tokens_per_second"] == pytest.approx(2 * 2 * 6 / row["seconds"])
            and 0 < row["mfu"] < 1
        )
    assert ours["mfu"] < ours["mfu_with_documents"] and 0 < ours["documents_share"] < 1
    assert json.loads(json.dumps(rows)) == rows


def test_every_cell_gets_a_row_and_none_begins_past_the_time(tiny):
    configs = {"tiny": tiny_config("llama")}
    flags = tiny("--gpu-presets", "gated", "--gpu-groups", "1", "2", "--gpu-forms", "ours", "bound")
    rows = list(gpu.rows(flags, configs, CPU))
    assert rows[0]["tflops"] > 0
    assert [(r["groups"], r["form"]) for r in rows if "groups" in r] == [
        (1, "ours"),
        (1, "bound"),
        (2, "ours"),
        (2, "bound"),
    ]
    assert [r["form"] for r in rows if "loss," in r["what"]] == [
        "blocks of 2^10 logits",
        "blocks of 2^23 logits",
        "all logits at once",
    ]
    assert configs["tiny"]._attn_implementation != "revela"  # one shape serves several presets
    flags.gpu_minutes = 0
    assert all("left out" in r["note"] for r in list(gpu.rows(flags, configs, CPU))[1:])


def test_a_form_that_fails_says_so_and_the_others_go_on(tiny, monkeypatch):
    models = gpu.build(tiny_config("llama"), "gated", CPU)
    models.group_size = 3
    true_step = forms.Models.step

    def step(self, form):
        if form == forms.TRITON:
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines.")
        return true_step(self, form)

    monkeypatch.setattr(forms.Models, "step", step)
    ours, triton, bound = gpu.step_rows("tiny", "gated", models, 1, 6, 1, gpu.FORMS, 1e12)
    assert (
        triton["note"] == "OutOfMemoryError: CUDA out of memory."
        and "seconds" in ours
        and "seconds" in bound
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do():
    with pytest.raises(SystemExit, match="leave gpu out of --what"):
        gpu.the_gpu()


def test_rows_are_written_as_they_come_behind_those_of_the_cpu(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(
        gpu, "rows", lambda *_: iter([{"what": "a", "form": "b"}, {"what": "c", "form": "d"}])
    )
    gpu.run(tiny(), CPU, [{"what": "steps", "form": "ours"}], tmp_path / "rows.json")
    assert [row["what"] for row in json.loads((tmp_path / "rows.json").read_text())] == [
        "steps",
        "a",
        "c",
    ]


def test_times_are_taken_in_turn_and_the_first_turn_does_not_count():
    order, seconds = [], iter(range(100))
    runs = {name: lambda name=name: (order.append(name), float(next(seconds)))[1] for name in "ab"}
    assert forms.in_turn(runs, 2) == {"a": [2.0, 4.0], "b": [3.0, 5.0]}
    assert "".join(order) == "ababab"
    assert [len(t) for t in forms.in_turn(runs, 5, limit=0).values()] == [1, 1]


def inputs(device, dtype, width=64, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(n, 106, width, generator=generator).to(device, dtype) for n in (4, 2, 2)
    )
    weights = torch.tensor([[0, 0.3, 0.7], [0.6, 0, 0.4], [1, 0, 0]]).to(device)
    return [t.requires_grad_(requires_grad) for t in (query, key, value, weights)]


def agree(device, dtype, v_norm, tolerance):
    """Output and gradients of both kernels, by the norm of their difference."""
    tensors, found = inputs(device, dtype), []
    documents = DocumentWeights(tensors[3], [70, 3, 33], epsilon=1e-4)
    for kernel in ("torch", "triton"):
        mixed = document_attention(*tensors[:3], documents, v_norm=v_norm, kernel=kernel)
        found.append([mixed.detach(), *torch.autograd.grad(mixed.float().square().sum(), tensors)])
    for a, b in zip(*found, strict=True):
        assert (
            a.dtype == b.dtype and (a.double() - b.double()).norm() <= tolerance * a.double().norm()
        )


@NEEDS_TRITON
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
@pytest.mark.parametrize("v_norm", [False, True])
def test_in_half_precision_the_kernels_agree(v_norm):
    agree(CPU, torch.float16, v_norm, 5e-3)  # Triton's interpreter does not know bf16


@NEEDS_GPU
@pytest.mark.parametrize("v_norm", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_on_a_gpu_the_kernels_agree(dtype, tolerance, v_norm):
    agree(torch.device("cuda"), dtype, v_norm, tolerance)


COMPILE = """
import sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from revela.lm import document_attention_triton as kernels

width, kind, bytes_each, *capabilities = sys.argv[1:]
wide = int(width)
rows, keys = kernels.block_sizes(wide, int(bytes_each))
sizes = dict(SHARED=3, WIDTH=wide, WIDE=wide, ROWS=rows, KEYS=keys, V_NORM=True, EXACT=tl.float32)
indices = "owner_pointer", "bound_pointer", "slot_pointer"
indices = *indices, "block_document_pointer", "block_start_pointer"
for kernel in (kernels._forward, kernels._backward_rows, kernels._backward_keys):
    types = {}
    for name in kernel.arg_names:
        if name in sizes:
            types[name] = "constexpr"
        elif name in indices:
            types[name] = "*i64"
        elif name.endswith("_pointer"):
            exact = "weight" in name or name == "saved_pointer"
            types[name] = "*fp32" if exact else f"*{kind}"
        else:
            types[name] = "i32" if name.startswith("n_") else "fp32"
    values = {(kernel.arg_names.index(name),): value for name, value in sizes.items()}
    for capability in map(int, capabilities):
        source = ASTSource(kernel, signature=types, constexprs=values)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        print(kernel.fn.__name__, capability, made.metadata.shared)
"""
# KiB of shared memory that a program may have on an A100, an RTX 3090, an RTX 4090 and a Hopper.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227}


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("width", "kind", "capabilities"),
    [
        (64, "bf16", [80, 90]),
        (128, "bf16", [86]),
        (256, "bf16", [89]),
        (64, "fp32", [86]),
    ],
)
def test_the_kernels_compile_for_each_width_and_fit_the_shared_memory(
    tmp_path, width, kind, capabilities
):
    arguments = width, kind, {"bf16": 2, "fp32": 4}[kind], *capabilities
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path)
    }
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    made = [line.split() for line in run.stdout.splitlines()]
    assert len(made) == 3 * len(capabilities)
    for kernel, capability, shared in made:
        assert int(shared) <= SHARED[int(capability)] * 1024, kernel
