"""Both streams of each model family against plain ones, in fp64, with all gradients."""

from __future__ import annotations

import re
import shutil
import types

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
)

import naive
from conftest import SHARED, Embed, tiny_config
from revela.errors import RevelaError
from revela.training.lm import language_model
from revela.training.lm.document_attention import V_NORM_EPS, DocumentWeights, InBatchAttention
from revela.training.lm.language_model import LanguageModel, load_language_model
from revela.training.methods.revela import RevelaLoss
from revela.training.models import open_causal_lm

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt_neox"]
LENGTHS = [5, 3, 4]


def batch(vocabulary: int = 400):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (3, 5), generator=generator)
    mask = torch.tensor([[1] * n + [0] * (5 - n) for n in LENGTHS])
    weights = torch.tensor([[0, 0.7, 0.3], [0.4, 0, 0.6], [0.1, 0.9, 0]], dtype=torch.float64)
    return ids, mask, weights


def build(kind: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).double().eval()
    for module in model.modules():
        # transformers' RMSNorm rounds to fp32, which would hide differences below 1e-8.
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_exact_norm, module)
    return model


def _exact_norm(self, x):
    gemma = "Gemma" in type(self).__name__
    eps = self.eps if gemma else self.variance_epsilon
    weight = 1 + self.weight if gemma else self.weight
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


class NaiveRun:
    """The two streams by their definition: the model runs twice, one document at a time."""

    def __init__(self, mix):
        self.mix, self.memory, self.mode = mix, {}, "e"

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        lengths = [int(n) for n in self.lengths]
        own = naive.own_attention(query[0], key[0], value[0], lengths, scaling)
        layer = module.layer_idx
        if self.mode == "e":
            self.memory[layer] = (key[0], value[0])
        else:
            own = self.mix(layer, own, query[0], *self.memory[layer], scaling, lengths)
        return own.transpose(0, 1)[None], None


def naive_loss(model, ids, mask, mix):
    run = NaiveRun(mix)
    run.lengths = mask.sum(1).tolist()
    AttentionInterface.register("naive", run)
    AttentionMaskInterface.register("naive", lambda *a, **k: None)
    model.set_attn_implementation("naive")
    packed = ids[mask.bool()][None]
    positions = torch.cat([torch.arange(n) for n in run.lengths])[None]
    model(input_ids=packed, position_ids=positions, use_cache=False)
    run.mode = "h"
    logits = model(input_ids=packed, position_ids=positions, use_cache=False).logits[0]
    losses, start = [], 0
    for n in run.lengths:
        for t in range(start, start + n - 1):
            losses.append(-logits[t].log_softmax(-1)[packed[0, t + 1]])
        start += n
    return torch.stack(losses).mean(), logits


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("form", ["paper", "gated"])
def test_both_streams_equal_the_naive_loop(kind, form):
    ids, mask, weights = batch()
    gates = None
    if form == "gated":
        gates = torch.zeros(4, 4, dtype=torch.float64)
        # One head of a layer, all heads of another, none in the first and the last layer.
        gates[1, 2], gates[2, :] = 0.3, 0.5

    def mix(layer, own, query, key, value, scale, lengths):
        documents = DocumentWeights(naive_weights, lengths)
        norm_eps = V_NORM_EPS if form == "paper" else None
        cross = naive.reference_attention(query, key, value, documents, scale, norm_eps)
        if gates is None:
            return own + cross
        g = gates[layer][:, None, None]
        return (1 - g) * own + g * cross

    slow_model, fast_model = build(kind), build(kind)
    naive_weights = weights.clone().requires_grad_()
    slow, slow_logits = naive_loss(slow_model, ids, mask, mix)
    slow.backward()

    lm = LanguageModel(fast_model)
    fast_weights = weights.clone().requires_grad_()
    packed = lm.pack(ids, mask)
    heads = None if gates is None else {1: [2], 2: [0, 1, 2, 3]}
    layers = range(4) if heads is None else list(heads)
    mixer = InBatchAttention(fast_weights, packed.lengths, gates, heads, v_norm=form == "paper")
    logits = lm.logits(packed, lm.prefill(packed, layers), mixer)
    torch.testing.assert_close(logits, slow_logits, atol=1e-10, rtol=0)
    fast = lm.loss(packed, lm.prefill(packed, layers), mixer)
    fast.backward()
    torch.testing.assert_close(fast, slow, atol=1e-10, rtol=0)
    torch.testing.assert_close(fast_weights.grad, naive_weights.grad, atol=1e-10, rtol=0)
    pairs = zip(fast_model.named_parameters(), slow_model.parameters(), strict=True)
    for (name, got), want in pairs:
        assert (got.grad is None) == (want.grad is None), name
        if got.grad is not None:
            assert torch.allclose(got.grad, want.grad, atol=1e-10, rtol=0), name


@pytest.mark.parametrize("kind", FAMILIES)
def test_padding_on_either_side_changes_nothing_and_the_plain_model_is_transformers_own(kind):
    ids, mask, _ = batch()
    plain = build(kind)
    want = torch.cat([plain(input_ids=ids[i : i + 1, :n]).logits[0] for i, n in enumerate(LENGTHS)])
    lm = LanguageModel(build(kind))
    torch.testing.assert_close(lm.logits(lm.pack(ids, mask)), want, atol=1e-10, rtol=0)
    left_ids = torch.stack([row.roll(5 - n) for row, n in zip(ids, LENGTHS, strict=True)])
    left_mask = mask.flip(1)
    torch.testing.assert_close(lm.logits(lm.pack(left_ids, left_mask)), want, atol=1e-10, rtol=0)


def test_frozen_linear_layers_of_a_trained_lm_are_kept_in_bf16_with_the_same_results(monkeypatch):
    """Bit for bit what autocast gives that casts them in every pass, with a head that is tied."""
    import transformers as t
    from peft import LoraConfig, get_peft_model

    def trained():
        torch.manual_seed(0)
        config = tiny_config("llama")
        config.tie_word_embeddings = True
        lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        return get_peft_model(t.LlamaForCausalLM(config).requires_grad_(False), lora).eval()

    ids, mask, weights = batch()
    found = []
    for kept in (True, False):
        if not kept:
            monkeypatch.setattr(language_model, "_keep_linear_in_bf16", lambda _: None)
        lm = LanguageModel(model := trained(), bf16=True)
        packed = lm.pack(ids, mask)
        mix = InBatchAttention(weights.float(), packed.lengths, None, v_norm=True)
        logits = lm.logits(packed, lm.prefill(packed, range(4)), mix)
        logits.float().square().mean().backward()
        found.append([logits, *(p.grad for p in model.parameters() if p.requires_grad)])
        if kept:
            wide = {
                n.split(".")[-2] for n, p in model.named_parameters() if p.dtype == torch.float32
            }
            norms = {"norm", "input_layernorm", "post_attention_layernorm"}
            assert wide == {"embed_tokens", *norms, "default"}  # the last is LoRA's
            rows = packed.layout.with_next_R
            plain, targets = lm.logits(packed)[rows].float(), packed.ids_1T[0, rows + 1]
            want = torch.nn.functional.cross_entropy(plain, targets, reduction="none")
            torch.testing.assert_close(lm.token_losses(packed, rows), want, atol=1e-6, rtol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.skipif(
    not (SHARED / "golden").is_dir(), reason="the authors' figures (shared/golden) are not here"
)
@pytest.mark.parametrize("form", ["v_norm", "no_v_norm"])
def test_paper_form_equals_the_authors_code(form):
    from safetensors import safe_open
    from transformers import LlamaConfig, LlamaForCausalLM

    with safe_open(SHARED / "golden" / "paper_attention.safetensors", "pt") as file:
        golden = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6,
        rope_theta=10000.0, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    own = "weights."
    model.load_state_dict({k.removeprefix(own): v for k, v in golden.items() if k.startswith(own)})
    lm = LanguageModel(model)
    ids, mask = golden["input_ids"], golden["attention_mask"]
    weights = golden["sim"].clone().requires_grad_()
    packed = lm.pack(ids, mask)
    mixer = InBatchAttention(weights, packed.lengths, None, v_norm=form == "v_norm")
    logits = lm.logits(packed, lm.prefill(packed, range(3)), mixer)
    torch.testing.assert_close(logits, golden[f"{form}.logits"][mask.bool()], atol=1e-5, rtol=0)
    loss = lm.loss(packed, lm.prefill(packed, range(3)), mixer)
    authors = {"v_norm": 5.399142742, "no_v_norm": 5.153196335}
    assert loss.item() == pytest.approx(authors[form], abs=2e-6)
    loss.backward()
    torch.testing.assert_close(weights.grad, golden[f"{form}.grad_sim"], atol=2e-6, rtol=0)
    parameters = dict(model.named_parameters())
    checked = [k for k in golden if k.startswith(f"{form}.grad.")]
    assert checked
    for name in checked:
        gradient = parameters[name.removeprefix(f"{form}.grad.")].grad
        torch.testing.assert_close(gradient, golden[name], atol=5e-6, rtol=0)


def test_unsupported_models_are_refused_by_name():
    import transformers as t

    gemma2 = t.Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    t5 = t.T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    with pytest.raises(RevelaError, match=r"gemma-2.*use a Llama"):
        LanguageModel(AutoModelForCausalLM.from_config(gemma2), "gemma-2")
    with pytest.raises(RevelaError, match=r"encoder-decoder.*use a Llama"):
        LanguageModel(t.T5ForConditionalGeneration(t5), "t5")
    mamba = t.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    with pytest.raises(RevelaError, match=r"AttentionInterface.*use a Llama"):
        LanguageModel(t.MambaForCausalLM(mamba), "mamba")


def test_refuses_gradient_checkpointing_and_bare_calls():
    ids, mask, _ = batch()
    lm = LanguageModel(build("llama"))
    with pytest.raises(RevelaError, match="LanguageModel"):
        lm.model(input_ids=ids)
    lm.model.gradient_checkpointing_enable()
    with pytest.raises(RevelaError, match="gradient checkpointing"):
        lm.prefill(lm.pack(ids, mask), range(4))


def test_the_split_backward_equals_the_joined_one():
    """d loss / d Sim first and the retriever's backward pass after: the gradient of the whole."""
    ids, mask, _ = batch()
    features, gradients = {"input_ids": ids, "attention_mask": mask}, []
    for frozen in (False, True):
        lm = LanguageModel(build("llama").float().requires_grad_(not frozen))
        loss_module = loss_module_of(lm)
        loss = loss_module([features] * 3)
        loss.backward()
        gradients.append((loss.detach(), loss_module.model.table.weight.grad))
    for joined, split in zip(*gradients, strict=True):
        assert split.abs().sum() > 0
        torch.testing.assert_close(joined, split, atol=1e-6, rtol=1e-4)


def test_no_layer_runs_whose_output_is_not_read():
    """Stream e ends with the last keys that are read, stream h begins with the first."""
    ids, mask, weights = batch()
    lm = LanguageModel(build("llama").requires_grad_(False))
    packed, begun, ran = lm.pack(ids, mask), [], []
    for i, layer in enumerate(lm.model.model.layers):
        layer.self_attn.register_forward_pre_hook(lambda *_, i=i: begun.append(i))
        layer.mlp.register_forward_hook(lambda *_, i=i: ran.append(i))
    lm.model.lm_head.register_forward_hook(lambda *_: ran.append("head"))
    memory = lm.prefill(packed, [1, 2])
    assert ran == [0, 1] and sorted(memory.keys) == [1, 2]
    begun.clear()
    memory = lm.prefill(packed, [2, 3])
    mix = InBatchAttention(weights, packed.lengths, torch.full((4, 4), 0.3), v_norm=False)
    lm.loss(packed, memory, mix)
    assert begun == [0, 1, 2, 3, 2, 3]
    lm.logits(packed)
    assert begun[6:] == [0, 1, 2, 3]


def test_logits_that_are_not_the_heads_output_are_used_in_the_loss():
    """Cohere scales its logits."""
    import transformers as t

    torch.manual_seed(0)
    config = t.CohereConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, logit_scale=0.25,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = t.CohereForCausalLM(config).eval().requires_grad_(False)
    ids = torch.randint(3, 64, (1, 9))
    want = model(input_ids=ids, labels=ids).loss
    lm = LanguageModel(model)
    torch.testing.assert_close(lm.loss(lm.pack(ids, torch.ones_like(ids))), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_trained_lm_is_saved_with_its_lora_in_fp32(tiny_lm_folder, tmp_path, bf16):
    lm = load_language_model(tiny_lm_folder, bf16=bf16, lora=(2, 4, 0.0))
    for p in filter(lambda p: p.requires_grad, lm.parameters()):
        p.data.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
    lm.save(tmp_path / "lm")
    ids, stock = torch.arange(3, 20)[None], AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    want, start = lm.logits(lm.pack(ids, ids**0)), open_causal_lm(tiny_lm_folder, torch.float32)
    assert stock.dtype == torch.float32 and AutoTokenizer.from_pretrained(tmp_path / "lm")("a")
    close = dict(atol=0.02 if bf16 else 1e-5, rtol=0)
    torch.testing.assert_close(stock(ids).logits[0], want.float(), **close)
    assert (start(ids).logits[0] - want).abs().max() > 0.1


def loss_module_of(lm, model=None, **changes):
    gates_LH = torch.full((4, 4), 0.3)
    return RevelaLoss(model or Embed(), lm, tau=0.1, gates_LH=gates_LH, **changes)


def test_groups_of_a_batch_count_as_if_they_were_read_one_by_one():
    """Whatever their lengths."""
    lm = LanguageModel(build("llama").float().requires_grad_(False))
    ids = torch.randint(3, 400, (6, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * n + [0] * (5 - n) for n in (5, 5, 5, 2, 3, 2)])
    features = {"input_ids": ids, "attention_mask": mask}
    together = loss_module_of(lm, group_size=3)
    loss = together([features] * 3)
    loss.backward()
    separate = loss_module_of(lm)
    groups = slice(0, 3), slice(3, 6)
    losses = [separate([{k: v[g] for k, v in features.items()}] * 3) for g in groups]
    (sum(losses) / 2).backward()
    torch.testing.assert_close(loss, sum(losses) / 2, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        together.model.table.weight.grad, separate.model.table.weight.grad, atol=1e-7, rtol=1e-4
    )


def test_an_lm_without_its_head_is_refused(tiny_lm_folder, refused, corpus_file, tmp_path):
    from revela.training.lm.language_model import check_language_model, load_language_model

    tied, none = tmp_path / "tied", tmp_path / "none"
    model = AutoModelForCausalLM.from_pretrained(tiny_lm_folder)
    shutil.copytree(tiny_lm_folder, none)
    model.model.save_pretrained(none)
    shutil.copytree(tiny_lm_folder, tied)
    model.config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(model.config).save_pretrained(tied)
    check_language_model(tied, "tied")  # a tied head is not missing
    load_language_model(tied, bf16=False)
    message = r"none lacks weights of its model \(lm_head\.weight\): copy or download it again"
    for read in (check_language_model, lambda folder, _: load_language_model(folder, bf16=False)):
        with pytest.raises(RevelaError, match=message):
            read(none, "none")
    given = f"--model={tied}", f"--lm={none}", f"--out={tmp_path / 'out'}"
    said = refused("train", corpus_file, *given)
    assert re.search(message, said) and not (tmp_path / "out").exists()
