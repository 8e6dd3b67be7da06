"""Open a Sentence-Transformers folder by torch, as stock modules; what such a model reads.

Outside of revela.training, only this file, torch_encoder.py, graph_export.py and embedded.py (to
convert a language model) import torch. They are imported inside functions.
"""

from __future__ import annotations

import itertools
import json
import re
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from revela.encoders.base import SLOT, Features, check_max_tokens, truncate
from revela.encoders.bert import max_positions
from revela.encoders.model_files import check_retriever, modules_of, opening, refuse_missing
from revela.encoders.prompts import OWN, GivenPrompts, Known, known_of, prompts_of
from revela.errors import RevelaError
from revela.quiet_libraries import silence_libraries
from revela.types import Precision, Role

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

POOLING_MODES = {"mean": "mean", "weighted-mean": "weightedmean", "cls": "cls"}  # else the last
TASKS: dict[Role, str] = {"query": "query", "passage": "document"}
"""The roles of a text by their names in sentence-transformers."""


def tokens_per_batch(device: torch.device) -> int:
    """The tokens of a batch to encode, padding included."""
    # With fewer tokens, a GPU would wait for kernels to be launched; more would not fit into its
    # memory where attention computes explicit scores.
    return 8192 if device.type == "cpu" else 32768


def open_model(
    folder: Path | str, device: str | None = None, prompts: GivenPrompts = OWN
) -> SentenceTransformer:
    """Open a saved retriever, or any Sentence-Transformers folder, in fp32. ``device`` defaults to
    a GPU if there is one; ``prompts`` replace the model's own.

    Raises:
        RevelaError: it is damaged, lacks weights, or begins with an unsupported module.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    silence_libraries()
    check_retriever(Path(folder))
    check_weights(Path(folder))
    with opening(Path(folder)):
        model = SentenceTransformer(str(folder), device=device, local_files_only=True).float()
    if not isinstance(model[0], modules.Transformer | modules.StaticEmbedding):
        raise RevelaError(
            f"{folder} begins with a {type(model[0]).__name__}; only a Transformer or a "
            "StaticEmbedding can be read: give another model"
        )
    model.prompts.update(prompts_of(Path(folder), prompts).by_name())
    if (transformer := transformer_of(model)) is not None and transformer.tokenizer is not None:
        add_pad_token(transformer)
        limit_tokens(transformer)
        reads_last = any(getattr(part, "pooling_mode", "") == "lasttoken" for part in model)
        if reads_last and known_of(Path(folder)).pooling == "eos":
            append_eos(transformer.tokenizer)
    return model


def pooled(
    folder: Path, known: Known, dtype: torch.dtype | str, lower_case: bool = False
) -> SentenceTransformer:
    """Make a Sentence-Transformers model of a transformers model, a pooling, and a normalisation if
    vectors are compared by cosine.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    check_weights(folder)
    with opening(folder, "a model"):
        # With a named modality, an instruct model's chat template is not applied: text is embedded
        # as it is, not as a user's turn.
        transformer = modules.Transformer(
            str(folder),
            model_kwargs={"dtype": dtype},
            max_seq_length=known.max_tokens,
            do_lower_case=lower_case,
            modality_config={
                "text": {"method": "forward", "method_output_name": "last_hidden_state"}
            },
            module_output_name="token_embeddings",
        )
    tokenizer = transformer.tokenizer
    tokenizer.padding_side = "right"
    tokenizer.chat_template = None
    add_pad_token(transformer)
    limit_tokens(transformer)
    if known.pooling == "eos":
        append_eos(tokenizer)
    add_missing_rows(transformer)
    mode = POOLING_MODES.get(known.pooling, "lasttoken")
    pooling = modules.Pooling(transformer.get_embedding_dimension(), pooling_mode=mode)
    parts = [transformer, pooling, *([modules.Normalize()] if known.similarity == "cosine" else [])]
    named = known.prompts.by_name()
    return SentenceTransformer(modules=parts, prompts=named, similarity_fn_name=known.similarity)


def check_weights(folder: Path) -> None:
    """Raise RevelaError if the files of a model lack weights of its transformers; reads names
    and shapes only. Other damage is found when the model is opened.
    """
    from sentence_transformers.sentence_transformer import modules

    every = modules_of(folder) or [("Transformer", folder)]
    # No public function says which class of transformers sentence-transformers uses.
    stock, how = modules.Transformer.__new__(modules.Transformer), {"local_files_only": True}
    for name in [str(place) for kind, place in every if kind == "Transformer"]:
        report: dict[str, Any] = {}
        with suppress(Exception):
            about = stock._load_config(name, "torch", how)
            opened = name, "feature-extraction", about[0], "torch", about[1]
            _, report = stock._load_model(
                *opened, **how, device_map="meta", output_loading_info=True
            )
        refuse_missing(Path(name), report.get("missing_keys", ()))


def merge_lora(adapter: Path, base: Path, target: Path) -> None:
    """Save the transformers model in ``base``, its head included, with the LoRA of a PEFT folder
    merged into it.

    Merged in fp32 and then rounded to the base's dtype: in bf16 the product that is added would be
    rounded as well.

    Raises:
        RevelaError: the base cannot be opened, or lacks modules that the adapter changes.
    """
    import peft
    import transformers
    from safetensors import safe_open

    silence_libraries()
    with opening(adapter, f"an adapter of {base}"):
        with safe_open(adapter / "adapter_model.safetensors", "numpy") as file:
            stored = [name.removeprefix("base_model.model.") for name in file.keys()]  # noqa: SIM118
        changed = {re.split(r"\.lora_|\.(?:weight|bias)$", name)[0] for name in stored}
        names = transformers.AutoConfig.from_pretrained(base, local_files_only=True).architectures
        whole, report = getattr(transformers, (names or ["AutoModel"])[0]).from_pretrained(
            base, local_files_only=True, dtype="auto", output_loading_info=True
        )
        refuse_missing(base, report["missing_keys"])
        dtype = whole.dtype
        # An adapter may have been trained with the head or without it.
        parts = [p for p in (whole, whole.base_model) if changed <= dict(p.named_modules()).keys()]
        if not parts:
            raise RevelaError(f"{adapter} changes modules that its base, {base}, does not have")
        peft.PeftModel.from_pretrained(parts[0].float(), adapter).merge_and_unload()
        whole.to(dtype).save_pretrained(target)


def add_pad_token(transformer: Transformer) -> None:
    """Give a tokenizer a padding token if it has none, in place. Padding is masked, so any special
    token works.
    """
    tokenizer = transformer.tokenizer
    if tokenizer.pad_token is not None:
        return
    names = ("eos_token", "sep_token", "bos_token", "unk_token")
    token = next(filter(None, (getattr(tokenizer, name, None) for name in names)), None)
    tokenizer.add_special_tokens({"pad_token": token or "[PAD]"})
    add_missing_rows(transformer)


def limit_tokens(transformer: Transformer) -> None:
    """Lower a model's token limit to its number of positions, in place."""
    positions, limit = positions_of(transformer.model), transformer.max_seq_length
    if positions is not None and (limit is None or limit > positions):
        transformer.max_seq_length = positions


def positions_of(model: PreTrainedModel) -> int | None:
    """A model's number of positions; None: no limit."""
    config, counts = model.config, list[int]()
    if config.model_type in ("gptj", "codegen", "mpt"):  # positions are computed, up to a maximum
        counts.append(getattr(config, "max_position_embeddings", 0) or config.max_seq_len)
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding) and re.search(r"wpe$|(?<!relative_)position[^.]*$", name):
            # RoBERTa counts from the row after the padding token's, OPT from its offset.
            padding = -1 if part.padding_idx is None else part.padding_idx
            counts.append(part.num_embeddings - max(getattr(part, "offset", 0), padding + 1))
    if counts:
        counts.append(getattr(config, "max_position_embeddings", counts[0]))
    return min(counts, default=None)


def add_missing_rows(transformer: Transformer) -> None:
    """Give each token a row of the embedding table, in place; a new row is 0.

    Some models (Gemma 3) have no row for their image token, which no text has.
    """
    model, tokenizer = transformer.model, transformer.tokenizer
    rows = model.get_input_embeddings().num_embeddings
    if rows >= len(tokenizer):
        return
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.get_input_embeddings().weight.data[rows:] = 0


def special_tokens_of(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a transformers tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    first = ids.index(plain[0])
    return ids[:first], ids[first + len(plain) :]


def append_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    """Make the tokenizer end every text with EOS, after truncation."""
    from tokenizers.processors import TemplateProcessing

    if tokenizer.eos_token is None:
        raise RevelaError("the tokenizer has no EOS token for --pooling eos: give --pooling mean")
    before, after = special_tokens_of(tokenizer)
    if after[-1:] == [tokenizer.eos_token_id]:
        return
    front = tokenizer.convert_ids_to_tokens(before)
    tokens = [*front, tokenizer.eos_token]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*front, "$A", tokenizer.eos_token],
        special_tokens=[(t, tokenizer.convert_tokens_to_ids(t)) for t in dict.fromkeys(tokens)],
    )


def keep_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Make libraries read tokenizer.json as it is.

    A family's own class (GPT2Tokenizer) rebuilds the tokenizer without the case folding of
    tokenizer.json, and some without its EOS. For some kinds of models (Qwen2) transformers always
    uses the family's class, so case folding is also set where sentence-transformers reads it.
    """
    state, about = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not (state.is_file() and about.is_file()):
        return
    config = json.loads(about.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in ("model_input_names", "padding_side", "truncation_side"):  # as the class has them
        config[name] = getattr(tokenizer, name)
    about.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    normalizer = json.loads(state.read_text(encoding="utf-8"))["normalizer"]
    if '"Lowercase"' in json.dumps(normalizer):
        settings = folder / "sentence_bert_config.json"
        known = json.loads(settings.read_text(encoding="utf-8"))
        settings.write_text(json.dumps({**known, "do_lower_case": True}, indent=4))


def transformer_of(model: SentenceTransformer) -> Transformer | None:
    """The transformer that a model begins with; None if it begins with a table of tokens."""
    from sentence_transformers.sentence_transformer import modules

    return model[0] if isinstance(model[0], modules.Transformer) else None


def truncate_at(model: SentenceTransformer, max_tokens: int, name: str) -> None:
    """Set a model's token limit, in place; slots do not count.

    Raises:
        RevelaError: the model cannot read as many tokens.
    """
    slots = len(slot_ids(model))
    if (transformer := transformer_of(model)) is None:
        check_max_tokens(max_tokens, own_limit(model), name)
        truncate(model[0].tokenizer, max_tokens)
        return
    inside = transformer.model
    most = positions_of(inside) or max_positions(inside.config.to_dict())
    check_max_tokens(max_tokens, most and most - slots, name)
    transformer.max_seq_length = max_tokens + slots


def own_limit(model: SentenceTransformer) -> int | None:
    """The maximum tokens of a text, prompt and special tokens included; None: no limit."""
    if (transformer := transformer_of(model)) is not None:
        limit: int | None = transformer.max_seq_length
        return limit
    tokenizer = getattr(model[0], "tokenizer", None)
    return (getattr(tokenizer, "truncation", None) or {}).get("max_length")


def slot_ids(model: Any) -> range:
    """The token ids of a model's slots, in order."""
    added: dict[str, int] = getattr(model.tokenizer, "get_added_vocab", dict)()
    count = next(j for j in itertools.count() if SLOT.format(j) not in added)
    first = added[SLOT.format(0)] if count else 0
    return range(first, first + count)


def compares_by_dot(model: SentenceTransformer) -> bool:
    """Whether a model's vectors are compared by dot products, without normalisation."""
    from sentence_transformers.sentence_transformer import modules

    return model.similarity_fn_name == "dot" and not isinstance(model[-1], modules.Normalize)


def text_vectors(
    model: SentenceTransformer,
    features: Features,
    with_tokens: bool,
    bf16: bool = False,
    by_dot: bool = False,
) -> list[Tensor]:
    """Run a model's modules on tokenized texts: the vectors (B, D) of the texts and, if requested,
    (B, L, W) of their tokens, in fp32.

    Token vectors are the transformer's states, after the linear layer that follows the pooling if
    there is one, as late interaction compares them.

    Args:
        bf16: run the transformer under autocast. The modules after it run in fp32: they cost
            little, and bf16 would lose much.
        by_dot: do not normalise the vectors of the texts.
    """
    from sentence_transformers.sentence_transformer import modules

    first, *rest = model
    with torch.autocast(model.device.type, torch.bfloat16) if bf16 else nullcontext():
        features = dict(first(features))
    half = torch.bfloat16
    features = {k: v.float() if getattr(v, "dtype", 0) is half else v for k, v in features.items()}
    states: Any = features.get("token_embeddings")  # before other modules replace them
    for part in rest:
        features = part(features)
    vectors_BD = features["sentence_embedding"][:, : model.truncate_dim].float()
    found = [vectors_BD if by_dot else normalize(vectors_BD, dim=-1)]
    if with_tokens:
        after = itertools.dropwhile(lambda part: not isinstance(part, modules.Pooling), rest)
        linear = next((part.linear for part in after if isinstance(part, modules.Dense)), None)
        if linear is not None and linear.in_features == states.shape[-1]:
            states = linear(states)
        found.append(normalize(states.float(), dim=-1))
    return found


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 matrix products are native on this device; emulated ones are slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def uses_bf16(precision: Precision, device: torch.device) -> bool:
    """Whether to compute in bf16: with "bf16", and with "auto" where it is fast."""
    return precision == "bf16" or (precision == "auto" and has_fast_bf16(device))
