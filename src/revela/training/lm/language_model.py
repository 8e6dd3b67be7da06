"""Any decoder-only causal LM of transformers, run as the two streams of Revela (section 3.2).

The LM runs over a group of chunks twice. Stream e (``prefill``) is the plain LM over each chunk.
Stream h (``logits``, ``loss``) is the same LM over the same chunks, whose attention also reads e's
keys and values of the *other* chunks. The method's ``Mix`` says how.

The attention is registered with transformers' ``AttentionInterface``, so no model code is copied.
What saves time with equal results:
- chunks are packed one after another into one row, without padding, each with its own positions;
- below the first mixed layer both streams are equal: h starts there from e's output;
- e stops at the keys and values of the last mixed layer and never runs the LM head;
- the e stream of a frozen LM records no graph;
- the loss holds the logits of one block of rows at a time (cross_entropy.py).

Shapes: B chunks of up to L tokens, T tokens in all, P tokens of a prefix, R rows that are scored, S
tokens that can be scored, H query heads, G key-value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revela.encoders.model_files import opening
from revela.errors import RevelaError
from revela.training.device import autocast, sent
from revela.training.lm.cross_entropy import linear_cross_entropy
from revela.training.models import load_tokenizer, open_causal_lm, opened, opened_model
from revela.training.packing import Layout, attention, attention_with_prefix, layout_of

ATTENTION = "revela"
USE = "use a Llama, Qwen2/3, Gemma 3, Mistral or GPT-NeoX model as --lm"


class Attended(NamedTuple):
    """Inputs of a layer's attention, and the factor on its scores (None: D ** -0.5)."""

    query_HTD: Tensor
    key_GTD: Tensor
    value_GTD: Tensor
    scale: float | None


Mix = Callable[[int, Tensor, Attended], Tensor]
"""(layer, own_HTD, inputs) -> stream h's attention output (H, T, D).

``own_HTD`` is the plain LM's attention output. With a memory of stream e the mix is called in the
memory's layers, with e's keys and values; without one in every layer, with the chunks' own.
"""


@dataclass(frozen=True)
class Packed:
    """Chunks one after another."""

    ids_1T: Tensor
    layout: Layout

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens per chunk."""
        return self.layout.lengths


@dataclass
class KVCache:
    """Keys and values (G, T, D) by layer, and the output of the layer below the first one."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    below: Any = None

    def part(self, start: int, end: int) -> KVCache:
        """Keys and values of these tokens only."""
        sides = self.keys, self.values
        return KVCache(*({layer: t[:, start:end] for layer, t in s.items()} for s in sides))


class StopForward(Exception):
    """Raised in a layer's attention, as no layer above it is needed."""


@dataclass
class Stream:
    """State of a forward pass, shared by the attention of all layers.

    Attributes:
        packed: the chunks.
        keep: layers whose keys and values go into ``kept``.
        mix: changes the attention output; None: the plain LM.
        memory: of stream e over the same chunks, for ``mix``.
        prefix: keys and values of a text that each chunk continues.
        last: the pass ends with the attention of this layer; without a ``mix``, before it.
        layers_run: how often the attention of each layer has run.
    """

    packed: Packed
    keep: Collection[int] = ()
    mix: Mix | None = None
    memory: KVCache | None = None
    prefix: KVCache | None = None
    last: int | None = None
    kept: KVCache = field(default_factory=KVCache)
    layers_run: Counter[int] = field(default_factory=Counter)

    def begin(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """Take a layer's keys and values (G, T, D) before its attention, and return those of the
        prefix (G, P, D), if there is one.
        """
        self.layers_run[layer] += 1
        if layer in self.keep:
            self.kept.keys[layer], self.kept.values[layer] = key, value
        if layer == self.last and self.mix is None:
            raise StopForward
        return None if self.prefix is None else (self.prefix.keys[layer], self.prefix.values[layer])

    def end(self, layer: int, own: Tensor, inputs: Attended) -> Tensor:
        """Return the layer's attention output; arguments as for ``Mix``."""
        if self.mix is not None:
            if self.memory is None:
                own = self.mix(layer, own, inputs)
            elif layer in self.memory.keys:
                keys, values = self.memory.keys[layer], self.memory.values[layer]
                own = self.mix(layer, own, inputs._replace(key_GTD=keys, value_GTD=values))
        if layer == self.last:
            raise StopForward
        return own


class NoStream(RevelaError):
    """A model called its attention without the stream that it was given."""


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    stream: Stream | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed chunk, then the stream's mix."""
    if stream is None:
        raise NoStream("call LanguageModel.logits() or loss() in place of the model inside it")
    if given.get("s_aux") is not None:
        raise RevelaError(f"in-batch attention does not support attention sinks: {USE}")
    layer, layout = int(module.layer_idx), stream.packed.layout
    query, key, value = query[0], key[0], value[0]
    prefix = stream.begin(layer, key, value)
    longest = max(layout.lengths) + (0 if prefix is None else prefix[0].shape[1])
    window, scale = given.get("sliding_window"), given.get("scaling")
    if window is not None and longest > window:
        raise RevelaError(
            f"a text of {longest} tokens is longer than the LM's sliding window of {window}: "
            "use --lm-tokens"
        )
    if prefix is None:
        dropout = given.get("dropout", 0.0)
        own_THD = attention(query, key, value, layout, causal=True, scale=scale, dropout=dropout)
    else:
        own_THD = attention_with_prefix(query, key, value, layout, prefix, scale)
    inputs = Attended(query, key, value, scale)
    mixed_HTD = stream.end(layer, own_THD.transpose(0, 1), inputs)
    return mixed_HTD.transpose(0, 1)[None].contiguous(), None


class LanguageModel(nn.Module):
    """A causal LM with two passes: ``prefill`` (stream e), and ``logits`` or ``loss`` (stream h).

    Args:
        model: a decoder-only causal LM of transformers, or a PEFT model around one. Its attention
            is replaced by ours.
        name: its name in messages.
        bf16: run under bf16 autocast, for weights that stay in fp32 because they are trained. Its
            frozen linear layers are kept in bf16, as autocast would cast them in every pass.

    Raises:
        RevelaError: the model cannot run in-batch attention: an encoder-decoder, soft-capped
            scores, attention sinks, or layers that bypass the attention interface.
    """

    def __init__(self, model: Any, name: str = "the language model", bf16: bool = False) -> None:
        from transformers import AttentionInterface

        super().__init__()
        self.model, self.name, self.bf16 = model, name, bf16
        # PEFT puts LoRA into the model it wraps, so that model is the one to run.
        self._inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = self._inner.config.get_text_config()
        self._check_unsupported(config)
        self.n_layers, self.n_heads = int(config.num_hidden_layers), int(config.num_attention_heads)
        # transformers builds no mask, as no mask function is registered under this name.
        AttentionInterface.register(ATTENTION, _attention)
        self._inner.set_attn_implementation(ATTENTION)
        if bf16:
            _keep_linear_in_bf16(self._inner)
        body = self._inner.base_model
        self._body = getattr(self._inner, "model", body) if body is self._inner else body  # Llama 4
        self._layers = self._decoder_layers()
        self._rows = int(self._inner.get_input_embeddings().num_embeddings)
        self._check_on_two_tokens()

    def _check_unsupported(self, config: Any) -> None:
        inner, who = self._inner, f"{self.name} ({config.model_type})"
        if getattr(config, "is_encoder_decoder", False):
            raise RevelaError(f"{self.name} is an encoder-decoder, not a decoder-only LM: {USE}")
        if not getattr(inner, "_supports_attention_backend", False) or not inner._supports_sdpa:
            raise RevelaError(f"{who} does not use transformers' AttentionInterface: {USE}")
        if getattr(config, "attn_logit_softcapping", None):
            raise RevelaError(f"{who} soft-caps its attention scores, which SDPA cannot do: {USE}")

    def _decoder_layers(self) -> nn.ModuleList:
        for module in self._inner.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.n_layers:
                return module
        raise RevelaError(f"{self.name}: no list of {self.n_layers} decoder layers found; {USE}")

    @torch.no_grad()
    def _check_on_two_tokens(self) -> None:
        """Check that all layers run our attention once, and whether the logits are the head's
        output.
        """
        ones = torch.ones(1, 2, dtype=torch.long)
        stream = Stream(self.pack(ones, ones))
        who = f"{self.name} ({self._inner.config.model_type})"
        try:
            logits_TV = self._run(self._inner, stream).logits[0]
        except NoStream as error:
            raise RevelaError(
                f"{who} does not pass its arguments on to its attention: {USE}"
            ) from error
        if missing := sorted(set(range(self.n_layers)) - stream.layers_run.keys()):
            raise RevelaError(
                f"{who}: layers {missing[:8]} do not use transformers' AttentionInterface; {USE}"
            )
        if max(stream.layers_run.values()) > 1:
            raise RevelaError(f"{who} calls attention more than once in a layer: {USE}")
        # Some models scale or cap their logits after the head.
        self._head = self._inner.get_output_embeddings()
        hidden_TD = self._run(self._body, Stream(stream.packed)).last_hidden_state[0]
        with autocast(self.device, self.bf16):
            head_TV = self._head(hidden_TD)
        self._logits_are_heads = logits_TV.device.type == "meta" or torch.allclose(
            head_TV, logits_TV, rtol=1e-3, atol=1e-4
        )

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return torch.device(self._inner.device)

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens per text, by positions and sliding window; None: no limit."""
        config = self._inner.config.get_text_config()
        limits = (getattr(config, n, None) for n in ("max_position_embeddings", "sliding_window"))
        return min((limit for limit in limits if limit), default=None)

    def train(self, mode: bool = True) -> LanguageModel:
        """Turn on dropout in trained modules (LoRA) only."""
        self.training = mode
        for part in self.model.eval().modules():
            if hasattr(part, "lora_dropout"):
                part.lora_dropout.train(mode)
        return self

    @property
    def trainable(self) -> bool:
        """Whether some parameter is trained (LoRA)."""
        return any(p.requires_grad for p in self.model.parameters())

    def save(self, folder: Path) -> None:
        """Save the trained LM and its tokenizer, with LoRA merged into the fp32 weights that it was
        loaded from (its own may be bf16).
        """
        from peft import PeftModel

        start = Path(self.model.peft_config["default"].base_model_name_or_path)
        with tempfile.TemporaryDirectory() as adapter:
            self.model.save_pretrained(adapter, save_embedding_layers=False)
            whole = PeftModel.from_pretrained(open_causal_lm(start, torch.float32), adapter)
        whole.merge_and_unload().save_pretrained(folder)
        load_tokenizer(start).save_pretrained(folder)

    def pack(self, ids_BL: Tensor, mask_BL: Tensor) -> Packed:
        """Drop a batch's padding, on either side. Each chunk's positions count from 0.

        A token without a row (Gemma 3's for images) is read as the last token that has one.
        """
        layout, places_T = layout_of(mask_BL, self.device)
        ids_T = ids_BL.flatten()[sent(places_T, ids_BL.device)].clamp(max=self._rows - 1)
        return Packed(sent(ids_T, self.device)[None], layout)

    def prefill(self, packed: Packed, layers: Sequence[int]) -> KVCache:
        """Stream e: run the plain LM and keep the keys and values of ``layers``, and the output of
        the layer below the first of them.
        """
        stream = Stream(packed, keep=frozenset(layers), last=max(layers))
        first = min(layers)

        def keep_output(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            stream.kept.below = output

        with ExitStack() as stack:
            if not self.trainable:
                stack.enter_context(torch.no_grad())
            if first > 0:
                stack.enter_context(self._layers[first - 1].register_forward_hook(keep_output))
            stack.enter_context(suppress(StopForward))
            self._run(self._body, stream)
        return stream.kept

    def logits(
        self,
        packed: Packed,
        memory: KVCache | None = None,
        mix: Mix | None = None,
        prefix: KVCache | None = None,
    ) -> Tensor:
        """Stream h: next-token logits (T, V). With ``packed`` alone it is the plain LM.

        Args:
            packed: the chunks.
            memory: of stream e over the same chunks, for ``mix``; the layers below its first do
                not run again.
            mix: changes the attention output.
            prefix: every layer's keys and values of a text that each chunk continues.
        """
        stream = Stream(packed, mix=mix, memory=memory, prefix=prefix)
        logits_TV: Tensor = self._run(self._inner, stream).logits[0]
        return logits_TV

    def run_attention(self, packed: Packed, mix: Mix, prefix: KVCache) -> None:
        """Run the LM up to the attention of its last layer, for a ``mix`` that observes attention;
        ``prefix`` as for ``logits``.
        """
        stream = Stream(packed, mix=mix, prefix=prefix, last=self.n_layers - 1)
        with suppress(StopForward):
            self._run(self._body, stream)

    def loss(self, packed: Packed, memory: KVCache | None = None, mix: Mix | None = None) -> Tensor:
        """Mean cross-entropy (nats per token) of all tokens but the first of each chunk; arguments
        as for ``logits``.
        """
        return self.token_losses(packed, packed.layout.with_next_R, memory, mix).mean()

    def token_losses(
        self,
        packed: Packed,
        rows_R: Tensor,
        memory: KVCache | None = None,
        mix: Mix | None = None,
        prefix: KVCache | None = None,
        *,
        exact: bool = False,
    ) -> Tensor:
        """Cross-entropy (nats) of the token after each of these rows, (R,); ``exact`` as for
        ``linear_cross_entropy``, the other arguments as for ``logits``.
        """
        stream = Stream(packed, mix=mix, memory=memory, prefix=prefix)
        targets_R = packed.ids_1T[0, rows_R + 1]
        of_head = {name for name, _ in self._head.named_parameters()}
        if not self._logits_are_heads or of_head - {"weight", "bias"}:  # scaled, or with LoRA
            logits_RV = self._run(self._inner, stream).logits[0].index_select(0, rows_R)
            wide = torch.promote_types(logits_RV.dtype, torch.float32)
            return F.cross_entropy(logits_RV.to(wide), targets_R, reduction="none")
        hidden_RD = self._run(self._body, stream).last_hidden_state[0].index_select(0, rows_R)
        weight, bias = self._head.weight, self._head.bias
        if self.bf16:  # a trained head, which is kept in fp32
            weight = weight.to(torch.bfloat16)
        return linear_cross_entropy(hidden_RD, weight, targets_R, bias, exact=exact)

    def _run(self, module: nn.Module, stream: Stream) -> Any:
        """Run the LM, or its body without the head, except layers below the memory's first."""
        # The backward pass runs a checkpointed layer again, without the streams: there the
        # in-batch attention would be missing.
        if getattr(self._inner, "is_gradient_checkpointing", False):
            raise RevelaError(
                f"gradient checkpointing is on in {self.name}: "
                "call gradient_checkpointing_disable() on the LM"
            )
        packed, memory, prefix = stream.packed, stream.memory, stream.prefix
        start = 0 if prefix is None else prefix.keys[0].shape[1]
        positions_1T = packed.layout.positions_T[None] + start
        inputs = {"position_ids": positions_1T, "use_cache": False, "stream": stream}
        with ExitStack() as stack:
            if memory is not None and (first := min(memory.keys)) > 0:
                skip = _replaced_forward(self._layers[:first], lambda *_, **__: memory.below)
                stack.enter_context(skip)
            stack.enter_context(autocast(self.device, self.bf16))
            return module(input_ids=packed.ids_1T, **inputs)


def _keep_linear_in_bf16(model: nn.Module) -> None:
    """Keep frozen linear layers in bf16; embeddings that share a head's weights keep theirs."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            for name, weight in list(layer.named_parameters(recurse=False)):
                if not weight.requires_grad:
                    half = nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
                    setattr(layer, name, half)


@contextmanager
def _replaced_forward(layers: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """While open, these layers only call ``forward``."""
    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def load_language_model(
    folder: Path, *, bf16: bool, lora: tuple[int, int, float] | None = None, name: str = ""
) -> LanguageModel:
    """Load a causal LM for the two streams, frozen or with LoRA.

    Args:
        bf16: bf16 weights (frozen), or fp32 weights under bf16 autocast (LoRA); else fp32.
        lora: rank, alpha and dropout of LoRA on every linear layer of the blocks; None: frozen.
        name: its name in messages.
    """
    model = open_causal_lm(folder, torch.bfloat16 if bf16 and lora is None else torch.float32)
    if lora is None:
        return LanguageModel(model, name or str(folder))
    from peft import LoraConfig, get_peft_model

    rank, alpha, dropout = lora
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return LanguageModel(get_peft_model(model, config), name or str(folder), bf16=bf16)


def check_language_model(folder: Path, name: str) -> LanguageModel | None:
    """Refuse a model that cannot be the LM of a run, without reading its weights.

    Returns:
        The LM without weights; None if it cannot run without them.

    Raises:
        RevelaError: as ``LanguageModel`` does, transformers has no such causal LM, or its files
            lack weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = opened(AutoConfig, folder)
    with opening(folder, "a causal LM"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    lm = None
    with suppress(NotImplementedError):  # what depends on values, such as routing to experts
        lm = LanguageModel(model.eval(), name)
    opened_model(AutoModelForCausalLM, folder, device_map="meta")
    return lm
