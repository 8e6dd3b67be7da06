"""Encoder-decoders of transformers: opened from a folder, or created untrained in a named size.

T5 with rotary positions, as "Dwell in the Beginning" trains it, is in no library; T5Gemma is the
nearest stock model. It differs from T5 by GeGLU, norms before and after each block, embeddings
times sqrt(D) and scaled attention. Cross-attention has no positions in either.

Sentence Transformers opens the encoder of such a folder as a retriever; ``EncoderDecoder.share``
puts that encoder under the decoder again.

Shapes: B texts of L tokens, T tokens that the decoder reads, D width.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revela.encoders.model_files import NEW
from revela.encoders.torch_model import special_tokens_of
from revela.errors import RevelaError
from revela.files import atomic_write, remove_whole
from revela.training.device import autocast
from revela.training.models import load_tokenizer, opened_model

log = logging.getLogger(__name__)

FOLDER = "encoder-decoder"
"Subfolder of a run's output: the whole model, whose encoder is the retriever."
SENTINELS = 128
SENTINEL = re.compile(r"<(?:extra_id_|unused)(\d+)>")  # of T5 and of Gemma
START, END, PADDING = "<s>", "</s>", "<pad>"  # ids 0, 1 and 2
ROPE_THETA, MAX_TOKENS = 8000.0, 2048
TOKENIZER_CHARACTERS = 20_000_000  # of text to train a tokenizer on


@dataclass(frozen=True)
class Size:
    """Size of a new model; ``vocabulary`` counts bytes and merges, without sentinels."""

    width: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    head_width: int
    feed_forward: int
    vocabulary: int


SIZES = {
    "tiny": Size(64, 2, 2, 2, 32, 128, 384),
    "small": Size(256, 4, 2, 4, 64, 704, 8192),
    "base": Size(512, 8, 4, 8, 64, 1408, 16384),
}


def size_of(name: str) -> Size:
    """The size that "new:SIZE" names."""
    size = name.removeprefix(NEW)
    if size not in SIZES:
        raise RevelaError(f"--model {name}: give {', '.join(NEW + size for size in SIZES)}")
    return SIZES[size]


def new_encoder_decoder(name: str, texts: Iterable[str], folder: Path, seed: int) -> None:
    """Write an untrained model, its weights drawn by ``seed``, and a tokenizer of the first texts.

    Args:
        name: "new:SIZE".
        texts: of the corpus, in random order.
    """
    from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration
    from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

    size = size_of(name)
    tokenizer = _trained_tokenizer(name, texts, size.vocabulary)
    shared = dict(
        vocab_size=len(tokenizer),
        hidden_size=size.width,
        intermediate_size=size.feed_forward,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        head_dim=size.head_width,
        query_pre_attn_scalar=size.head_width,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        **{k: getattr(tokenizer, k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    encoder, decoder = (
        T5GemmaModuleConfig(
            num_hidden_layers=layers, layer_types=["full_attention"] * layers, **shared
        )
        for layers in (size.encoder_layers, size.decoder_layers)
    )
    config = T5GemmaConfig(encoder=encoder, decoder=decoder, vocab_size=len(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = T5GemmaForConditionalGeneration(config)
    _write(model, tokenizer, folder)
    count = sum(p.numel() for p in model.parameters())
    log.info(f"{name}: {count:,} weights without training, {len(tokenizer):,} tokens")


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write both into ``folder``, and replace what is there."""
    with atomic_write(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        remove_whole(folder)


def _trained_tokenizer(name: str, texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer that ends every text by ``END``, with ``SENTINELS``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[START, END, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_until(texts, TOKENIZER_CHARACTERS), trainer)
    if (found := tokenizer.get_vocab_size()) < vocabulary:
        smaller = "" if name == f"{NEW}tiny" else f", or --model {NEW}tiny"
        raise RevelaError(
            f"the corpus has only {found:,} different tokens of the {vocabulary:,} that "
            f"--model {name} has: give more text{smaller}"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=PADDING,
        additional_special_tokens=[f"<extra_id_{i}>" for i in range(SENTINELS)],
    )


def _until(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The first texts, until they have this many characters in all."""
    for text in texts:
        if characters <= 0:
            return
        yield text
        characters -= len(text)


def is_encoder_decoder(folder: Path) -> bool:
    """Whether a model folder holds an encoder and a decoder."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError):
        return False  # opening it raises the error
    return bool(config.is_encoder_decoder)


def load_encoder_decoder(folder: Path, bf16: bool) -> EncoderDecoder:
    """Open an encoder-decoder in fp32, from its folder or from a run's output folder."""
    from transformers import AutoModelForSeq2SeqLM

    whole = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    if not is_encoder_decoder(whole):
        raise RevelaError(
            f"{folder} has no decoder: give --model {NEW}small, a T5Gemma, or a run of dwell-spans"
        )
    model = opened_model(AutoModelForSeq2SeqLM, whole, "an encoder-decoder", dtype=torch.float32)
    return EncoderDecoder(model, load_tokenizer(whole), str(folder), bf16)


class EncoderDecoder(nn.Module):
    """An encoder-decoder and its tokenizer.

    Attributes:
        sentinels: ids of the tokens that stand for a span, in order.
        start: the id that the decoder reads first.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, bf16: bool = False) -> None:
        super().__init__()
        self.model, self.tokenizer, self.name, self.bf16 = model, tokenizer, name, bf16
        numbered = (
            (int(match[1]), i)
            for token, i in tokenizer.get_vocab().items()
            if (match := SENTINEL.fullmatch(token))
        )
        self.sentinels = [i for _, i in sorted(numbered)]
        one = torch.ones(1, 1, dtype=torch.long)
        self.start = int(model.prepare_decoder_input_ids_from_labels(one)[0, 0])

    def share(self, encoder: nn.Module, tokenizer: Any) -> None:
        """Replace the encoder by one of the same form, and the tokenizer by its tokenizer.

        Only T5Gemma's sides share nothing else.
        """
        if self.model.config.model_type != "t5gemma":
            raise RevelaError(f"{self.name} is not a T5Gemma: give one, or --model {NEW}small")
        self.model.model.encoder, self.tokenizer = encoder, tokenizer

    def with_special_tokens(self, ids: Sequence[int]) -> list[int]:
        """Add the special tokens that the tokenizer puts before and after a text."""
        before, after = self._special
        return [*before, *ids, *after]

    @cached_property
    def _special(self) -> tuple[list[int], list[int]]:
        return special_tokens_of(self.tokenizer)

    def losses(self, hidden_BLD: Tensor, mask_BL: Tensor, target_BT: Tensor) -> Tensor:
        """The sum of the cross-entropies (nats) of each target's tokens, (B,), given the encoder's
        last states; -100 is padding.
        """
        with autocast(hidden_BLD.device, self.bf16):
            read_BT = self.model.prepare_decoder_input_ids_from_labels(target_BT)
            logits_BTV = self._logits(hidden_BLD, mask_BL, read_BT)
        logits_BVT = logits_BTV.float().transpose(1, 2)
        return F.cross_entropy(logits_BVT, target_BT, reduction="none").sum(dim=1)

    def _logits(self, hidden_BLD: Tensor, mask_BL: Tensor, read_BT: Tensor) -> Tensor:
        """The decoder's logits after each id that it reads, (B, T, V)."""
        from transformers.modeling_outputs import BaseModelOutput

        logits_BTV: Tensor = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden_BLD),
            attention_mask=mask_BL,
            decoder_input_ids=read_BT,
            use_cache=False,
        ).logits
        return logits_BTV

    @torch.inference_mode()
    def predict(self, ids_BL: Tensor, begin: Sequence[int], count: int) -> Tensor:
        """Decode ``count`` tokens greedily, (B, count), of a text that starts with ``begin``."""
        device = self.model.device
        mask_BL = torch.ones_like(ids_BL, device=device)
        read_BT = torch.tensor([[self.start, *begin]], device=device).repeat(len(ids_BL), 1)
        with autocast(device, self.bf16):
            hidden_BLD = self._encode(ids_BL.to(device), mask_BL)
            for _ in range(count):
                logits_BTV = self._logits(hidden_BLD, mask_BL, read_BT)
                read_BT = torch.cat([read_BT, logits_BTV[:, -1:].argmax(dim=-1)], dim=1)
        return read_BT[:, -count:].cpu()

    @torch.inference_mode()
    def pooled(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Unit vectors of texts, (B, D): the decoder's state at the id that it reads first."""
        device = self.model.device
        ids_BL, mask_BL = ids_BL.to(device), mask_BL.to(device)
        with autocast(device, self.bf16):
            state_B1D = self.model.get_decoder()(
                input_ids=torch.full((len(ids_BL), 1), self.start, device=device),
                encoder_hidden_states=self._encode(ids_BL, mask_BL),
                encoder_attention_mask=mask_BL,
                use_cache=False,
            ).last_hidden_state
        return F.normalize(state_B1D[:, 0].float(), dim=-1).cpu()

    def _encode(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        encoder = self.model.get_encoder()
        hidden_BLD: Tensor = encoder(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
        return hidden_BLD

    def save(self, folder: Path) -> None:
        """Write model and tokenizer into ``folder``, and replace what is there."""
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        _write(self.model, tokenizer, folder)
