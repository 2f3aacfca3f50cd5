"""The one place where logits become probabilities, p and q alike.

Letters: B rows, M nodes asked for at once, N nodes, V vocabulary.

The processors and their order are those of Hugging Face `generate`: repetition penalty,
temperature, top-k, top-p, min-p. Everything is fp32 at least, and fp64 stays fp64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inference.params import LAW_NAMES, PolicyTensors, SamplingParams
from inference.proposal import Proposal
from inference.tree import ancestor_mask

__all__ = [
    "LAW_NAMES",
    "PolicyTensors",
    "SamplingParams",
    "TreePolicy",
    "expand_draft_probs",
    "probabilities",
    "processed_logits",
]


def probabilities(
    logits_BV: Tensor, policy: PolicyTensors, seen_BV: Tensor | None = None
) -> Tensor:
    """The distribution that the next token is drawn from.

    Args:
        logits_BV: float [B, ..., V], raw logits.
        policy: B rows.
        seen_BV: bool, shaped like the logits or [B, V]: tokens of the text so far. Needed where a
            row has a repetition penalty.
    Returns:
        float [B, ..., V], fp32 or fp64. Greedy rows: one at the argmax (lowest id wins ties), zero
        elsewhere. A row with NaN logits has NaN in it.
    Raises:
        ValueError: if a penalty is on and seen_BV is missing.
    """
    logits_BV = processed_logits(logits_BV, policy, seen_BV)
    if policy.all_greedy:
        return _one_hot_argmax(logits_BV)
    warped_BV = logits_BV
    if policy.any_temperature:
        temperature_B = torch.where(policy.temperature_B > 0, policy.temperature_B, 1.0)
        warped_BV = warped_BV / _column(temperature_B, warped_BV)
    if policy.max_top_k:
        warped_BV = _keep_top_k(warped_BV, policy)
    if policy.any_top_p:
        warped_BV = _keep_top_p(warped_BV, policy)
    if policy.any_min_p:
        warped_BV = _keep_min_p(warped_BV, policy)
    probs_BV = warped_BV.softmax(-1)
    if policy.any_greedy:
        greedy_B = _column(policy.temperature_B, probs_BV) == 0
        probs_BV = torch.where(greedy_B, _one_hot_argmax(logits_BV), probs_BV)
    return probs_BV


def processed_logits(
    logits_BV: Tensor, policy: PolicyTensors, seen_BV: Tensor | None = None
) -> Tensor:
    """Logits after the history-dependent processors: what a greedy row takes the argmax of.

    Args, Raises: as in `probabilities`.
    """
    if logits_BV.dtype not in (torch.float32, torch.float64):
        logits_BV = logits_BV.float()
    if not policy.any_penalty:
        return logits_BV
    if seen_BV is None:
        raise ValueError("repetition_penalty needs seen_BV, the tokens of the text so far")
    if seen_BV.dim() < logits_BV.dim():
        seen_BV = seen_BV.view(seen_BV.shape[0], *[1] * (logits_BV.dim() - 2), -1)
    penalty_B = _column(policy.repetition_penalty_B, logits_BV)
    penalised_BV = torch.where(logits_BV < 0, logits_BV * penalty_B, logits_BV / penalty_B)
    return torch.where(seen_BV, penalised_BV, logits_BV)


def _column(values_B: Tensor, logits_BV: Tensor) -> Tensor:
    """values_B in the logits' dtype, broadcast over all but the first dimension."""
    return values_B.to(logits_BV.dtype).view(-1, *[1] * (logits_BV.dim() - 1))


def _one_hot_argmax(logits_BV: Tensor) -> Tensor:
    best_B1, token_B1 = logits_BV.max(-1, keepdim=True)
    one_B1 = torch.where(best_B1.isnan(), best_B1, 1.0)
    return torch.zeros_like(logits_BV).scatter(-1, token_B1, one_B1)


def _keep_top_k(logits_BV: Tensor, policy: PolicyTensors) -> Tensor:
    """Drops logits below the k-th largest; ties with it stay."""
    top_BK = logits_BV.topk(min(policy.max_top_k, logits_BV.shape[-1]), -1).values
    rank_B1 = policy.top_k_B.view(-1, *[1] * (logits_BV.dim() - 1))
    last_B1 = (rank_B1 - 1).clamp(0, top_BK.shape[-1] - 1).expand(*logits_BV.shape[:-1], 1)
    kth_B1 = torch.where(rank_B1 > 0, top_BK.gather(-1, last_B1), -math.inf)
    return logits_BV.masked_fill(logits_BV < kth_B1, -math.inf)


def _keep_top_p(logits_BV: Tensor, policy: PolicyTensors) -> Tensor:
    """Drops the least probable tokens whose cumulative probability is at most 1 - top_p.

    Of equal logits at the edge the highest ids stay: a stable ascending sort. `generate` sorts
    without that promise, so which of them stay there depends on the processor it runs on.
    """
    sorted_BV, order_BV = logits_BV.sort(dim=-1, stable=True)
    cumulative_BV = sorted_BV.softmax(-1).cumsum(-1)
    off_B = policy.top_p_B >= 1
    drop_BV = cumulative_BV <= _column(torch.where(off_B, -1.0, 1 - policy.top_p_B), logits_BV)
    last_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device) == logits_BV.shape[-1] - 1
    drop_BV = torch.zeros_like(drop_BV).scatter(-1, order_BV, drop_BV & ~last_V)
    return logits_BV.masked_fill(drop_BV, -math.inf)


def _keep_min_p(logits_BV: Tensor, policy: PolicyTensors) -> Tensor:
    """Drops tokens below min_p times the top token's probability."""
    probs_BV = logits_BV.softmax(-1)
    floor_B1 = _column(policy.min_p_B, probs_BV) * probs_BV.amax(-1, keepdim=True)
    return logits_BV.masked_fill(probs_BV < floor_B1, -math.inf)


def expand_draft_probs(draft_probs: Tensor, draft_ids: Tensor, vocab_size: int) -> Tensor:
    """q over a reduced vocabulary as q over the target's: zero wherever the drafter has no token.

    Args:
        draft_probs: float [..., Vd].
        draft_ids: int64 [Vd], the target id of each draft id; all different.
    Returns:
        float [..., vocab_size].
    """
    full = draft_probs.new_zeros(*draft_probs.shape[:-1], vocab_size)
    return full.index_copy(-1, draft_ids, draft_probs)


class TreePolicy:
    """The target's probabilities at a proposal's nodes; only nodes that are asked for are made.

    Penalties see each node's own prefix: the committed text, the node's ancestors and itself.

    Args:
        logits_BNV: raw target logits at every node.
        proposal: its tokens and parents.
        policy: B rows.
        seen_BV: bool, tokens of the committed text with the root; needed for a repetition penalty.
    Raises:
        ValueError: if a penalty is on and seen_BV is missing.
    """

    def __init__(
        self,
        logits_BNV: Tensor,
        proposal: Proposal,
        policy: PolicyTensors,
        seen_BV: Tensor | None = None,
    ):
        if policy.any_penalty and seen_BV is None:
            raise ValueError("repetition_penalty needs seen_BV, the tokens of the text so far")
        self.logits_BNV, self.tokens_BN, self.policy = logits_BNV, proposal.tokens_BN, policy
        self.seen_BV = seen_BV
        self.rows_B = torch.arange(logits_BNV.shape[0], device=logits_BNV.device)
        if policy.any_penalty:
            self.ancestors_BNN = ancestor_mask(proposal.parents_BN, proposal.max_depth)

    def at(self, node_B: Tensor) -> Tensor:
        """float [B, V] (or [B, M, V] for nodes [B, M]): p at these nodes."""
        return probabilities(self._logits(node_B), self.policy, self._seen(node_B))

    def argmax(self, node_B: Tensor) -> Tensor:
        """int64 like node_B: the greedy token after these nodes, -1 where a logit is NaN."""
        logits_BV = processed_logits(self._logits(node_B), self.policy, self._seen(node_B))
        best_B, token_B = logits_BV.max(-1)
        return torch.where(best_B.isnan(), -1, token_B)

    @property
    def typical_thresholds(self) -> tuple[Tensor, Tensor]:
        """(epsilon_B, delta_B), float64, for the typical law."""
        return self.policy.typical_epsilon_B, self.policy.typical_delta_B

    def _logits(self, node_B: Tensor) -> Tensor:
        rows_B = self.rows_B.view(-1, *[1] * (node_B.dim() - 1))
        return self.logits_BNV[rows_B, node_B]

    def _seen(self, node_B: Tensor) -> Tensor | None:
        if not self.policy.any_penalty:
            return None
        assert self.seen_BV is not None
        rows_B = self.rows_B.view(-1, *[1] * (node_B.dim() - 1))
        prefix_BN = self.ancestors_BNN[rows_B, node_B]
        tokens_BN = self.tokens_BN.view(len(self.rows_B), *[1] * (node_B.dim() - 1), -1)
        # Nodes outside the prefix repeat the root's token, which the prefix always has.
        tokens_BN = torch.where(prefix_BN, tokens_BN, tokens_BN[..., :1])
        seen_BV = self.seen_BV.view(len(self.rows_B), *[1] * (node_B.dim() - 1), -1)
        seen_BV = seen_BV.expand(*node_B.shape, -1)
        return seen_BV.scatter(-1, tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool))
