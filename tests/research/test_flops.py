"""The count of arithmetic, against what PyTorch counts while a step of a tiny model runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conftest import tiny_config
from research.benchmarks import flops, forms, gpu

CPU = torch.device("cpu")
GROUPS, CHUNKS, TOKENS = 2, 4, 12


class NoTracker:
    """In place of the counter's tracker of modules, which does not stand a torch.autograd.grad
    inside a step.
    """

    parents = frozenset({"Global"})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def counted(models, form, features):
    forms.one_step(
        models, form, features
    )  # the first tries out whether the retriever can be packed
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = NoTracker()
    with counter:
        forms.one_step(models, form, features)
    return counter.get_total_flops()


@pytest.fixture(params=["gated", "paper"])
def case(request, monkeypatch):
    monkeypatch.setattr(gpu, "has_fast_bf16", lambda _: False)
    torch.manual_seed(0)
    models = gpu.build(tiny_config("llama"), request.param, CPU)
    models.group_size = CHUNKS
    features = gpu.batch(models, GROUPS, TOKENS)
    trained = models.recipe.objective.lm_lora
    lengths = [TOKENS] * (GROUPS * CHUNKS)
    layers = [i for i in range(4) if models.gates_LH is None or models.gates_LH[i].any()]
    lm = flops.Shape.of(
        models.inner.config, rank=models.recipe.retriever.lora_rank if trained else 0
    )
    retriever = flops.Shape.of(
        models.inner.config, models.recipe.retriever.layers, models.recipe.retriever.lora_rank
    )
    # On the CPU the scores of short texts are written out: all of them, not those below the
    # diagonal.
    plain = flops.retriever_flops(
        retriever, [*[TOKENS // 2] * len(lengths), *lengths], causal=False
    )
    plain += flops.lm_flops(lm, lengths, layers, trained, causal=False)
    return models, features, lm, plain


def test_the_bound_is_what_pytorch_counts(case):
    models, features, lm, plain = case
    # Frozen, the bound's backward goes on to the input of the first mixed layer; ours ends at the
    # output of its attention.
    tokens, cells = GROUPS * CHUNKS * TOKENS, GROUPS * CHUNKS * TOKENS**2
    past = (
        0
        if models.recipe.objective.lm_lora
        else lm.layer_back(tokens, cells) - lm.linear_back(lm._rest, tokens)
    )
    assert past < 0.01 * plain
    assert counted(models, forms.BOUND, features) == pytest.approx(plain + past, rel=1e-9)


def test_ours_is_what_pytorch_counts(case):
    models, features, lm, plain = case
    cells = gpu.heavy_pairs(models, features) * TOKENS**2
    heads = {
        i: 4 if models.gates_LH is None else int(models.gates_LH[i].count_nonzero())
        for i in range(4)
    }
    heads = {i: n for i, n in heads.items() if n}
    documents = flops.document_flops(lm, heads, cells, models.recipe.objective.lm_lora)
    # Computed, not counted: the forward of document attention once more in the backward pass; Sim;
    # the norm as one more column of V.
    again = lm.attention(cells) / lm.heads * sum(heads.values())
    assert documents > 0
    assert counted(models, forms.OURS, features) == pytest.approx(
        plain + documents + again, rel=5e-4
    )


def test_causal_attention_counts_half_and_its_diagonal():
    shape = flops.Shape.of(tiny_config("llama"))
    full, half = (shape.attention(flops.cells_of([10, 4], causal)) for causal in (False, True))
    assert full == 4 * 4 * 8 * (100 + 16) and half == 4 * 4 * 8 * (55 + 10)


def test_shapes_are_those_of_the_models_they_are_named_after():
    names = {"135M": 135e6, "0.5B": 494e6, "1B": 1236e6}
    for name, config in gpu.configurations().items():
        shape = flops.Shape.of(config)
        weights = (
            shape.layers * shape.linear([shape._asked, *shape._read, *shape._rest], 1) / 2
            + shape.vocabulary * shape.width
        )
        assert weights == pytest.approx(names[name], rel=0.01)
    assert flops.Shape.of(gpu.configurations()["135M"], layers=6).layers == 6


def test_known_devices_have_the_peak_of_their_data_sheet(monkeypatch):
    monkeypatch.setattr(flops, "product_flops", lambda _: 1.0)
    for name, peak in (
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 1.0),
        ("Some GPU", 1.0),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert flops.peak_flops(torch.device("cuda", 0))[0] == peak


def test_a_product_has_a_rate():
    assert 1e6 < flops.product_flops(CPU, size=64, repeats=2) < 1e15
