"""DREAM: injected rows against A' written out, gradients against one long naive pass, and the
search for its heads.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from conftest import Embed, build_context, frozen_llama, train_by_sgd
from revela.training.lm.language_model import LanguageModel
from revela.training.lm.prompts import ANSWER, QUESTION
from revela.training.methods import dream
from revela.training.methods.dream import PUBLISHED_HEADS, DreamLoss, score_query_heads
from revela.training.recipe import Recipe
from revela.training.settings import Optimizer
from revela.training.step import make_optimizer

DOCUMENTS = [-1, 0, 0, 0, -1, 1, 1, -1, 2, 2, 2, 2, -1]  # of the candidates' text


def texts():
    """One group of three candidates, two questions with answers of different lengths."""
    generator = torch.Generator().manual_seed(3)
    prompt_ids = torch.randint(3, 400, (1, len(DOCUMENTS)), generator=generator)
    prompt = {"input_ids": prompt_ids, "attention_mask": torch.ones_like(prompt_ids)}
    prompt["document"] = torch.tensor([DOCUMENTS])
    tail_ids = torch.randint(3, 400, (2, 7), generator=generator)
    roles = torch.tensor([[QUESTION] * 3 + [ANSWER] * 4, [QUESTION] * 2 + [ANSWER] * 3 + [0] * 2])
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    tail = {"input_ids": tail_ids, "attention_mask": mask, "role": roles}
    tail["group"] = torch.zeros(2, dtype=torch.long)
    return prompt, tail


def naive_answer_loss(model, prompt, tail, weights, gate, heads):
    """The whole text of each question in one stock pass, A' written out in the injected heads; the
    mean over questions of the mean over an answer's tokens.
    """
    losses, current = [], {}

    def attention(module, query, key, value, mask, scaling=None, **_):
        repeats = query.shape[1] // key.shape[1]
        keys, values = (t[0].repeat_interleave(repeats, 0) for t in (key, value))
        length = query.shape[2]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = query[0] @ keys.transpose(1, 2) * scaling
        probabilities = scores.masked_fill(future, -torch.inf).softmax(-1)
        rows = []
        for h in range(query.shape[1]):
            if (module.layer_idx, h) not in heads:
                rows.append(probabilities[h])
                continue
            changed = []
            for t in range(length):
                row = probabilities[h, t]
                if t in current["rows"]:
                    injected = torch.zeros_like(row)
                    for j in range(3):
                        places = range(length)
                        mine = torch.tensor([DOCUMENTS[m : m + 1] == [j] for m in places])
                        share = current["weights"][j] * row / row[mine].sum()
                        injected = injected + torch.where(mine, share, 0.0)
                    row = (1 - gate) * row + gate * injected
                changed.append(row)
            rows.append(torch.stack(changed))
        return (torch.stack(rows) @ values).transpose(0, 1)[None], None

    AttentionInterface.register("written-out", attention)
    AttentionMaskInterface.register("written-out", lambda *a, **k: None)
    model.set_attn_implementation("written-out")
    for i in range(2):
        length = int(tail["attention_mask"][i].sum())
        ids = torch.cat([prompt["input_ids"][0], tail["input_ids"][i, :length]])[None]
        roles = tail["role"][i, :length].tolist()
        start = len(DOCUMENTS)
        asked, answers = (
            [start + t for t, role in enumerate(roles) if role == kind]
            for kind in (QUESTION, ANSWER)
        )
        current.update(weights=weights[i], rows=asked)
        logits = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        losses.append(torch.stack([-logits[t - 1, ids[0, t]] for t in answers]).mean())
    return torch.stack(losses).mean()


def test_the_answers_loss_and_its_gradients_equal_the_naive_pass():
    prompt, tail = texts()
    heads, found = [(1, 2), (1, 0), (3, 1)], []
    key = "model.layers.0.self_attn.k_proj.weight"  # of a judge that learns, too
    for fast in (False, True):
        weights = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25]]).double().requires_grad_()
        logit = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        llama = frozen_llama()
        llama.get_parameter(key).requires_grad_()
        if fast:
            lm = LanguageModel(llama)
            loss_module = DreamLoss(Embed(), lm, heads, tau=0.1, gate=0.5, group_size=3)
            side = {k: v for k, v in tail.items() if k != "group"}
            loss = loss_module.answer_loss(prompt, side, weights, logit)
        else:
            gate = logit.sigmoid()
            loss = naive_answer_loss(llama, prompt, tail, weights, gate, set(heads))
        inputs = weights, logit, llama.get_parameter(key)
        found.append((loss.detach(), *torch.autograd.grad(loss, inputs)))
    for slow, fast in zip(*found, strict=True):
        assert slow.abs().sum() > 0
        # transformers' norms round to fp32
        torch.testing.assert_close(fast, slow, atol=1e-6, rtol=0)


def test_it_learns_and_leaves_groups_without_questions_out():
    prompt, tail = texts()
    twice = {k: torch.cat([v, v]) for k, v in prompt.items()}
    side = {
        "input_ids": torch.randint(3, 400, (6, 4), generator=torch.Generator().manual_seed(5)),
        "attention_mask": torch.ones(6, 4),
    }
    question, found, heads = {k: v[:2] for k, v in side.items()}, [], [(1, 0), (2, 1), (2, 3)]
    for is_trained in (True, False):
        lm = LanguageModel(frozen_llama().float())
        weight = lm.model.get_parameter("model.layers.0.mlp.up_proj.weight")
        weight.requires_grad_(is_trained)
        loss_module = DreamLoss(Embed(), lm, heads, tau=0.3, gate=0.5, group_size=3)
        loss_module([question, side, twice, tail]).backward()
        found.append(loss_module.model.table.weight.grad.clone())
        assert (weight.grad is not None) == is_trained
    torch.testing.assert_close(*found)
    losses = train_by_sgd(loss_module, [question, side, twice, tail], steps=15, rate=0.3)
    assert losses[-1] < losses[0] and 0 < loss_module.gate_logit.sigmoid() < 1
    table = loss_module.model.table.weight.grad
    assert table[side["input_ids"][3:]].abs().sum() == 0  # the second group asks nothing
    assert table[side["input_ids"][:3]].abs().sum() > 0


HEADS = [
    ("meta-llama/Llama-3.1-8B-Instruct@main", "published", 3, PUBLISHED_HEADS[:3]),
    ("meta-llama/Llama-3.1-8B-Instruct", "published", 17, [(4, 5)]),  # not so many
    ("meta-llama/Llama-3.1-8B", "published", 3, [(4, 5)]),
    ("any", "random", 99, None),
    ("any", "random-middle", 99, None),
]


@pytest.mark.parametrize(("name", "heads", "number", "chosen"), HEADS)
def test_heads_are_published_random_or_found(monkeypatch, tmp_path, name, heads, number, chosen):
    lm = SimpleNamespace(name=name, n_layers=32, n_heads=32, max_tokens=None)
    monkeypatch.setattr(dream, "load_lm", lambda *_: (lm, None, tmp_path))
    monkeypatch.setattr(dream, "query_heads", lambda *_: [(4, 5, 1.0)])
    settings = dict(heads=heads, query_heads=number, scalar_rate_factor=100.0)

    def built(seed):
        recipe = Recipe.of("dream-paper", **settings, seed=seed)
        return recipe.method.build(build_context(recipe, Embed(), [], [], False))[0]

    loss = built(0)
    groups = make_optimizer(loss, Optimizer()).param_groups
    rates = [(len(group["params"]), group["times"]) for group in groups]
    assert rates == [(2, 100.0), (1, 1.0)]  # tau and the gate, the retriever
    assert loss.heads == built(0).heads == (chosen or loss.heads)
    if heads.startswith("random"):
        layers = {layer for layer, _ in loss.heads}
        assert len(set(loss.heads)) == 99 and loss.heads != built(1).heads
        assert (min(layers), max(layers)) == ((10, 21) if "middle" in heads else (0, 31))


def planted():
    """Partial rotary attention, a residual stream without noise, and one head whose keys and
    queries are the token itself.
    """
    import transformers as t

    torch.manual_seed(0)
    config = t.GPTNeoXConfig(
        vocab_size=64, hidden_size=64, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, rotary_pct=0.25,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = t.GPTNeoXForCausalLM(config).eval().requires_grad_(False)
    attention = model.gpt_neox.layers[1].attention
    qkv = attention.query_key_value.weight.view(4, 3, 16, 64)
    look = torch.randn(12, 64)
    qkv[2].zero_()
    qkv[2, 0, 4:], qkv[2, 1, 4:] = look, look  # beyond the four rotary numbers
    return LanguageModel(model)


def test_a_planted_retrieval_head_ranks_first():
    generator = torch.Generator().manual_seed(0)
    examples = []
    for _ in range(6):
        candidates = torch.randint(8, 64, (8, 6), generator=generator)
        answer = torch.randint(8, (3,), generator=generator)
        # The last question is "N/A".
        questions = torch.cat([candidates[answer][:, 1:5], torch.full((1, 4), 5)])
        prompt, tail = (
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for ids in (candidates.flatten()[None], questions)
        )
        prompt["document"] = torch.arange(8).repeat_interleave(6)[None]
        tail["role"] = torch.full_like(questions, QUESTION)
        examples.append((prompt, tail, answer))
    ranked = score_query_heads(planted(), examples).flatten().sort(descending=True)
    assert ranked.indices[0] == 1 * 4 + 2 and ranked.values[0] > ranked.values[1] + 0.2
