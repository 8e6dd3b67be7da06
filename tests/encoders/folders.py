"""Tiny Sentence-Transformers folders of every kind, made on the fly by ``KINDS``."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as t
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer
from tokenizers.processors import TemplateProcessing
from torch import nn

WIDTH, POSITIONS = 16, 64
SIZES = dict(
    vocab_size=400, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=POSITIONS,
)  # fmt: skip
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
PROMPTS = {"query": "query: ", "document": "passage: "}
BERTS = {
    "bert": lambda: t.BertModel(t.BertConfig(**SIZES), add_pooling_layer=False),
    "roberta": lambda: t.RobertaModel(t.RobertaConfig(**SIZES, **IDS), add_pooling_layer=False),
    "modernbert": lambda: t.ModernBertModel(t.ModernBertConfig(**SIZES, **IDS)),
    "distilbert": lambda: t.DistilBertModel(t.DistilBertConfig(
        vocab_size=400, dim=WIDTH, hidden_dim=24, n_layers=2, n_heads=2,
        max_position_embeddings=POSITIONS,
    )),
    "mpnet": lambda: t.MPNetModel(t.MPNetConfig(**SIZES, pad_token_id=0), add_pooling_layer=False),
}  # fmt: skip
GPTS = {
    "gpt2": lambda: t.GPT2Model(
        t.GPT2Config(vocab_size=400, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=POSITIONS)
    ),
    "llama": lambda: t.LlamaModel(t.LlamaConfig(**SIZES, num_key_value_heads=1, pad_token_id=0)),
}


def transformer(
    tokenizer: Any, place: Path, name: str = "bert", limit: int | None = 32, **changes: Any
) -> modules.Transformer:
    """A transformer of random weights, with its tokenizer; ``changes`` are attributes of that."""
    torch.manual_seed(0)
    tokenizer = copy.deepcopy(tokenizer)
    if name in BERTS:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    for attribute, value in changes.items():
        setattr(tokenizer, attribute, value)
    model = {**BERTS, **GPTS}[name]()
    for weight in model.parameters():  # vectors that differ much, and are far from length one
        weight.data.mul_(3)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return modules.Transformer(str(place), max_seq_length=limit)


def saved(folder: Path, parts: list[Any], **settings: Any) -> SentenceTransformer:
    model = SentenceTransformer(modules=parts, device="cpu", **settings)
    model.save_pretrained(str(folder), create_model_card=False)
    return model


def pooled(
    folder: Path,
    tokenizer: Any,
    *more: Any,
    name: str = "bert",
    pooling: Any = "mean",
    limit: int | None = 32,
    include_prompt: bool = True,
    prompts: dict[str, str] | None = PROMPTS,
    of_tokenizer: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """A transformer, its pooling, and ``more`` modules."""
    first = transformer(tokenizer, folder.with_name("raw"), name, limit, **(of_tokenizer or {}))
    pool = modules.Pooling(WIDTH, pooling_mode=pooling, include_prompt=include_prompt)
    saved(folder, [first, pool, *more], prompts=prompts, **settings)
    sides = {k: v for k, v in (of_tokenizer or {}).items() if k.endswith("_side")}
    if sides:  # which save_pretrained leaves out
        edit(folder / "tokenizer_config.json", lambda found: {**found, **sides})


def dense(activation: nn.Module, rows: int = WIDTH, width: int = 12) -> modules.Dense:
    torch.manual_seed(1)
    return modules.Dense(rows, width, activation_function=activation)


def half(folder: Path, tokenizer: Any, dtype: torch.dtype) -> None:
    pooled(folder, tokenizer, dense(nn.Tanh()))
    SentenceTransformer(str(folder), device="cpu").to(dtype).save_pretrained(str(folder))


def former_names(folder: Path, tokenizer: Any) -> None:
    """As checkpoints converted from TensorFlow name the weights of layer norms."""
    pooled(folder, tokenizer)
    file, former = folder / "model.safetensors", {"weight": "gamma", "bias": "beta"}
    tensors = {
        re.sub(r"(?<=LayerNorm\.)(weight|bias)", lambda found: former[found[0]], name): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


def sharded(folder: Path, tokenizer: Any) -> None:
    pooled(folder, tokenizer)
    model = t.BertModel.from_pretrained(folder, add_pooling_layer=False)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1


def adapters(folder: Path, tokenizer: Any) -> None:
    from peft import LoraConfig, get_peft_model

    pooled(folder, tokenizer)
    base = folder.with_name("base")
    (folder / "model.safetensors").unlink()
    (folder / "config.json").rename(folder / "config.unused")
    model = BERTS["bert"]()
    model.save_pretrained(base)
    config = LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    made = get_peft_model(t.BertModel.from_pretrained(base, add_pooling_layer=False), config)
    made.save_pretrained(str(folder))


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def layout(folder: Path, tokenizer: Any, version: int, lower: bool = False) -> None:
    """The files of an earlier version of sentence-transformers: 1 and 2 name no prompts and no
    version, and 1 has a folder for the transformer.
    """
    pooled(folder, tokenizer, modules.Normalize())
    flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    modes = {f"pooling_mode_{flag}": flag == "mean_tokens" for flag in flags}
    pooling = {"word_embedding_dimension": WIDTH, **modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    listed = (folder / "modules.json").read_text()
    listed = re.sub(r'"sentence_transformers\.[\w.]+\.', '"sentence_transformers.models.', listed)
    (folder / "modules.json").write_text(listed)
    settings = dict(max_seq_length=32, do_lower_case=lower)
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    about = folder / "config_sentence_transformers.json"
    if version >= 3:
        versions = {"sentence_transformers": f"{version}.0.0"}
        edit(about, lambda found: {"__version__": versions, "prompts": found["prompts"]})
        return
    about.unlink()
    if version == 1:
        inside = folder / "0_Transformer"
        inside.mkdir()
        for file in [file for file in folder.iterdir() if file.name != "modules.json"]:
            if file.is_file():
                file.rename(inside / file.name)
        first = {"path": "0_Transformer"}
        edit(folder / "modules.json", lambda found: [found[0] | first, *found[1:]])


def limits(folder: Path, tokenizer: Any, name: str, limit: int | None = None) -> None:
    """A limit of tokens that is missing, or beyond the model's positions."""
    pooled(folder, tokenizer, name=name, limit=30)
    kept = json.loads((folder / "sentence_bert_config.json").read_text())
    kept.pop("max_seq_length", None)  # which earlier versions write
    given = {"max_seq_length": limit} if limit else {}
    (folder / "sentence_bert_config.json").write_text(json.dumps(kept | given))
    edit(folder / "tokenizer_config.json", lambda found: {**found, "model_max_length": 10**30})


def table(
    folder: Path, tokenizer: Any, *more: Any, dtype: torch.dtype = torch.float32, **settings: Any
) -> None:
    torch.manual_seed(2)
    own = copy.deepcopy(tokenizer.backend_tokenizer)
    own.no_truncation()  # another test may have set it
    first = modules.StaticEmbedding(own, embedding_dim=WIDTH)
    model = SentenceTransformer(modules=[first, *more], device="cpu", **settings)
    model.to(dtype).save_pretrained(str(folder), create_model_card=False)


def wordpiece(folder: Path, _: Any, name: str = "bert", **config: Any) -> None:
    """A tokenizer that transformers makes by ``config``, and tokenizer.json otherwise."""
    pieces = [*"abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZüäöéÜ.漢字рус"]
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces, *(f"##{p}" for p in pieces)]
    known += ["the", "ocean", "garden", "Sea", "sea", "CAPITALS", "##ocean"]
    tokenizer = t.BertTokenizer({token: i for i, token in enumerate(known)})
    parts = [transformer(tokenizer, folder.with_name("raw"), name), modules.Pooling(WIDTH)]
    saved(folder, parts, prompts=PROMPTS)
    edit(folder / "tokenizer_config.json", lambda found: {**found, **config})


def prefix_space(folder: Path, tokenizer: Any) -> None:
    """transformers takes it from tokenizer_config.json, and tokenizer.json has none."""
    pooled(folder, tokenizer, name="roberta")
    given = dict(tokenizer_class="RobertaTokenizer", add_prefix_space=True)
    edit(folder / "tokenizer_config.json", lambda found: {**found, **given})


def without(folder: Path, tokenizer: Any, part: str, kind: str, place: str = "") -> None:
    """A model without the tensors in whose names this stands."""
    KINDS[kind](folder, tokenizer)
    file = folder / place / "model.safetensors"
    tensors = load_file(file)
    kept = {name: tensors[name] for name in tensors if part not in name}
    assert len(kept) < len(tensors)
    save_file(kept, file, {"format": "pt"})


def damaged(folder: Path, tokenizer: Any, file: str, content: bytes) -> None:
    pooled(folder, tokenizer)
    (folder / file).write_bytes(content)


def without_shard(folder: Path, tokenizer: Any) -> None:
    sharded(folder, tokenizer)
    next(folder.glob("model-00002*")).unlink()


def model2vec(folder: Path, tokenizer: Any) -> None:
    """As model2vec writes a table whose rows are shared, in int8."""
    table(folder, tokenizer)
    rows, tokens = 40, len(tokenizer)
    generator = torch.Generator().manual_seed(4)
    tensors = {
        "embeddings": torch.randint(-127, 127, (rows, WIDTH), generator=generator).to(torch.int8),
        "mapping": torch.randint(0, rows, (tokens,), generator=generator).to(torch.int16),
        "weights": torch.rand(tokens, generator=generator),
    }
    save_file(tensors, folder / "model.safetensors")


def words(folder: Path, _: Any) -> None:
    """A table of whole words, as in the first versions."""
    known = ["ocean", "castle", "garden0", "Sea", "the", "a"]
    splits = WhitespaceTokenizer(known, stop_words=["a"], do_lower_case=False)
    torch.manual_seed(3)
    rows = torch.randn(len(known), WIDTH).numpy()
    saved(folder, [modules.WordEmbeddings(splits, rows), modules.Pooling(WIDTH)])


TORN = ("tokenizer", "config", "modules", "config_sentence_transformers")
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90868376\n"
Make = Callable[[Path, Any], None]


def kind(**how: Any) -> Make:
    return functools.partial(pooled, **how)


def with_parts(*make: Callable[[], Any], **how: Any) -> Make:
    return lambda folder, tokenizer: pooled(folder, tokenizer, *(part() for part in make), **how)


ACTIVATIONS = (nn.Tanh, nn.Identity, nn.ReLU)  # the last is read by torch
POOLINGS = ("cls", "lasttoken", ("mean", "max"))  # the last two likewise
INT8 = "table, model2vec in int8"
NO_SPECIAL = dict(pad_token=None, bos_token=None, eos_token=None)
PAD_LEFT, CUT_LEFT = dict(padding_side="left"), dict(truncation_side="left")
KINDS: dict[str, Make] = {
    **{name: with_parts(modules.Normalize, name=name) for name in (*BERTS, *GPTS)},
    "no Normalize": kind(),
    "truncated": kind(truncate_dim=6),
    "truncated after Normalize": with_parts(modules.Normalize, truncate_dim=6),
    **{
        f"Dense, {activation.__name__}": with_parts(lambda made=activation: dense(made()))
        for activation in ACTIVATIONS
    },
    "two Dense": with_parts(lambda: dense(nn.Tanh()), lambda: dense(nn.Identity(), 12, 8)),
    "LayerNorm": with_parts(lambda: modules.LayerNorm(WIDTH), lambda: dense(nn.Tanh())),
    "Dropout": with_parts(lambda: modules.Dropout(0.5)),
    **{f"pooling {mode}": kind(pooling=mode) for mode in POOLINGS},
    "prompt left out of the pooling": kind(include_prompt=False),
    "fp16": functools.partial(half, dtype=torch.float16),
    "bf16": functools.partial(half, dtype=torch.bfloat16),
    "sharded": sharded,
    "former names": former_names,
    "adapters": adapters,
    **{f"layout of {n}": functools.partial(layout, version=n) for n in (1, 2, 3)},
    "layout of 2, lower case": functools.partial(layout, version=2, lower=True),
    "left padding": kind(name="llama", pooling="lasttoken", of_tokenizer=PAD_LEFT),
    "left padding, mean": kind(name="gpt2", of_tokenizer=PAD_LEFT),
    "left padding, weighted": kind(name="llama", pooling="weightedmean", of_tokenizer=PAD_LEFT),
    "no pad token": kind(name="gpt2", of_tokenizer=dict(pad_token=None)),
    "no pad token, no EOS": kind(name="gpt2", of_tokenizer=NO_SPECIAL),
    "truncated on the left": kind(of_tokenizer=CUT_LEFT),
    **{f"no limit, {name}": functools.partial(limits, name=name) for name in (*BERTS, "gpt2")},
    "limit of 512, roberta": functools.partial(limits, name="roberta", limit=512),
    "prompts query, passage": kind(prompts={"query": "query: ", "passage": "passage: "}),
    "prompts query, corpus": kind(prompts={"query": "query: ", "corpus": "passage: "}),
    "prompt of queries": kind(prompts={"query": "Find: "}),
    "default prompt": kind(prompts={"task": "Task: "}, default_prompt_name="task"),
    "no prompts": kind(prompts=None),
    "lower case by tokenizer_config": functools.partial(wordpiece, do_lower_case=True),
    "capitals by tokenizer_config": functools.partial(wordpiece, do_lower_case=False),
    "accents by tokenizer_config": functools.partial(wordpiece, strip_accents=False),
    "prefix space, roberta": prefix_space,
    "capitals, distilbert": functools.partial(wordpiece, name="distilbert", do_lower_case=False),
    "truncated on the left, distilbert": kind(name="distilbert", of_tokenizer=CUT_LEFT),
    "table": table,
    "table, Normalize": lambda folder, tokenizer: table(folder, tokenizer, modules.Normalize()),
    "table, truncated": functools.partial(table, truncate_dim=6, prompts=PROMPTS),
    "table, fp16": functools.partial(table, dtype=torch.float16),
    INT8: model2vec,
    "table, Dense": lambda folder, tokenizer: table(folder, tokenizer, dense(nn.Tanh())),
}
# Folders that are refused, and what the sentence says.
DAMAGED: dict[str, tuple[Make, str]] = {
    "weights in Git LFS": (
        functools.partial(damaged, file="model.safetensors", content=LFS),
        r"model\.safetensors is a Git-LFS pointer: run git lfs pull",
    ),
    **{
        f"torn {file}": (
            functools.partial(damaged, file=file, content=b'{"a'),
            "cannot be opened as a .*model: .+",
        )
        for file in ("model.safetensors", *(f"{name}.json" for name in TORN))
    },
    "no layer": (
        functools.partial(without, part="layer.1.", kind="no Normalize"),
        r"lack.*encoder\.layer\.1\..*: copy or download it again",
    ),
    "no layer, distilbert": (
        functools.partial(without, part="layer.1.", kind="distilbert"),
        r"lacks weights of its model \(.*layer\.1\..* and \d+ more\): copy or download it again",
    ),
    "no shard": (without_shard, r"lack|cannot be opened as a"),
    "no Dense": (
        functools.partial(without, part="weight", kind="Dense, Tanh", place="2_Dense"),
        r"linear\.weight",
    ),
    "no table": (functools.partial(without, part="embeddings", kind=INT8), "embeddings"),
}
