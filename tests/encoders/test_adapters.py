"""PEFT folders, and published retrievers without modules, open as the models that they are with
their bases; each damaged one is refused in one sentence.
"""

from __future__ import annotations

import json
import os
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers as t
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer

from conftest import tiny_config
from revela import RevelaError
from revela.encoders.load import load_encoder, resolve
from revela.encoders.model_files import name_of
from revela.training.models import open_causal_lm

TEXT = "the ocean00 is wide"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REVELA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "merged"


def adapted(base, folder, kind=t.AutoModelForCausalLM, named=None, **how):
    """Writes a random LoRA for a base, named as ``named``; returns the model merged by hand."""
    torch.manual_seed(1)
    settings = dict(r=2, target_modules="all-linear", init_lora_weights=False)
    model = kind.from_pretrained(base)
    made = get_peft_model(model, LoraConfig(**settings | how))
    made.save_pretrained(folder)
    edit(folder, base_model_name_or_path=str(named or base))
    return made.merge_and_unload().eval()


def edit(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def states(model, tokenizer, text, *more):
    ids = torch.tensor([[*tokenizer(text)["input_ids"], *more]])
    with torch.no_grad():
        return model(ids).last_hidden_state[0]


ADAPTERS = [
    ("Revela-500M", "query:  ", True, 2048, "qwen2", t.AutoModel),
    ("repllama-v1-7b-lora-passage", "query: ", True, 512, "llama", t.AutoModel),
    ("DREAM-0.5B", "", False, 512, "qwen2", t.AutoModelForCausalLM),
]


@pytest.mark.parametrize(("name", "prompt", "adds_eos", "limit", "family", "kind"), ADAPTERS)
def test_published(name, prompt, adds_eos, limit, family, kind, tiny_tokenizer, tmp_path, succeeds):
    model = t.AutoModelForCausalLM.from_config(tiny_config(family, len(tiny_tokenizer)))
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    tokenizer = t.AutoTokenizer.from_pretrained(tmp_path / "base")  # as the family's class reads
    merged = adapted(tmp_path / "base", tmp_path / name, kind).base_model
    made, (out, text) = resolve(str(tmp_path / name)), (tmp_path / "v.parquet", tmp_path / "a.txt")
    text.write_text(TEXT)
    succeeds("encode", text, f"--model={tmp_path / name}", f"--out={out}", "--precision=fp32")
    encoder = load_encoder(made, "fp32")
    found = encoder.encode_queries([TEXT])[0], pq.read_table(out)["vector"][0].as_py()
    for ours, prefix in zip(found, (prompt, prompt.replace("query", "passage")), strict=True):
        more = [tokenizer.eos_token_id] * adds_eos
        last_D = states(merged, tokenizer, prefix + TEXT, *more)[-1].numpy()
        np.testing.assert_allclose(ours, last_D / np.linalg.norm(last_D), atol=1e-5)
    assert (encoder.limit, name_of(made)) == (limit, name)


@pytest.mark.parametrize("place", ["absolute", "relative", "beside", "of an adapter"])
def test_a_language_model(place, tiny_lm_folder, tmp_path, monkeypatch, cache):
    monkeypatch.chdir(tmp_path)
    folder, base, named = tmp_path / "lora", tiny_lm_folder, None
    if place in ("relative", "beside"):
        base = (tmp_path if place == "relative" else folder) / "base"
        shutil.copytree(tiny_lm_folder, base)
        named = "base"
    if place == "of an adapter":
        named, base = tmp_path / "first", tmp_path / "by hand"
        adapted(tiny_lm_folder, named, r=3).save_pretrained(base)
    merged, made = adapted(base, folder, named=named), resolve(str(folder))
    ids_1L = torch.arange(9)[None]
    with torch.no_grad():
        ours = open_causal_lm(made, torch.float32)(ids_1L).logits
        torch.testing.assert_close(ours, merged(ids_1L).logits, atol=1e-5, rtol=0)
    assert t.AutoTokenizer.from_pretrained(made)("ocean")["input_ids"]
    assert resolve(str(folder)) == made
    edit(folder, lora_alpha=99)
    assert resolve(str(folder)) != made and len([*made.parent.glob("[!.]*")]) == 2
    with pytest.raises(RevelaError, match=r"no modules\.json; if it is a language model, make a"):
        load_encoder(made)


def test_a_base_in_bf16_is_merged_in_fp32_and_rounded_once(tiny_lm_folder, tmp_path):
    half = t.AutoModelForCausalLM.from_pretrained(tiny_lm_folder, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "base")
    half.float().save_pretrained(tmp_path / "whole")
    merged = adapted(tmp_path / "whole", tmp_path / "lora", named=tmp_path / "base")
    ours = t.AutoModelForCausalLM.from_pretrained(resolve(str(tmp_path / "lora")), dtype="auto")
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, merged.get_parameter(name).bfloat16()), name


def test_a_base_of_sentence_transformers_keeps_its_modules(tiny_bert_folder, tmp_path):
    merged = SentenceTransformer(str(tiny_bert_folder), device="cpu")
    merged[0].model = adapted(tiny_bert_folder, tmp_path / "lora", t.AutoModel)
    encoder = load_encoder(resolve(str(tmp_path / "lora")), "fp32")
    assert type(encoder).__name__ == "GraphEncoder"
    np.testing.assert_allclose(encoder.encode_passages([TEXT]), merged.encode([TEXT]), atol=1e-5)


WITHOUT_MODULES = [
    ("contriever", True, lambda states_LD: states_LD.mean(0)),
    ("RetroMAE", True, lambda states_LD: states_LD[0]),
    ("laprador", False, lambda states_LD: states_LD.mean(0)),
]


@pytest.mark.parametrize(("name", "by_dot", "pool"), WITHOUT_MODULES)
def test_a_published_retriever_without_modules(name, by_dot, pool, tiny_bert_folder, tmp_path):
    shutil.copytree(tiny_bert_folder.parent / "bert", tmp_path / name)
    encoder = load_encoder(resolve(str(tmp_path / name)), "fp32", as_compared=True)
    model = t.AutoModel.from_pretrained(tmp_path / name).eval()
    tokenizer = t.AutoTokenizer.from_pretrained(tmp_path / name)
    expected_D = pool(states(model, tokenizer, TEXT)).numpy()
    expected_D /= 1 if by_dot else np.linalg.norm(expected_D)
    assert encoder.by_dot == by_dot
    np.testing.assert_allclose(encoder.encode_queries([TEXT])[0], expected_D, atol=1e-5)


BASE = "base_model_name_or_path"


UNMERGED = [
    (None, r"adapter_config\.json is damaged: copy or download it again"),
    ({"peft_type": "IA3"}, "is an adapter of kind IA3: give one of LoRA"),
    ({"r": 3}, "lora cannot be opened as an adapter of .*size mismatch"),
    ({BASE: "none/here"}, "the base of .*lora .*: none/here is not in the hub cache"),
    ({BASE: "/none"}, "the base of .*lora .*: /none is neither a folder nor a hub id"),
    ({BASE: "{lora}"}, "the base of .*lora .*: it is its own base"),
    ({BASE: "{bert}"}, "changes modules that its base, .*, does not have"),
]


@pytest.mark.parametrize(("changes", "message"), UNMERGED)
def test_refusals(changes, message, tiny_lm_folder, tiny_bert_folder, tmp_path, refused, cache):
    adapted(tiny_lm_folder, tmp_path / "lora")
    if changes is None:
        (tmp_path / "lora" / "adapter_config.json").write_text('{"peft')
    for key, value in (changes or {}).items():
        places = dict(lora=tmp_path / "lora", bert=tiny_bert_folder)
        edit(tmp_path / "lora", **{key: value.format(**places) if key == BASE else value})
    (tmp_path / "a.txt").write_text(TEXT)
    how = f"--out={tmp_path / 'out'}", f"--model={tmp_path / 'lora'}"
    assert re.search(message, refused("index", tmp_path / "a.txt", *how))
    assert not [*cache.glob("*/[!.]*")]


def test_a_process_that_is_killed_leaves_no_model(tiny_lm_folder, tmp_path, cache, monkeypatch):
    adapted(tiny_lm_folder, tmp_path / "lora")
    if (child := os.fork()) == 0:
        monkeypatch.setattr("revela.encoders.torch_model.merge_lora", lambda *_: os._exit(9))
        resolve(str(tmp_path / "lora"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (left,) = cache.glob("*/.*-*/*")
    assert (left / "config.json").is_file()
    assert (resolve(str(tmp_path / "lora")) / "model.safetensors").is_file()
    assert not left.exists()
