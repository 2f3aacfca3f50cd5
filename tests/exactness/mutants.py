"""Wrong laws that users of other software have really met. Each must turn the enumerator red.

A mutant is a judge, (proposal, policy, source) -> Verdict. Most tell the rejection law a lie about
how the tokens were drawn; the others spoil its last token. Where the fault is known from a public
implementation, the docstring names it.

Letters: B rows, R rows of q, T trials, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inference.laws import LAWS, Verdict
from inference.proposal import ABSENT, Proposal
from inference.randomness import Purpose, Source
from tests.exactness.cases import Judge

reject: Judge = LAWS["rejection"].judge


# ---- lies about the draws ----------------------------------------------------------------------


def argmax_judged_by_softmax(proposal, policy, source) -> Verdict:
    """transformers#32867: the drafter took its argmax; the law believes it drew from softmax q."""
    q_BRV = _softmax_that_likes(proposal, policy.logits_BNV.shape[-1])
    laws, rows = ("iid",) * proposal.num_trials, range(proposal.num_trials)
    return reject(
        replace(proposal, trial_law_T=laws, trial_row_T=rows, q_BRV=q_BRV), policy, source
    )


def raw_q_without_replacement(proposal, policy, source) -> Verdict:
    """Siblings drawn without replacement, each judged by the full q."""
    return reject(replace(proposal, trial_law_T=("iid",) * proposal.num_trials), policy, source)


def sorted_by_q(proposal, policy, source) -> Verdict:
    """EAGLE before b09a256: siblings judged in order of their probability, not of their draw."""
    return reject(_reordered(proposal, _chosen_q(proposal)), policy, source)


def sorted_by_token(proposal, policy, source) -> Verdict:
    """Siblings judged in order of their token ids: the order depends on what was drawn."""
    token_BT = proposal.tokens_BN.gather(1, proposal.trial_child_BT.clamp_min(0))
    return reject(_reordered(proposal, -token_BT.double()), policy, source)


def duplicates_collapsed(proposal, policy, source) -> Verdict:
    """SpecInfer's Definition 3.2 read as a set: a token two models drew is tried once."""
    child_BT = proposal.trial_child_BT
    earlier_TT = torch.ones(child_BT.shape[1], child_BT.shape[1]).tril(-1).bool()
    again_BT = ((child_BT[:, :, None] == child_BT[:, None]) & earlier_TT).any(-1)
    parent_BT = proposal.trial_parent_BT.masked_fill(again_BT, ABSENT)
    child_BT = child_BT.masked_fill(again_BT, ABSENT)
    once = replace(proposal, trial_parent_BT=parent_BT, trial_child_BT=child_BT)
    return reject(once, policy, source)


def mixture_q(proposal, policy, source) -> Verdict:
    """Two models at one node, each of their trials judged by the mean of their q's."""
    q_BRV = proposal.q_BRV.clone()  # row r belongs to trial r; pairs are model one, model two
    for first in range(0, proposal.num_trials, 2):
        pair, parent_BT = slice(first, first + 2), proposal.trial_parent_BT
        together_B11 = (parent_BT[:, first] == parent_BT[:, first + 1])[:, None, None]
        mean_B1V = q_BRV[:, pair].mean(1, keepdim=True)
        q_BRV[:, pair] = torch.where(together_B11, mean_B1V, q_BRV[:, pair])
    return reject(replace(proposal, q_BRV=q_BRV), policy, source)


def other_models_q(proposal, policy, source) -> Verdict:
    """Two models at one node, each judged by the other's q."""
    rows = [row + 1 - 2 * (row % 2) for row in proposal.trial_row_T]
    q_BRV = proposal.q_BRV * 0.9 + 0.1 / proposal.q_BRV.shape[-1]  # no zeros under a drawn token
    return reject(replace(proposal, trial_row_T=rows, q_BRV=q_BRV), policy, source)


def draft_without_its_temperature(proposal, policy, source) -> Verdict:
    """transformers#47932: drawn from processed q, judged by the raw one."""
    q_BRV = proposal.q_BRV.pow(0.8)
    q_BRV = q_BRV / q_BRV.sum(-1, keepdim=True)
    return reject(replace(proposal, q_BRV=q_BRV), policy, source)


def unlikely_drafts_dropped(proposal, policy, source) -> Verdict:
    """A confidence stop that drops the token it stopped at: inclusion depends on the draw."""
    drop_BT = _chosen_q(proposal) < 0.3
    parent_BT = proposal.trial_parent_BT.masked_fill(drop_BT, ABSENT)
    child_BT = proposal.trial_child_BT.masked_fill(drop_BT, ABSENT)
    pruned = replace(proposal, trial_parent_BT=parent_BT, trial_child_BT=child_BT)
    return reject(pruned, policy, source)


# ---- a wrong last token ------------------------------------------------------------------------


def resampled_from_p(proposal, policy, source) -> Verdict:
    """The correction is drawn from p and not from the residual."""
    verdict = reject(proposal, policy, source)
    end_B, stopped_B = _end(proposal, verdict)
    return _redraw(verdict, source, policy.at(end_B), stopped_B)


def bonus_without_policy(proposal, policy, source) -> Verdict:
    """EAGLE v1: the bonus token comes from a bare softmax."""
    verdict = reject(proposal, policy, source)
    end_B, stopped_B = _end(proposal, verdict)
    bare_BV = policy.logits_BNV[policy.rows_B, end_B].softmax(-1)
    return _redraw(verdict, source, bare_BV, ~stopped_B)


def stale_residual(proposal, policy, source) -> Verdict:
    """EAGLE#47: the bonus is drawn from the residual of the level above."""
    verdict = reject(proposal, policy, source)
    end_B, stopped_B = _end(proposal, verdict)
    above_B = proposal.parents_BN.gather(1, end_B[:, None])[:, 0].clamp_min(0)
    left_BV = (policy.at(above_B) - _q_at(proposal, above_B)).clamp_min(0)
    has_mass_B1 = left_BV.sum(-1, keepdim=True) > 1e-9
    left_BV = torch.where(has_mass_B1, left_BV, policy.at(end_B))
    return _redraw(verdict, source, left_BV / left_BV.sum(-1, keepdim=True), ~stopped_B)


def token_residual_in_block(proposal, policy, source) -> Verdict:
    """vllm-ascend#7807: block verification's tests with the token-level residual (p - q)+."""
    verdict = LAWS["block"].judge(proposal, policy, source)
    end_B, stopped_B = _end(proposal, verdict)
    left_BV = (policy.at(end_B) - _q_at(proposal, end_B)).clamp_min(0)
    left_BV = torch.where(left_BV.sum(-1, keepdim=True) > 1e-9, left_BV, policy.at(end_B))
    return _redraw(verdict, source, left_BV / left_BV.sum(-1, keepdim=True), stopped_B)


def typical_as_exact(proposal, policy, source) -> Verdict:
    """Medusa's typical acceptance under the name of an exact law."""
    return LAWS["typical"].judge(proposal, policy, source)


# ---- shared steps ------------------------------------------------------------------------------


def _end(proposal: Proposal, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """(the last accepted node, whether a trial was rejected there)."""
    end_B = verdict.path_BD.gather(1, verdict.num_accepted_B[:, None])[:, 0]
    return end_B, (proposal.trial_parent_BT == end_B[:, None]).any(-1)


def _redraw(verdict: Verdict, source: Source, probs_BV: Tensor, where_B: Tensor) -> Verdict:
    asked_B = torch.where(where_B, 0, -1)
    token_B = source.categorical(probs_BV, Purpose.FINAL, asked_B, 1)
    return replace(verdict, next_token_B=torch.where(where_B, token_B, verdict.next_token_B))


def _chosen_q(proposal: Proposal) -> Tensor:
    """[B, T]: the probability its row of q gives to each trial's token."""
    token_BT = proposal.tokens_BN.gather(1, proposal.trial_child_BT.clamp_min(0))
    rows_T = torch.tensor(proposal.trial_row_T)
    return proposal.q_BRV[torch.arange(len(token_BT))[:, None], rows_T, token_BT]


def _reordered(proposal: Proposal, key_BT: Tensor) -> Proposal:
    """Siblings of one row of q change places so that the largest key comes first."""
    child_BT = proposal.trial_child_BT.clone()
    parent_BT = proposal.trial_parent_BT.clone()
    for row in set(proposal.trial_row_T):
        trials = [t for t, r in enumerate(proposal.trial_row_T) if r == row]
        present_BT = child_BT[:, trials] >= 0
        order_BT = key_BT[:, trials].masked_fill(~present_BT, -99).argsort(1, descending=True)
        child_BT[:, trials] = child_BT[:, trials].gather(1, order_BT)
        parent_BT[:, trials] = parent_BT[:, trials].gather(1, order_BT)
    return replace(proposal, trial_child_BT=child_BT, trial_parent_BT=parent_BT)


def _softmax_that_likes(proposal: Proposal, vocab: int) -> Tensor:
    """q [B, T, V]: a soft distribution whose argmax is the trial's token."""
    token_BT = proposal.tokens_BN.gather(1, proposal.trial_child_BT.clamp_min(0))
    return (torch.nn.functional.one_hot(token_BT, vocab) * 1.5).double().softmax(-1)


def _q_at(proposal: Proposal, node_B: Tensor) -> Tensor:
    """[B, V]: q of the first trial at a node; zero where there is none."""
    here_BT = proposal.trial_parent_BT == node_B[:, None]
    rows_B = torch.tensor(proposal.trial_row_T)[here_BT.int().argmax(-1)]
    q_BV = proposal.q_BRV[torch.arange(len(node_B)), rows_B]
    return torch.where(here_BT.any(-1, keepdim=True), q_BV, 0)


@dataclass(frozen=True)
class Mutant:
    """A wrong law and the proposal and policy under which it must be caught."""

    judge: Judge
    drafter: str
    policy: str = "T=1"
    law: str = "rejection"  # the right law on the same case, which must be green


MUTANTS: dict[str, Mutant] = {
    "resample from p instead of the residual": Mutant(resampled_from_p, "chain"),
    "argmax draft judged by softmax q": Mutant(argmax_judged_by_softmax, "top-1 chain"),
    "top-k draft judged by softmax q": Mutant(argmax_judged_by_softmax, "top-k"),
    "raw q for draws without replacement": Mutant(raw_q_without_replacement, "without replacement"),
    "siblings sorted by q, drawn without replacement": Mutant(sorted_by_q, "without replacement"),
    "siblings sorted by q, drawn i.i.d.": Mutant(sorted_by_q, "iid tree"),
    "siblings sorted by token": Mutant(sorted_by_token, "iid tree"),
    "duplicates collapsed, two models": Mutant(duplicates_collapsed, "two SSMs merged"),
    "duplicates collapsed, i.i.d. draws": Mutant(duplicates_collapsed, "iid tree"),
    "mixture q": Mutant(mixture_q, "two SSMs merged"),
    "each model judged by the other's q": Mutant(other_models_q, "two SSMs merged"),
    "raw q where the draft had a temperature": Mutant(draft_without_its_temperature, "chain"),
    "unlikely drafts dropped": Mutant(unlikely_drafts_dropped, "iid tree"),
    "bonus without policy": Mutant(bonus_without_policy, "chain", "T=0.5"),
    "bonus without top-k": Mutant(bonus_without_policy, "iid tree", "top-k"),
    "residual of the wrong level": Mutant(stale_residual, "chain"),
    "token-level residual in block": Mutant(token_residual_in_block, "chain", law="block"),
    "typical passed off as exact": Mutant(typical_as_exact, "chain"),
}
