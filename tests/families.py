"""Tiny random models of every family, each with a tokenizer of its own class, and which of them
revela uses.

A family is a ``model_type`` of transformers.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from conftest import TINY_SIZES, make_rows
from research.benchmarks.hardening.made import byte_tokenizer

VOCABULARY = 400
TEXTS = [row["text"] for row in make_rows(40)]
DECODERS = [
    *("afmoe", "apertus", "arcee", "aria_text", "bitnet", "biogpt", "bloom", "codegen"),
    *("cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3", "diffllama", "doge"),
    *("ernie4_5", "ernie4_5_moe", "exaone4", "falcon", "flex_olmo", "gemma", "gemma2"),
    *("gemma3", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo"),
    *("gpt_neox", "gptj", "gpt_oss", "granite", "granitemoe", "helium", "hunyuan_v1_dense"),
    *("jais2", "jetmoe", "lfm2", "llama", "llama4_text", "mamba", "minicpm3", "ministral"),
    *("ministral3", "mistral", "mixtral", "modernbert-decoder", "mpt", "nanochat"),
    *("nemotron", "olmo", "olmo2", "olmo3", "olmoe", "openai-gpt", "opt", "persimmon"),
    *("phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"),
    *("qwen3_5_text", "recurrent_gemma", "rwkv", "seed_oss", "smollm3", "stablelm"),
    *("starcoder2", "vaultgemma", "xglm"),
]
ENCODERS = [
    *("albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta"),
    *("deberta-v2", "distilbert", "electra", "ernie", "eurobert", "fnet", "funnel", "gte"),
    *("ibert", "jina_embeddings_v3", "layoutlm", "longformer", "luke", "megatron-bert"),
    *("mobilebert", "modernbert", "mpnet", "mra", "nomic_bert", "nystromformer", "rembert"),
    *("roberta", "roberta-prelayernorm", "roformer", "splinter", "squeezebert"),
    *("xlm-roberta", "xlm-roberta-xl", "xlnet", "yoso", "t5", "mt5", "umt5", "longt5"),
    *("t5gemma", "bart", "mbart", "pegasus"),
]
NO_LORA = {"mamba", "squeezebert"}
NO_RETRIEVER = {
    "gemma3": "reads images too",
    "fnet": "reads padding like text",
    "funnel": "cannot be cut to its lower layers: give --layers 0",
    "minicpm3": "scales each layer by how many there are",
    "ibert": "has no plain table of tokens",
    "bart": "has a decoder that cannot be left out",
    "mbart": "has a decoder that cannot be left out",
    "pegasus": "lacks weights of its model",  # by the names that sentence-transformers reads
}
NO_LM = {
    **dict.fromkeys(
        (
            *("biogpt", "bloom", "falcon", "gpt_neo", "gpt_oss", "mamba", "mpt", "openai-gpt"),
            *("qwen3_next", "qwen3_5_text", "recurrent_gemma", "rwkv", "stablelm", "xglm"),
            *("gemma2", "vaultgemma"),
        ),
        "use transformers' AttentionInterface",
    ),
    "nemotron": "does not pass its arguments on to its attention",
    "diffllama": "calls attention more than once in a layer",
}
RETRIEVERS = [kind for kind in DECODERS + ENCODERS if kind not in NO_RETRIEVER]
LMS = [kind for kind in DECODERS if kind not in NO_LM]
OFTEN = {
    *("llama", "gpt2", "gemma3_text", "gpt_neox", "bloom", "mamba", "bert", "xlm-roberta"),
    *("modernbert", "t5", "gemma3", "fnet", "funnel", "nemotron", "diffllama"),
}
TINY_TEXT = TINY_SIZES | dict(
    num_key_value_heads=2, head_dim=8, vocab_size=400, sliding_window=64, query_pre_attn_scalar=8
)
MORE: dict[str, dict[str, Any]] = {
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]], window_size=64),
    **{
        kind: dict(qk_rope_head_dim=8, num_key_value_heads=4)
        for kind in ("deepseek_v2", "deepseek_v3", "minicpm3")
    },
    "funnel": dict(architectures=["FunnelModel"]),
    "t5gemma": dict(encoder=TINY_TEXT, decoder=TINY_TEXT),
    "gemma3": dict(
        text_config=TINY_TEXT,
        vision_config=TINY_SIZES | dict(image_size=28, patch_size=14),
        mm_tokens_per_image=4,
    ),
}
# What a configuration calls its sizes; it takes those that it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "state_size"), 4),
    **dict(num_key_value_heads=2, head_dim=8, d_kv=8, kv_channels=8, query_pre_attn_scalar=8),
    **dict(moe_intermediate_size=16, num_experts_per_tok=2, n_group=1, topk_group=1),
    **dict(word_embed_proj_dim=32, shared_expert_intermediate_size=16, attention_window=16),
    **dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, sliding_window=64),
}


def config_of(kind: str, vocabulary: int = VOCABULARY) -> Any:
    """The configuration of a tiny model."""
    made = CONFIG_MAPPING[kind]
    if dataclasses.is_dataclass(made):
        known = {field.name for field in dataclasses.fields(made)}
    else:
        known = set(inspect.signature(made.__init__).parameters)
    sizes = {**SIZES, "vocab_size": vocabulary}
    sizes = {name: value for name, value in sizes.items() if name in known}
    return made(**sizes | MORE.get(kind, {}))


def tokenizer_of(kind: str) -> Any:
    """A tokenizer of the family's class, trained on a few texts."""
    named = TOKENIZER_MAPPING_NAMES.get(kind)
    try:
        return getattr(transformers, str(named))().train_new_from_iterator(TEXTS, VOCABULARY)
    except (AttributeError, TypeError, ValueError, ImportError):
        return byte_tokenizer(TEXTS, VOCABULARY)


def folder_of(kind: str, folder: Path, auto: Any = transformers.AutoModel) -> Path:
    """The folder of a tiny model."""
    tokenizer = tokenizer_of(kind)
    torch.manual_seed(0)
    auto.from_config(config_of(kind, len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def cases(kinds: list[str], often: set[str]) -> list[Any]:
    """Families as parameters of a test, of which those ``often`` run by default."""
    return [kind if kind in often else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


def causal_lm(kind: str) -> Any:
    """A tiny LM, with the same weights each time."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config_of(kind)).eval()
