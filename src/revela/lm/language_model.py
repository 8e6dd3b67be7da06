"""The language model of the signal: any decoder-only causal LM of transformers, read as two
streams.

Revela's LM runs over a group twice. Stream e is the plain LM over each chunk; stream h is the same
LM over the same chunks, whose attention may also read e's keys and values of the *other* chunks
(Revela, section 3.2). How that reading is mixed in is the objective's affair: it hands a ``Mix`` to
``predict``.

With packed.py, this is all that knows transformers' internals. The attention is registered with
``AttentionInterface``; no model code is copied or patched on disk. What is exact and cheap here:
- chunks are packed one after another into one row, so that padding costs nothing; each keeps its
  own positions (packed.py);
- below the first mixed layer both streams are equal, so h starts from e's output there;
- e ends with the keys and values of the last mixed layer; it never meets the LM head;
- a frozen LM's e stream records no graph;
- the loss never holds the logits of more than a block of rows (linear_cross_entropy.py).

Shapes: B chunks of up to L tokens, T tokens in all, H query heads, G key-value heads, D head width,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from revela.errors import RevelaError
from revela.lm.cross_entropy import linear_cross_entropy
from revela.lm.streams import AllRead, Memory, Mix, Predicting, Reading, Stream, Watching
from revela.packing import Layout, attention, no_mask

ATTENTION = "revela"
USE = "use a Llama, Qwen2/3, Gemma 3, Mistral or GPT-NeoX model as --lm"


@dataclass(frozen=True)
class Packed:
    """Chunks one after another: token ids (1, T), and where each chunk lies."""

    ids_1T: Tensor
    layout: Layout

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each chunk."""
        return self.layout.lengths


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    stream: Stream | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed chunk; then what the stream makes of it."""
    if stream is None:
        raise RevelaError(
            "this model's attention belongs to a revela.lm.LanguageModel: call its read() and predict()"
        )
    if kwargs.get("s_aux") is not None:
        raise RevelaError(
            "attention sinks are not carried by in-batch attention: use a Llama, Qwen or Gemma 3 model as --lm"
        )
    layer = int(module.layer_idx)
    stream.see(layer, key[0], value[0])
    before = stream.before(layer)
    longest = max(stream.layout.lengths) + (0 if before is None else before[0].shape[1])
    if sliding_window is not None and longest > sliding_window:
        raise RevelaError(
            f"a text of {longest} tokens is longer than the LM's sliding window of {sliding_window}: use --lm-tokens"
        )
    own_THD = attention(
        query[0],
        key[0],
        value[0],
        stream.layout,
        causal=True,
        scale=scaling,
        dropout=dropout,
        before=before,
    )
    mixed_HTD = stream.change(layer, own_THD.transpose(0, 1), query[0], key[0], value[0], scaling)
    return mixed_HTD.transpose(0, 1)[None].contiguous(), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, no_mask)


class LanguageModel(nn.Module):
    """A causal LM that can be read (stream e) and asked to predict with in-batch attention (stream
    h).

    Args:
        model: a decoder-only causal LM of transformers, or a PEFT model around one. It is switched
            to our attention.
        name: what to call it in messages.
        bf16: run under bf16 autocast, for weights that are kept in fp32 to be trained.

    Raises:
        RevelaError: the model cannot carry in-batch attention (encoder-decoder, soft-capped scores,
            attention sinks, layers that do not go through the attention interface) or has gradient
            checkpointing on.
    """

    _inner: Any

    def __init__(self, model: Any, name: str = "the language model", bf16: bool = False) -> None:
        super().__init__()
        self.model = model
        self.name, self.bf16 = name, bf16
        # PEFT puts LoRA into the model it wraps, so what lies inside is what runs.
        inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._inner = inner
        config = inner.config.get_text_config()
        self.n_layers, self.n_heads = int(config.num_hidden_layers), int(config.num_attention_heads)
        self._refuse_what_it_cannot_carry(config)
        inner.set_attn_implementation(ATTENTION)
        self._layers = self._decoder_layers()
        self._try_it()

    def _refuse_what_it_cannot_carry(self, config: Any) -> None:
        if getattr(config, "is_encoder_decoder", False):
            raise RevelaError(
                f"{self.name} is an encoder-decoder: in-batch attention needs a decoder-only LM; {USE}"
            )
        if (
            not getattr(self._inner, "_supports_attention_backend", False)
            or not self._inner._supports_sdpa
        ):
            raise RevelaError(
                f"{self.name} ({config.model_type}) does not go through transformers' AttentionInterface; {USE}"
            )
        if getattr(config, "attn_logit_softcapping", None):
            raise RevelaError(
                f"{self.name} ({config.model_type}) soft-caps its attention scores, which SDPA cannot do; {USE}"
            )

    def _decoder_layers(self) -> nn.ModuleList:
        for module in self._inner.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.n_layers:
                return module
        raise RevelaError(f"{self.name}: no list of {self.n_layers} decoder layers found; {USE}")

    @torch.no_grad()
    def _try_it(self) -> None:
        ones = torch.ones(1, 2, dtype=torch.long)
        packed = self.pack(ones, ones)
        stream = Stream(packed.layout)
        logits_TV = self._run(self._inner, packed, stream).logits[0]
        if missing := sorted(set(range(self.n_layers)) - stream.seen):
            raise RevelaError(
                f"{self.name} ({self._inner.config.model_type}): layers {missing[:8]} do not go through transformers' "
                f"AttentionInterface; {USE}"
            )
        # Some models scale or cap their logits; for those the head is not all there is.
        self._head = self._inner.get_output_embeddings()
        hidden_TD = self._run(self._inner.base_model, packed, stream).last_hidden_state[0]
        with self._autocast():
            self._head_is_all = torch.allclose(
                self._head(hidden_TD), logits_TV, rtol=1e-3, atol=1e-4
            )

    @property
    def device(self) -> torch.device:
        return torch.device(self._inner.device)

    @property
    def trainable(self) -> bool:
        return any(p.requires_grad for p in self.model.parameters())

    def pack(self, ids_BL: Tensor, mask_BL: Tensor) -> Packed:
        """Drop the padding of a batch, wherever it is. Each chunk's positions count from 0."""
        keep = mask_BL.bool()
        lengths = tuple(keep.sum(dim=1).tolist())
        return Packed(ids_BL[keep][None].to(self.device), Layout(lengths, self.device))

    def read(self, packed: Packed, layers: Sequence[int]) -> Memory:
        """Stream e: run the plain LM and keep the keys and values of ``layers`` (and what lies
        below the first).

        A frozen LM records no graph.
        """
        self._refuse_checkpointing()
        reading = Reading(packed.layout, layers)
        first = min(layers)
        with ExitStack() as stack:
            if not self.trainable:
                stack.enter_context(torch.no_grad())
            if first > 0:
                stack.enter_context(
                    _watched(
                        self._layers[first - 1], lambda out: setattr(reading.memory, "below", out)
                    )
                )
            stack.enter_context(suppress(AllRead))
            self._run(self._inner.base_model, packed, reading)
        self._check_seen(reading.seen, layers)
        return reading.memory

    def predict(
        self,
        packed: Packed,
        memory: Memory | None = None,
        mix: Mix | None = None,
        before: Memory | None = None,
    ) -> Tensor:
        """Stream h: next-token logits (T, V). Without anything else it is the plain LM.

        Args:
            packed: the chunks.
            memory: what stream e left of the same chunks, for ``mix``; below its first layer
                nothing runs again.
            mix: changes what attention gives.
            before: of every layer, a text that each chunk continues.
        """
        logits_TV: Tensor = self._predict(self._inner, packed, memory, mix, before).logits[0]
        return logits_TV

    def watch(self, packed: Packed, layers: Sequence[int], mix: Mix, before: Memory) -> None:
        """Show ``mix`` the attention of chunks that continue a text; nothing runs above the last of
        ``layers``.

        Args:
            packed: the chunks.
            layers: what to see; all layers below the last are shown too.
            mix: as for ``predict``.
            before: of every layer up to the last, the text that each chunk continues.
        """
        stream = Watching(packed.layout, layers, mix, before)
        with suppress(AllRead):
            self._run(self._inner.base_model, packed, stream, before.length)
        self._check_seen(stream.seen, layers)

    def loss(self, packed: Packed, memory: Memory | None = None, mix: Mix | None = None) -> Tensor:
        """Mean cross-entropy (nats) of every token of every chunk but its first, given what
        precedes it (Revela, eq. 8).
        """
        return self.token_losses(
            packed, packed.layout.has_next_T.nonzero().squeeze(1), memory, mix
        ).mean()

    def token_losses(
        self,
        packed: Packed,
        rows_R: Tensor,
        memory: Memory | None = None,
        mix: Mix | None = None,
        before: Memory | None = None,
    ) -> Tensor:
        """Cross-entropy (nats) of the token that follows each of these rows, (R,); the rest as in
        ``predict``.
        """
        targets_R = packed.ids_1T[0, rows_R + 1]
        if not self._head_is_all or any(p.requires_grad for p in self._head.parameters()):
            logits_RV = self.predict(packed, memory, mix, before).index_select(0, rows_R)
            return F.cross_entropy(
                logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)),
                targets_R,
                reduction="none",
            )
        hidden_RD = (
            self._predict(self._inner.base_model, packed, memory, mix, before)
            .last_hidden_state[0]
            .index_select(0, rows_R)
        )
        weight_VD = self._head.weight.to(torch.bfloat16) if self.bf16 else self._head.weight
        return linear_cross_entropy(hidden_RD, weight_VD, targets_R, self._head.bias)

    def _predict(
        self,
        module: nn.Module,
        packed: Packed,
        memory: Memory | None,
        mix: Mix | None,
        before: Memory | None,
    ) -> Any:
        """``module``, the LM or its body without the head, as stream h."""
        if mix is not None:
            self._refuse_checkpointing()
        predicting = Predicting(packed.layout, memory, mix, before)
        with ExitStack() as stack:
            if memory is not None and (first := min(memory.keys)) > 0:
                stack.enter_context(_replaced(self._layers[:first], lambda *_, **__: memory.below))
            output = self._run(module, packed, predicting, 0 if before is None else before.length)
        self._check_seen(predicting.seen, () if memory is None else memory.keys)
        return output

    def _run(self, module: nn.Module, packed: Packed, stream: Stream, start: int = 0) -> Any:
        positions_1T = packed.layout.positions_T[None] + start
        with self._autocast():
            return module(
                input_ids=packed.ids_1T, position_ids=positions_1T, use_cache=False, stream=stream
            )

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def _refuse_checkpointing(self) -> None:
        # A checkpointed layer is run again in the backward pass, outside the streams: the in-batch
        # attention would vanish there.
        if getattr(self._inner, "is_gradient_checkpointing", False):
            raise RevelaError(
                f"gradient checkpointing is on in {self.name}: call gradient_checkpointing_disable() on the LM"
            )

    def _check_seen(self, seen: set[int], wanted: Any) -> None:
        if missing := sorted(set(wanted) - seen):
            raise RevelaError(
                f"{self.name}: layers {missing} ran without in-batch attention; {USE}"
            )


def load_language_model(
    folder: Path, *, bf16: bool, lora: Mapping[str, Any] | None = None, name: str = ""
) -> LanguageModel:
    """A causal LM from a local folder: frozen, in bf16 if asked; or with LoRA to be trained, its
    own weights kept in fp32.

    Args:
        folder: of transformers.
        bf16: bf16 weights (frozen), or bf16 autocast (trained).
        lora: rank, alpha and dropout of LoRA on every linear layer of the blocks; None freezes the
            LM.
        name: what to call it in messages.
    """
    model = open_causal_lm(folder, torch.bfloat16 if bf16 and lora is None else torch.float32)
    if lora is None:
        return LanguageModel(model, name or str(folder))
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        lora_dropout=lora["dropout"],
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return LanguageModel(get_peft_model(model, config), name or str(folder), bf16=bf16)


def open_causal_lm(folder: Path, dtype: torch.dtype) -> Any:
    """A causal LM of transformers from a local folder, frozen."""
    from transformers import AutoModelForCausalLM

    return _opened(AutoModelForCausalLM, folder, dtype=dtype).requires_grad_(False).eval()


def load_tokenizer(folder: Path) -> Any:
    """An LM's tokenizer with a padding token."""
    from transformers import AutoTokenizer

    tokenizer = _opened(AutoTokenizer, folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _opened(kind: Any, folder: Path, **settings: Any) -> Any:
    try:
        return kind.from_pretrained(folder, local_files_only=True, **settings)
    except (OSError, ValueError, KeyError) as error:
        raise RevelaError(
            f"{folder} cannot be opened as a causal LM: {str(error).splitlines()[0]}"
        ) from error


@contextmanager
def _watched(layer: nn.Module, see: Callable[[Any], Any]) -> Iterator[None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        see(output)

    handle = layer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _replaced(layers: Any, forward: Callable[..., Any]) -> Iterator[None]:
    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
