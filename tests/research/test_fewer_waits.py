"""Code written to avoid waits of the host for a GPU is bit-identical to the plain form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from conftest import tiny_config
from revela.lm.document_weights import DocumentWeights
from revela.lm.language_model import LanguageModel
from revela.objectives.revela import TINY, in_batch_weights


def masked_out(query_BD, passage_BD, tau):
    """Standardised Sim with a boolean mask for the diagonal."""
    scores_BB = F.normalize(query_BD, dim=-1) @ F.normalize(passage_BD, dim=-1).T
    diagonal_BB = torch.eye(len(scores_BB), dtype=torch.bool)
    others_BB = scores_BB[~diagonal_BB].view(len(scores_BB), -1)
    scores_BB = scores_BB / (others_BB.var(dim=1, correction=0, keepdim=True) + TINY).sqrt()
    return (scores_BB / tau).masked_fill(diagonal_BB, -torch.inf).softmax(dim=-1)


@pytest.mark.parametrize("size", [2, 3, 16])
def test_sim_without_its_diagonal(size):
    generator = torch.Generator().manual_seed(size)
    query, passage = (torch.randn(size, 8, generator=generator).requires_grad_() for _ in range(2))
    direction = torch.randn(size, size, generator=generator)
    found = []
    for weights in (
        in_batch_weights(query, passage, 0.5, standardise=True),
        masked_out(query, passage, 0.5),
    ):
        found.append([weights, *torch.autograd.grad((weights * direction).sum(), (query, passage))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_readers_of_all_documents_at_once():
    generator = torch.Generator().manual_seed(0)
    lengths, epsilon = [3, 1, 5, 2, 4, 2], 0.4
    weights = torch.rand(6, 6, generator=generator).fill_diagonal_(0)
    weights[:, 1], weights[:, 4] = 0.0, 1.0  # nobody reads one, everybody the other
    owner = torch.repeat_interleave(torch.tensor(lengths))
    documents = DocumentWeights(weights, lengths, epsilon=epsilon)
    turns = {readers.index: readers.rows_R for readers in documents.readers}
    assert set(turns) == {0, 2, 3, 4, 5} and [j for j, rows in turns.items() if rows is None] == [4]
    for j in (0, 2, 3, 5):
        assert torch.equal(turns[j], (weights[:, j] > epsilon)[owner].nonzero().squeeze(1))


def test_lengths_of_a_batch():
    lm = LanguageModel(LlamaForCausalLM(tiny_config("llama")).eval().requires_grad_(False))
    packed = lm.pack(
        torch.arange(12).view(3, 4), torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [1, 1, 1, 1]])
    )
    assert packed.lengths == (3, 1, 4) and all(type(n) is int for n in packed.lengths)
