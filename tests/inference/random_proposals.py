"""Random proposals and policies for the law tests: any tree, any mix of trial laws, any overlap.

Letters: B rows, N nodes, T trials, R rows of q, V vocabulary.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from inference.proposal import Proposal

KINDS = ("dense", "zeros", "one_hot", "ties")


class TablePolicy:
    """p given outright: probs_BNV. It answers what `TreePolicy` answers."""

    def __init__(self, probs_BNV: Tensor):
        self.probs_BNV = probs_BNV

    def at(self, node_B: Tensor) -> Tensor:
        rows_B = torch.arange(len(node_B), device=node_B.device)
        return self.probs_BNV[rows_B.view(-1, *[1] * (node_B.dim() - 1)), node_B]

    def argmax(self, node_B: Tensor) -> Tensor:
        best_B, token_B = self.at(node_B).max(-1)
        return torch.where(best_B.isnan(), -1, token_B)

    def row(self, row: int) -> TablePolicy:
        return TablePolicy(self.probs_BNV[row : row + 1])


def random_probs(shape: tuple[int, ...], vocab: int, generator: torch.Generator) -> Tensor:
    """float64 [*shape, V]; each row dense, with zeros, one-hot, or with ties."""
    size = (*shape, vocab)
    weights = torch.rand(size, generator=generator, dtype=torch.float64) + 0.01
    kind = torch.randint(len(KINDS), shape, generator=generator)[..., None]
    keep = torch.randint(vocab, shape, generator=generator)[..., None] == torch.arange(vocab)
    dropped = (torch.rand(size, generator=generator) < 0.5) & ~keep
    weights = torch.where((kind == 1) & dropped, 0.0, weights)
    weights = torch.where(kind == 2, keep.double(), weights)
    weights = torch.where(kind == 3, 1.0 + (weights > 0.5), weights)
    return weights / weights.sum(-1, keepdim=True)


def random_case(
    seed: int, batch: int, vocab: int = 5, num_trials: int = 7, max_depth: int = 3
) -> tuple[Proposal, TablePolicy]:
    """A proposal whose rows have unlike trees, with rows of q shared by trials, and its policy.

    Some trials are missing, several may name one node, wor draws may exhaust q, and now and then
    p at a node is a row of q itself.
    """
    generator = torch.Generator().manual_seed(seed)
    below = random.Random(seed).randrange

    num_rows = 3
    laws = tuple(("delta", "iid", "wor")[below(3)] for _ in range(num_trials))
    rows = tuple(-1 if law == "delta" else below(num_rows) for law in laws)
    q_BRV = random_probs((batch, num_rows), vocab, generator)
    tokens_BN = torch.randint(vocab, (batch, num_trials + 2), generator=generator)
    tokens_BN[:, -1] = 0  # padding carries token 0
    parents_BN = torch.full_like(tokens_BN, -2)
    parents_BN[:, 0] = -1
    trial_parent_BT = torch.full((batch, num_trials), -1)
    trial_child_BT = torch.full((batch, num_trials), -1)
    possible_BRV = (q_BRV > 0).tolist()
    for b in range(batch):
        nodes: dict[tuple[int, int], int] = {}
        depths = [0]
        taken: set[tuple[int, int, int]] = set()
        for t, (law, row) in enumerate(zip(laws, rows, strict=True)):
            open_nodes = [n for n, depth in enumerate(depths) if depth < max_depth]
            parent = open_nodes[min(below(len(open_nodes)), below(len(open_nodes)))]
            possible = list(range(vocab))
            if law != "delta":
                possible = [x for x in possible if possible_BRV[b][row][x]]
            if law == "wor":
                possible = [x for x in possible if (row, parent, x) not in taken]
            if not possible or below(8) == 0:
                continue
            token = possible[below(len(possible))]
            if law == "wor":
                taken.add((row, parent, token))
            if (parent, token) not in nodes:
                nodes[parent, token] = len(depths)
                tokens_BN[b, len(depths)], parents_BN[b, len(depths)] = token, parent
                depths.append(depths[parent] + 1)
            trial_parent_BT[b, t], trial_child_BT[b, t] = parent, nodes[parent, token]
    proposal = Proposal(
        tokens_BN, parents_BN, max_depth, trial_parent_BT, trial_child_BT, laws, rows, q_BRV
    )
    probs_BNV = random_probs(tuple(tokens_BN.shape), vocab, generator)
    same_BN = torch.rand(tokens_BN.shape, generator=generator) < 0.2
    probs_BNV = torch.where(same_BN[..., None], q_BRV[:, :1], probs_BNV)
    return proposal, TablePolicy(probs_BNV)


def random_chain(
    seed: int, batch: int, vocab: int = 5, max_depth: int = 4
) -> tuple[Proposal, TablePolicy]:
    """Chains of different lengths, iid and delta trials mixed."""
    generator = torch.Generator().manual_seed(seed)
    laws = tuple(
        ("iid", "delta")[int(torch.rand(1, generator=generator) < 0.25)] for _ in range(max_depth)
    )
    q_BRV = random_probs((batch, max_depth), vocab, generator)
    drawn_BT = torch.multinomial(q_BRV.flatten(0, 1), 1, generator=generator).view(batch, -1)
    length_B1 = torch.randint(max_depth + 1, (batch, 1), generator=generator)
    index_T = torch.arange(max_depth)
    exists_BT = index_T < length_B1
    tokens_BN = torch.cat((torch.zeros(batch, 1, dtype=torch.int64), drawn_BT * exists_BT), 1)
    padding_BT = torch.where(exists_BT, index_T, -2)
    proposal = Proposal(
        tokens_BN=tokens_BN,
        parents_BN=torch.cat((torch.full((batch, 1), -1), padding_BT), 1),
        max_depth=max_depth,
        trial_parent_BT=torch.where(exists_BT, index_T, -1),
        trial_child_BT=torch.where(exists_BT, index_T + 1, -1),
        trial_law_T=laws,
        trial_row_T=tuple(-1 if law == "delta" else t for t, law in enumerate(laws)),
        q_BRV=q_BRV,
        max_trials_per_node=1,
    )
    probs_BNV = random_probs((batch, max_depth + 1), vocab, generator)
    same_BN = torch.rand(batch, max_depth + 1, generator=generator) < 0.2
    q_BNV = torch.cat((q_BRV, q_BRV[:, :1]), 1)
    return proposal, TablePolicy(torch.where(same_BN[..., None], q_BNV, probs_BNV))
