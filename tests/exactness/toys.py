"""A toy target: a table of logits, one row for each context, and what exact decoding must give.

Contexts are numbered as a V-ary heap: 0 is the committed text alone, and context c followed by
token t is V * c + 1 + t.

Letters: B rows, N nodes, C contexts, S states (tables side by side), V vocabulary, X texts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inference.proposal import Proposal
from inference.sampling import PolicyTensors, SamplingParams, TreePolicy
from tests.exactness.branches import Branches
from tests.exactness.reference_policy import reference_probs

ROOT_TOKEN = 0  # the last committed token; padding nodes carry token 0 too, and must never pass
COMMITTED = (ROOT_TOKEN, 2)


def num_contexts(vocab: int, depth: int) -> int:
    """Contexts of at most `depth` tokens after the committed text."""
    return sum(vocab**level for level in range(depth + 1))


def context_tokens(context: int, vocab: int) -> list[int]:
    """The tokens that context number `context` adds to the committed text."""
    tokens = []
    while context:
        tokens.append((context - 1) % vocab)
        context = (context - 1) // vocab
    return tokens[::-1]


def child_context(context: Tensor, token: Tensor, vocab: int) -> Tensor:
    return context * vocab + 1 + token


class ToyTarget:
    """S target models side by side, each a table.

    Args:
        logits_SCV: float64.
        params: the sampling parameters of every row.
        depth: of the deepest context.
    """

    def __init__(self, logits_SCV: Tensor, params: SamplingParams, depth: int):
        self.logits_SCV, self.depth = logits_SCV, depth
        self.vocab = logits_SCV.shape[2]
        self.policy_tensors = PolicyTensors.stack([params])
        self.probs_SCV = table_probs(logits_SCV, params)

    def policy(self, proposal: Proposal, state_B: Tensor) -> TreePolicy:
        """What the runtime builds from one target forward over the tree."""
        seen_BV = torch.zeros(len(state_B), self.vocab, dtype=torch.bool)
        seen_BV[:, list(COMMITTED)] = True
        policy = self.policy_tensors.select(torch.zeros_like(state_B))
        logits_BNV = self.logits_SCV[state_B[:, None], node_contexts(proposal, self.vocab)]
        return TreePolicy(logits_BNV, proposal, policy, seen_BV)

    def joint(self) -> Tensor:
        """float64 [S, V ** (depth + 1)]: the law of the next depth + 1 tokens."""
        return self.complete({0: torch.ones(len(self.probs_SCV), 1, dtype=torch.float64)})

    def complete(self, mass: dict[int, Tensor]) -> Tensor:
        """Lets the target go on from emitted prefixes until each has depth + 1 tokens.

        Args:
            mass: by number of emitted tokens, the probability of having stopped with each text,
                float64 [S, V ** number].
        """
        current_SX = torch.zeros(len(self.probs_SCV), 1, dtype=torch.float64)
        for level in range(self.depth + 1):
            current_SX = current_SX + mass.get(level, 0.0)
            first = num_contexts(self.vocab, level - 1) if level else 0
            probs_SXV = self.probs_SCV[:, first : first + self.vocab**level]
            current_SX = (current_SX[..., None] * probs_SXV).flatten(1)
        return current_SX + mass.get(self.depth + 1, 0.0)


def table_probs(logits_SCV: Tensor, params: SamplingParams) -> Tensor:
    """float64 [S, C, V]: the reference policy at every context."""
    vocab = logits_SCV.shape[2]
    rows = [
        [
            reference_probs(logits, params, (*COMMITTED, *context_tokens(context, vocab)))
            for context, logits in enumerate(table)
        ]
        for table in logits_SCV.tolist()
    ]
    return torch.tensor(rows, dtype=torch.float64)


def node_contexts(proposal: Proposal, vocab: int) -> Tensor:
    """int64 [B, N]: the context that ends with each node; 0 at the root and at padding."""
    contexts = torch.zeros_like(proposal.tokens_BN)
    for node in range(1, contexts.shape[1]):
        parent_B1 = proposal.parents_BN[:, node : node + 1]
        above_B = contexts.gather(1, parent_B1.clamp_min(0))[:, 0]
        here_B = child_context(above_B, proposal.tokens_BN[:, node], vocab)
        contexts[:, node] = torch.where(parent_B1[:, 0] >= 0, here_B, 0)
    return contexts


def emitted_mass(branches: Branches, num_states: int, vocab: int) -> dict[int, Tensor]:
    """Sums the branches' weights by emitted text: number of tokens -> float64 [S, V ** number]."""
    text_BD = branches.results["text_BD"]
    length_B = (text_BD >= 0).sum(1)
    mass = {}
    for length in range(1, text_BD.shape[1] + 1):
        rows = length_B == length
        code_B = branches.state_B[rows]
        for position in range(length):
            code_B = code_B * vocab + text_BD[rows, position]
        total_X = torch.zeros(num_states * vocab**length, dtype=torch.float64)
        total_X = total_X.index_add(0, code_B, branches.weight_B[rows])
        mass[length] = total_X.view(num_states, -1)
    return mass


def random_logits(seed: int, vocab: int, depth: int, kind: str = "generic") -> Tensor:
    """float64 [C, V]: a target's table.

    Args:
        kind: generic | zeros (a third of the tokens impossible) | one_hot | ties (values from a
            set of two) | lower, upper (only tokens of that half of the vocabulary).
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (num_contexts(vocab, depth), vocab)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * 1.2
    keep = torch.randint(vocab, shape[:1], generator=generator)[:, None]
    token = torch.arange(vocab)
    if kind == "zeros":
        drop = torch.rand(shape, generator=generator) < 1 / 3
        logits[drop & (token != keep)] = -math.inf
    elif kind == "one_hot":
        logits[token != keep] = -math.inf
    elif kind == "ties":
        logits = (logits > 0).double()
    elif kind == "lower":
        logits[:, (vocab + 1) // 2 :] = -math.inf
    elif kind == "upper":
        logits[:, : (vocab + 1) // 2] = -math.inf
    elif kind != "generic":
        raise ValueError(f"kind {kind!r}")
    return logits
