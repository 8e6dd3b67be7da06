"""The retriever: a Sentence-Transformers model, or the lower layers of a decoder with pooling and LoRA on top.

It is made of stock modules only, so what is saved loads in stock sentence-transformers with no code of ours: the tokenizer
itself appends the EOS that ``eos`` pooling reads, prompts are stored with the model, LoRA is merged. What is fitted to the
corpus before the first update is in corpus_fit.py.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor, nn
from tqdm import tqdm

from revela.config import Precision
from revela.errors import RevelaError
from revela.models.packed import packed
from revela.models.quiet import quieten
from revela.types import Vectors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

POOLING_MODES = {"eos": "lasttoken", "mean": "mean", "weighted-mean": "weightedmean"}
TOKENS_A_BATCH, READ_AHEAD = 8192, 4096  # of encoding; texts that are tokenized and sorted at once


def load_retriever(folder: Path | str) -> SentenceTransformer:
    """Open a saved retriever or any Sentence-Transformers folder, on the best device at hand.

    Raises:
        RevelaError: the folder is not one.
    """
    if not (Path(folder) / "modules.json").is_file():
        raise RevelaError(f"{folder} is not a Sentence-Transformers folder: it has no modules.json")
    try:
        return SentenceTransformer(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise RevelaError(f"{folder} cannot be opened as a Sentence-Transformers model: {str(error).splitlines()[0]}") from error


def build_retriever(
    folder: Path,
    *,
    layers: int,
    pooling: str,
    max_tokens: int,
    lower_case: bool,
    query_prompt: str,
    passage_prompt: str,
) -> SentenceTransformer:
    """The untrained retriever from a model folder.

    A Sentence-Transformers folder is taken as it is (its own pooling, prompts, length and case). A decoder is cut to its lower
    ``layers`` (0: all) and pooled; its final norm stays. Weights are fp32, whatever they were stored in: small updates of LoRA would be
    rounded away in bf16.
    """
    if (folder / "modules.json").is_file():
        return load_retriever(folder).float()
    try:
        # Named modalities keep an instruct model's chat template away: text is embedded as it is, not as a user's turn.
        transformer = modules.Transformer(
            str(folder),
            model_kwargs={"dtype": torch.float32},
            max_seq_length=max_tokens,
            do_lower_case=lower_case,
            modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            module_output_name="token_embeddings",
        )
    except (OSError, ValueError, KeyError) as error:
        raise RevelaError(f"{folder} cannot be opened as a model: {str(error).splitlines()[0]}") from error
    _keep_lower_layers(transformer.model, layers)
    tokenizer = transformer.tokenizer
    tokenizer.padding_side = "right"
    tokenizer.chat_template = None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if pooling == "eos":
        _append_eos(tokenizer)
    width = transformer.get_embedding_dimension()
    parts = [transformer, modules.Pooling(width, pooling_mode=POOLING_MODES[pooling]), modules.Normalize()]
    prompts = {"query": query_prompt, "document": passage_prompt, "passage": passage_prompt}
    return SentenceTransformer(modules=parts, prompts=prompts, similarity_fn_name="cosine")


def _keep_lower_layers(model: PreTrainedModel, layers: int) -> None:
    depth = int(model.config.num_hidden_layers)
    if not layers or layers >= depth:
        return
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                setattr(module, name, child[:layers])
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]


def _append_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    """Let the tokenizer end every text with EOS, after truncation, keeping whatever it already puts in front."""
    from tokenizers.processors import TemplateProcessing

    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a")["input_ids"]
    before = special[: special.index(plain[0])]
    if special[-1] == tokenizer.eos_token_id and len(special) > len(before) + len(plain):
        return
    front = tokenizer.convert_ids_to_tokens(before)
    tokens = [*front, tokenizer.eos_token]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*front, "$A", tokenizer.eos_token],
        special_tokens=[(t, tokenizer.convert_tokens_to_ids(t)) for t in dict.fromkeys(tokens)],
    )


def add_lora(model: SentenceTransformer, rank: int, alpha: int, dropout: float) -> None:
    """Freeze the model and put LoRA on the linear layers inside the transformer's blocks, in place."""
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    transformer = model[0].model
    targets = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear) and "layer" in name]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets), transformer)


@contextlib.contextmanager
def without_lora(model: SentenceTransformer) -> Iterator[None]:
    """Inside, the model is what it was before ``add_lora``."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged(model: SentenceTransformer) -> SentenceTransformer:
    """A copy with LoRA merged into the weights, made of stock modules only."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = copy.deepcopy(model).cpu()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer):
                child.merge()
                setattr(parent, name, child.get_base_layer())
    if hasattr(model[0].model, "peft_config"):
        del model[0].model.peft_config
    for module in model:
        if isinstance(module, modules.WordWeights):  # its weights are stored in its configuration
            module.word_weights = dict(zip(module.vocab, module.emb_layer.weight[:, 0].tolist(), strict=True))
    return model.requires_grad_(False).eval()


def query_prompt_of(model: SentenceTransformer) -> str:
    """What this model puts before queries; "" if nothing."""
    return model.prompts.get("query") or ""


def passage_prompt_of(model: SentenceTransformer) -> str:
    """What this model puts before passages, under either of the two names in use; "" if nothing."""
    return model.prompts.get("document") or model.prompts.get("passage") or ""


class RetrieverEncoder:
    """The ``Encoder`` of a Sentence-Transformers model: prompts by role, unit vectors, bf16 where the hardware has it.

    Args:
        model: any Sentence-Transformers model.
        bf16: run the transformer under bf16 autocast.
        max_tokens: cut texts here instead of at the model's own limit.
    """

    def __init__(self, model: SentenceTransformer, bf16: bool, max_tokens: int | None = None) -> None:
        self.model, self.bf16, self.max_tokens = model, bf16, max_tokens
        self._lock = threading.Lock()  # reading changes the model for as long as it takes

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) float32 vectors of these texts as queries."""
        return self._encode(texts, query_prompt_of(self.model), progress)

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) float32 vectors of these texts as passages."""
        return self._encode(texts, passage_prompt_of(self.model), progress)

    def encode_with_tokens(self, texts: Sequence[str], progress: bool = False) -> tuple[Vectors, list[Vectors]]:
        """What ``encode_passages`` gives, and each passage's token vectors, (T, W) float32 of length one, from the same reading.

        Token vectors are those of the transformer's last layer, put through the linear layer after the pooling where the model
        has one (the mean of a text's tokens goes through it too). Prompts and special tokens are left out.

        Raises:
            RevelaError: the model has no transformer, and so no tokens that know of one another.
        """
        tokens: list[Vectors] = [np.empty(0, np.float32)] * len(texts)
        return self._encode(texts, passage_prompt_of(self.model), progress, tokens), tokens

    def query_tokens(self, query: str) -> tuple[Vectors, list[tuple[int, int]]]:
        """A query's token vectors, as above, and where in the query each token stands, (first, past the last) character."""
        tokens = [np.empty(0, np.float32)]
        self._encode([query], query_prompt_of(self.model), False, tokens)
        prompt = query_prompt_of(self.model)
        read = self.model.tokenizer(prompt + query, return_offsets_mapping=True)
        special = set(self.model.tokenizer.all_special_ids)
        spans = [span for i, span in zip(read["input_ids"], read["offset_mapping"], strict=True) if i not in special]
        spans = spans[_prompted(self.model, prompt) :][: len(tokens[0])]
        return tokens[0], [(max(0, first - len(prompt)), past - len(prompt)) for first, past in spans]

    @torch.inference_mode()
    def _encode(self, texts: Sequence[str], prompt: str, progress: bool, tokens: list[Vectors] | None = None) -> Vectors:
        model = self.model
        with self._lock, self._reading(), autocast(model.device, self.bf16), without_padding(model):
            if not isinstance(model[0], modules.Transformer):  # static embeddings and the like have their own features
                if tokens is not None:
                    raise RevelaError("this model has no transformer, and so no token vectors: search without --rerank and --keep-tokens")
                return np.asarray(model.encode(list(texts), prompt=prompt, show_progress_bar=progress), dtype=np.float32)
            width = model.get_embedding_dimension()
            vectors_ND = np.empty((len(texts), width), dtype=np.float32)
            with tqdm(total=len(texts), unit="text", disable=not progress) as bar:
                for indices, features in token_batches(model, texts, prompt):
                    transformer, *rest = model
                    features = transformer(features)
                    if tokens is not None:
                        for i, vectors_TW in zip(indices, _token_vectors(model, features, prompt), strict=True):
                            tokens[i] = vectors_TW
                    for module in rest:
                        features = module(features)
                    vectors_ND[indices] = features["sentence_embedding"][:, :width].float().cpu().numpy()
                    bar.update(len(indices))
            return vectors_ND

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """While open, texts are cut at ``max_tokens`` and nothing is dropped out."""
        model, training, limit = self.model, self.model.training, self.model.max_seq_length
        if self.max_tokens is not None:
            model.max_seq_length = min(self.max_tokens, limit or self.max_tokens)
        model.eval()
        try:
            yield
        finally:
            if self.max_tokens is not None:  # static embeddings have no such thing to set
                model.max_seq_length = limit
            model.train(training)


def _token_vectors(model: SentenceTransformer, features: dict[str, Any], prompt: str) -> list[Vectors]:
    """The token vectors of each text of a batch that the transformer has read; see ``encode_with_tokens``."""
    ids_BT, vectors_BTW = features["input_ids"], features["token_embeddings"]
    special = torch.tensor(model.tokenizer.all_special_ids, device=ids_BT.device)
    kept_BT = features["attention_mask"].bool() & ~torch.isin(ids_BT, special)
    kept_BT &= kept_BT.cumsum(dim=1) > _prompted(model, prompt)
    pooling = next((i for i, module in enumerate(model) if isinstance(module, modules.Pooling)), len(model))
    linear = next((m.linear for m in list(model)[pooling:] if isinstance(m, modules.Dense)), None)
    rows = []
    for vectors_TW, kept_T in zip(vectors_BTW, kept_BT, strict=True):
        found_TW = vectors_TW[kept_T]
        if linear is not None and linear.in_features == found_TW.shape[1]:
            found_TW = linear(found_TW)
        rows.append(torch.nn.functional.normalize(found_TW.float(), dim=1).cpu().numpy())
    return rows


def _prompted(model: SentenceTransformer, prompt: str) -> int:
    """How many tokens a prompt is; the space at its end belongs to the text."""
    return len(model.tokenizer(prompt.rstrip(), add_special_tokens=False)["input_ids"]) if prompt else 0


def load_encoder(folder: Path, precision: Precision, max_tokens: int | None = None) -> RetrieverEncoder:
    """The encoder of a saved retriever, or of any Sentence-Transformers folder."""
    quieten()
    model = load_retriever(folder)
    return RetrieverEncoder(model, uses_bf16(precision, model.device), max_tokens)


def token_batches(model: SentenceTransformer, texts: Sequence[str], prompt: str) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Texts of like length together, as many as the token budget holds; (their indices, features), longest first."""
    by_length = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    for start in range(0, len(by_length), READ_AHEAD):
        window = by_length[start : start + READ_AHEAD]
        # An empty text has no token to pool.
        features = model.preprocess([texts[i] if texts[i].strip() else "." for i in window], prompt=prompt or None)
        mask_NL = features["attention_mask"]
        tokens = mask_NL.sum(dim=1)
        order = tokens.argsort(descending=True, stable=True).tolist()
        while order:
            longest = int(tokens[order[0]])
            size = max(1, TOKENS_A_BATCH // longest)
            rows, order = order[:size], order[size:]
            columns = slice(0, longest) if bool(mask_NL[:, 0].all()) else slice(mask_NL.shape[1] - longest, None)
            batch = {k: v[rows][:, columns] if isinstance(v, Tensor) and v.shape == mask_NL.shape else v for k, v in features.items()}
            yield [window[i] for i in rows], {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def without_padding(model: SentenceTransformer) -> contextlib.AbstractContextManager[None]:
    """While open, the model's transformer spends nothing on padding, if it can be run so."""
    return packed(model[0].model) if isinstance(model[0], modules.Transformer) else contextlib.nullcontext()


@contextlib.contextmanager
def autocast(device: torch.device, bf16: bool) -> Iterator[None]:
    """bf16 autocast on this device, or nothing."""
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
        yield


def compute_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 matrix products are native here; where they are not they are emulated and slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def uses_bf16(precision: Precision, device: torch.device) -> bool:
    """Whether to compute in bf16 here: when told to, or on "auto" where it is fast."""
    return precision == "bf16" or (precision == "auto" and has_fast_bf16(device))


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter that a run changes, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def trainable_state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of ``trainable_parameters``."""
    return {name: p.detach().cpu().clone().contiguous() for name, p in trainable_parameters(module).items()}
