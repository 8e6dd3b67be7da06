"""The kernels for a GPU agree with torch; Triton's compile for a GPU without one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from conftest import tiny_config
from research.benchmarks import steps
from revela.lm import document_attention_varlen
from revela.lm.document_attention import document_attention
from revela.lm.document_weights import DocumentWeights
from tests.naive import attention_by_sdpa

CPU = torch.device("cpu")
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@NEEDS_TRITON
@pytest.mark.parametrize("preset", ["gated", "paper"])
def test_a_step_has_all_its_numbers_and_all_kernels_the_same_loss(monkeypatch, preset):
    monkeypatch.setattr(steps, "has_fast_bf16", lambda _: False)
    monkeypatch.setattr(document_attention_varlen, "attend_pairs", attention_by_sdpa)
    models = steps.build(tiny_config("qwen2"), preset, CPU)
    models.group_size = 2
    ours, varlen, triton, bound = rows = list(
        steps.step_rows("tiny", models, steps.batch(models, 2, 6), repeats=1)
    )
    assert [r["form"] for r in rows] == steps.FORMS and not any("note" in r for r in rows)
    assert ours["loss"] == pytest.approx(triton["loss"], abs=1e-4)
    assert ours["loss"] == pytest.approx(varlen["loss"], abs=1e-4)
    assert bound["to_bound"] == 1 and ours["to_bound"] > 0
    assert all(r["tokens_per_second"] == pytest.approx(24 / r["seconds"]) for r in rows)


def inputs(device, dtype, width=64, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(n, 106, width, generator=generator).to(device, dtype) for n in (4, 2, 2)
    )
    weights = torch.tensor([[0, 0.3, 0.7], [0.6, 0, 0.4], [1, 0, 0]]).to(device)
    return [t.requires_grad_(requires_grad) for t in (query, key, value, weights)]


def agree(device, dtype, v_norm, tolerance, other="triton"):
    """Output and gradients of both kernels, by the norm of their difference."""
    tensors, found = inputs(device, dtype), []
    documents = DocumentWeights(tensors[3], [70, 3, 33], epsilon=1e-4)
    for kernel in ("torch", other):
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
def test_on_a_gpu_flash_attention_agrees(v_norm):
    agree(torch.device("cuda"), torch.bfloat16, v_norm, 3e-2, "varlen")


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
from revela.lm.triton import document_attention as kernels

indices = "owner_pointer", "bound_pointer", "slot_pointer"
indices = *indices, "block_document_pointer", "block_start_pointer"
for width, kind, capability in (case.split() for case in sys.argv[1:]):
    wide, bits = int(width), int(kind.removeprefix("bf").removeprefix("fp"))
    rows, keys = kernels.block_sizes(wide, bits // 8)
    sizes = dict(SHARED=3, WIDTH=wide, WIDE=wide, ROWS=rows, KEYS=keys, V_NORM=True)
    sizes["EXACT"] = tl.float32
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
        source = ASTSource(kernel, signature=types, constexprs=values)
        made = triton.compile(source, target=GPUTarget("cuda", int(capability), 32))
        print(kernel.fn.__name__, capability, made.metadata.shared)
"""
# KiB of shared memory that a program may have on an RTX 3090, an RTX 4090 and a Hopper.
SHARED = {86: 99, 89: 99, 90: 227}


@NEEDS_TRITON
def test_the_kernels_compile_for_each_width_and_fit_the_shared_memory(tmp_path):
    cases = "64 fp32 86", "128 bf16 90", "256 bf16 89"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path)
    }
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, *cases],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    made = [line.split() for line in run.stdout.splitlines()]
    assert len(made) == 3 * len(cases)
    for kernel, capability, shared in made:
        assert int(shared) <= SHARED[int(capability)] * 1024, kernel
