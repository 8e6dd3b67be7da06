"""The retriever: a Sentence-Transformers model, or the lower layers of a decoder with pooling, whitening and LoRA on top.

It is made of stock modules only, so what is saved loads in stock sentence-transformers with no code of ours: the tokenizer
itself appends the EOS that ``eos`` pooling reads, prompts are stored with the model, LoRA is merged.

What is fitted to the corpus before the first update, without labels, as stock modules:
- token weights a / (a + p(token)) in the mean (SIF; Arora, Liang & Ma, ICLR 2017), so that frequent tokens count less. The
  prompts' own tokens weigh nothing: a decoder turns its first tokens into attention sinks, and so no word of the text is one;
- whitening x -> (x - mean) C^-p (Su et al., 2021), with C taken over tokens: the vectors of a raw LM share a few huge
  directions that say nothing about the text, and pooled vectors are too few and too alike to tell which;
- beside the mean of the contextual vectors, the mean of the tokens' own input embeddings, whitened over the corpus's tokens
  and each of unit length, so that a rare word can still be found by its name.
Together they are worth more than most training (docs/results.md), and give it a start from which cosines already mean something.

Shapes: N texts, T tokens, D width of the contextual vectors, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor, nn

from revela.errors import RevelaError
from revela.types import Vectors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

POOLING_MODES = {"eos": "lasttoken", "mean": "mean", "weighted-mean": "weightedmean"}
RIDGE = 1e-2  # of the mean eigenvalue: what keeps directions that the sample never used from blowing up
BATCH = 32


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

    A Sentence-Transformers folder is taken as it is (its own pooling, length and case). A decoder is cut to its lower
    ``layers`` (0: all) and pooled; its final norm stays.
    """
    prompts = {"query": query_prompt, "document": passage_prompt, "passage": passage_prompt}
    if (folder / "modules.json").is_file():
        model = load_retriever(folder)
        if query_prompt or passage_prompt:
            model.prompts = prompts
        return model
    try:
        # Named modalities keep an instruct model's chat template away: text is embedded as it is, not as a user's turn.
        transformer = modules.Transformer(
            str(folder),
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


@torch.no_grad()
def fit_to_corpus(
    model: SentenceTransformer, texts: Sequence[str], *, token_weighting: float, whitening: float, lexical: float, bf16: bool
) -> None:
    """Fit token weights, whitening and the lexical half of the vector to these texts, and insert them as stock modules.

    Args:
        model: transformer, pooling, normalisation.
        texts: a sample of the corpus's chunks.
        token_weighting: a of a / (a + p); 0: none.
        whitening: the power; 0.5 whitens fully, 0.25 halves every log-variance, 0: none.
        lexical: weight of the tokens' own embeddings against the contextual vector, in squared norm; 0: none.
        bf16: run the transformer under bf16 autocast.
    """
    transformer, pooling, normalize = model
    tokenizer = transformer.tokenizer
    counts_V = _token_counts(tokenizer, texts)
    weight_V = token_weighting / (token_weighting + counts_V / counts_V.sum()) if token_weighting else torch.ones(len(counts_V))
    weight_V[_prompt_ids(model)] = 0.0
    parts: list[nn.Module] = [transformer, pooling]
    if token_weighting:
        vocabulary = tokenizer.convert_ids_to_tokens(range(len(counts_V)))
        weights = modules.WordWeights(vocabulary, dict(zip(vocabulary, weight_V.tolist(), strict=True)))
        parts.insert(1, weights)
    _set_modules(model, parts)
    if not whitening and not lexical:
        model.append(normalize)
        return

    weight_DD, bias_D = _whitening(model, texts, whitening, bf16)
    width = len(bias_D)
    dense = modules.Dense(width, width, activation_function=nn.Identity(), init_weight=weight_DD, init_bias=bias_D)
    if lexical:
        table_VD = _lexical_table(transformer.model.get_input_embeddings().weight.float().cpu(), counts_V)
        table_VD *= weight_V[:, None]
        ids = [[i for i in row if weight_V[i] > 0] or row[:1] for row in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
        mean_norm = torch.stack([table_VD[row].sum(0).norm() / weight_V[row].sum().clamp(min=1e-9) for row in ids if row]).mean()
        # Pooling joins what lies under "cls_token_embeddings" to the mean of "token_embeddings": stock modules, no code of ours.
        dense.module_output_name = "cls_token_embeddings"
        model.append(modules.WordEmbeddings(tokenizer, table_VD * (lexical**0.5 / mean_norm)))
        model.append(dense)
        model.append(modules.Pooling(width, pooling_mode=("cls", "mean")))
    else:
        model.append(dense)
    model.append(normalize)
    model.to(model.device)


@torch.no_grad()
def lexical_vectors(model: SentenceTransformer, texts: Sequence[str], token_weighting: float) -> Vectors:
    """(N, D) unit vectors of the texts' words, without running the model: the weighted mean of its whitened input embeddings.

    Args:
        model: whose tokenizer and input embeddings to use.
        texts: documents, or the beginnings of long ones.
        token_weighting: a of a / (a + p); 0: all tokens weigh the same.
    """
    counts_V = _token_counts(model.tokenizer, texts)
    table_VD = _lexical_table(model[0].model.get_input_embeddings().weight.float().cpu(), counts_V)
    if token_weighting:
        table_VD *= (token_weighting / (token_weighting + counts_V / counts_V.sum()))[:, None]
    vectors_ND = torch.zeros(len(texts), table_VD.shape[1])
    for start in range(0, len(texts), 1024):
        for i, ids in enumerate(model.tokenizer(list(texts[start : start + 1024]), add_special_tokens=False)["input_ids"], start):
            vectors_ND[i] = table_VD[ids].sum(dim=0)
    return F.normalize(vectors_ND, dim=1).numpy()


def _token_counts(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """How often each token occurs; (V,)."""
    ids = torch.tensor([i for row in tokenizer(list(texts), add_special_tokens=False)["input_ids"] for i in row])
    return torch.bincount(ids, minlength=len(tokenizer)).float()


class _Moments:
    """Running mean and covariance of vectors (D,), in fp64."""

    def __init__(self, width: int) -> None:
        self.count, self.sum_D, self.outer_DD = 0, torch.zeros(width).double(), torch.zeros(width, width).double()

    def add(self, rows_TD: Tensor) -> None:
        rows_TD = rows_TD.double()
        self.count += len(rows_TD)
        self.sum_D += rows_TD.sum(dim=0)
        self.outer_DD += rows_TD.T @ rows_TD

    def covariance(self) -> Tensor:
        mean_D = self.sum_D / self.count
        return self.outer_DD / self.count - torch.outer(mean_D, mean_D)


@torch.no_grad()
def refit_whitening(model: SentenceTransformer, texts: Sequence[str], whitening: float, bf16: bool) -> None:
    """Fit the whitening layer anew to what training has made of the vectors. Without one, do nothing.

    Training on small groups of like documents pays for vectors that move together, and what the whitening had taken out of the
    cosines comes back (docs/log.md).

    Args:
        model: after ``fit_to_corpus``, LoRA or not.
        texts, whitening, bf16: as there.
    """
    for module in model:
        if isinstance(module, modules.Dense):
            weight_DD, bias_D = _whitening(model, texts, whitening, bf16)
            module.linear.weight.copy_(weight_DD)
            module.linear.bias.copy_(bias_D)


def _whitening(model: SentenceTransformer, texts: Sequence[str], power: float, bf16: bool) -> tuple[Tensor, Tensor]:
    """Weight (D, D) and bias (D,) of the linear layer that centres and whitens pooled vectors, to a mean norm of 1."""
    pooling = next(m for m in model if isinstance(m, modules.Pooling))
    pooled_ND, token_moments = _read_sample(model, texts, bf16)
    over_tokens = pooling.pooling_mode != "lasttoken"  # else the pooled token is of its own kind, unlike the others
    weight_DD = _inverse_power(token_moments.covariance() if over_tokens else torch.cov(pooled_ND.T), power)
    mean_D = pooled_ND.mean(dim=0)
    scale = 1.0 / ((pooled_ND - mean_D) @ weight_DD).norm(dim=1).mean().clamp(min=1e-12)
    return (scale * weight_DD.T).float().contiguous(), (-scale * (mean_D @ weight_DD)).float()


def _prompt_ids(model: SentenceTransformer) -> list[int]:
    """Tokens of the prompts, which weigh nothing."""
    return [
        i for prompt in model.prompts.values() if prompt for i in model.tokenizer(prompt.rstrip(), add_special_tokens=False)["input_ids"]
    ]


def _read_sample(model: SentenceTransformer, texts: Sequence[str], bf16: bool) -> tuple[Tensor, _Moments]:
    """Pooled vectors of passages (N, D) in fp64, and moments of the token vectors under them (prompts and padding left out)."""
    training = model.training
    model.eval()
    prompt = model.prompts.get("document") or ""
    prompt_ids = torch.tensor(_prompt_ids(model), device=model.device)
    parts = list(model)
    transformer, *rest = parts[: 1 + next(i for i, m in enumerate(parts) if isinstance(m, modules.Pooling))]
    pooled, moments = [], _Moments(transformer.get_embedding_dimension())
    ordered = sorted(texts, key=len)  # batches of like lengths
    for start in range(0, len(ordered), BATCH):
        batch = [t if t.strip() else "." for t in ordered[start : start + BATCH]]
        features = {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in model.preprocess(batch, prompt=prompt).items()}
        with autocast(model.device, bf16):
            features = transformer(features)
            kept_NT = features["attention_mask"].bool() & ~torch.isin(features["input_ids"], prompt_ids)
            moments.add(features["token_embeddings"][kept_NT].cpu())
            for module in rest:
                features = module(features)
        pooled.append(features["sentence_embedding"].cpu().double())
    model.train(training)
    return torch.cat(pooled), moments


def _inverse_power(covariance_DD: Tensor, power: float) -> Tensor:
    """C ** -power of a covariance, in fp64, with a ridge."""
    values_D, vectors_DD = torch.linalg.eigh(covariance_DD)
    values_D = values_D.clamp(min=0) + RIDGE * values_D.clamp(min=0).mean().clamp(min=1e-12)
    power_DD: Tensor = vectors_DD @ torch.diag(values_D.pow(-power)) @ vectors_DD.T
    return power_DD


def _lexical_table(embeddings_VD: Tensor, counts_V: Tensor) -> Tensor:
    """A unit vector for each token of the vocabulary: its input embedding, whitened over the corpus's tokens."""
    unit_VD = F.normalize(embeddings_VD[: len(counts_V)], dim=1).double()
    share_V1 = (counts_V / counts_V.sum()).double()[:, None]
    centred_VD = unit_VD - (share_V1 * unit_VD).sum(dim=0)
    covariance_DD = centred_VD.T @ (share_V1 * centred_VD)
    return F.normalize(centred_VD @ _inverse_power(covariance_DD, 0.5), dim=1).float()


def _set_modules(model: SentenceTransformer, parts: Sequence[nn.Module]) -> None:
    model._modules.clear()
    for i, part in enumerate(parts):
        model.add_module(str(i), part.to(model.device))


class RetrieverEncoder:
    """The ``Encoder`` of a Sentence-Transformers model: prompts by role, unit vectors, bf16 where the hardware has it.

    Args:
        model: any Sentence-Transformers model.
        bf16: run the transformer under bf16 autocast.
        max_tokens: cut texts here instead of at the model's own limit.
    """

    def __init__(self, model: SentenceTransformer, bf16: bool, max_tokens: int | None = None) -> None:
        self.model, self.bf16, self.max_tokens = model, bf16, max_tokens

    def encode_queries(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) float32 vectors of these texts as queries."""
        return self._encode(texts, ["query"], progress)

    def encode_passages(self, texts: Sequence[str], progress: bool = False) -> Vectors:
        """(N, D) float32 vectors of these texts as passages."""
        return self._encode(texts, ["document", "passage"], progress)

    def _encode(self, texts: Sequence[str], prompt_names: Sequence[str], progress: bool) -> Vectors:
        prompt = next((self.model.prompts[name] for name in prompt_names if self.model.prompts.get(name)), "")
        training = self.model.training
        limit = self.model.max_seq_length
        if self.max_tokens is not None:
            self.model.max_seq_length = min(self.max_tokens, limit or self.max_tokens)
        try:
            with autocast(self.model.device, self.bf16):
                # An empty text has no token to pool.
                vectors = self.model.encode(
                    [text if text.strip() else "." for text in texts],
                    prompt=prompt,
                    batch_size=BATCH,
                    show_progress_bar=progress,
                    convert_to_numpy=True,
                )
        finally:
            self.model.max_seq_length = limit
            self.model.train(training)
        return np.asarray(vectors, dtype=np.float32)


@contextlib.contextmanager
def autocast(device: torch.device, bf16: bool) -> Iterator[None]:
    """bf16 autocast on this device, or nothing."""
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
        yield


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 matrix products are native here; where they are not they are emulated and slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def changing_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter that a run changes, by name: what has a gradient, and the whitening, which is fitted anew."""
    fitted = {id(p) for m in module.modules() if isinstance(m, modules.Dense) for p in m.parameters()}
    return {name: p for name, p in module.named_parameters() if p.requires_grad or id(p) in fitted}


def trainable_state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of ``changing_parameters``."""
    return {name: p.detach().cpu().clone().contiguous() for name, p in changing_parameters(module).items()}
