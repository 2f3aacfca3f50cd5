"""E[accepted draft tokens] of one round, enumerated, against closed forms.

The second oracle: a law can be exact and still throw good drafts away, and then only this sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inference.laws import LAWS
from tests.exactness.cases import (
    POLICIES,
    TABLES,
    TOLERANCE,
    deviations,
    enumerate_round,
    first_accepted,
    make_case,
    mean_accepted,
)
from tests.exactness.toys import child_context

STATES = list(TABLES)
reject = LAWS["rejection"].judge


def naive(proposal, policy, source):
    """Draw from p, look the token up in the tree: exact for any tree, and blind to q."""
    num_trials = proposal.num_trials
    deltas = replace(proposal, trial_law_T=("delta",) * num_trials, trial_row_T=(-1,) * num_trials)
    return reject(deltas, policy, source)


def drafted_prefixes(target_CV: Tensor, draft_CV: Tensor, depth: int) -> Iterator[tuple]:
    """For each length, p and q of every token along every drafted text: two float64 [length, X]."""
    vocab = target_CV.shape[1]
    contexts = torch.zeros(1, dtype=torch.int64)
    p_LX = q_LX = torch.zeros(0, 1, dtype=torch.float64)
    for _ in range(depth):
        p_LX = torch.cat((p_LX.repeat_interleave(vocab, 1), target_CV[contexts].view(1, -1)))
        q_LX = torch.cat((q_LX.repeat_interleave(vocab, 1), draft_CV[contexts].view(1, -1)))
        contexts = child_context(contexts[:, None], torch.arange(vocab), vocab).flatten()
        yield p_LX, q_LX


@pytest.mark.parametrize("policy", POLICIES)
def test_chain_accepts_the_overlap_of_p_and_q(policy: str) -> None:
    """Sum over drafted texts of the product of min(p, q): Leviathan et al., section 3.2."""
    case = make_case("chain", POLICIES[policy], STATES)
    found = mean_accepted(enumerate_round(case, reject))
    for state, table in enumerate(STATES):
        target_CV, draft_CV = case.target.probs_SCV[state], case.draft_probs[0][state]
        expected = sum(
            torch.minimum(p_LX, q_LX).prod(0).sum().item()
            for p_LX, q_LX in drafted_prefixes(target_CV, draft_CV, case.depth)
        )
        assert abs(found[state] - expected) <= TOLERANCE, table


@pytest.mark.parametrize("policy", POLICIES)
def test_block_accepts_its_closed_form_and_never_less_than_rejection(policy: str) -> None:
    """P(tau >= i | x_1..x_i) = a_i (arXiv 2403.10444), so E = sum_i E_q[a_i]."""
    case = make_case("chain", POLICIES[policy], STATES)
    block = mean_accepted(enumerate_round(case, LAWS["block"].judge))
    rejection = mean_accepted(enumerate_round(case, reject))
    for state, table in enumerate(STATES):
        target_CV, draft_CV = case.target.probs_SCV[state], case.draft_probs[0][state]
        expected = 0.0
        for p_LX, q_LX in drafted_prefixes(target_CV, draft_CV, case.depth):
            weight_X = torch.ones(1, dtype=torch.float64)
            for p_X, q_X in zip(p_LX, q_LX, strict=True):
                weight_X = (weight_X * p_X / torch.where(q_X > 0, q_X, 1)).clamp_max(1)
            expected += (weight_X * q_LX.prod(0)).sum().item()
        assert abs(block[state] - expected) <= TOLERANCE, table
        assert block[state] >= rejection[state] - TOLERANCE, table
    if policy == "T=1":
        assert block[0] > rejection[0] + 1e-3


@pytest.mark.parametrize("drafter", ["top-1 chain", "top-k", "top-k, wide", "Medusa top-k product"])
def test_chosen_tokens_are_accepted_with_their_probability(drafter: str) -> None:
    """For a delta tree, E = sum over nodes of p(path): the most that this tree can give."""
    case = make_case(drafter, POLICIES["T=1"], STATES)
    found = mean_accepted(enumerate_round(case, reject))
    proposal = case.propose(None, torch.arange(case.num_states))
    for state, table in enumerate(STATES):
        reach, context = {0: 1.0}, {0: 0}
        for node in range(1, proposal.tokens_BN.shape[1]):
            parent = int(proposal.parents_BN[state, node])
            token = int(proposal.tokens_BN[state, node])
            p = float(case.target.probs_SCV[state, context[parent], token])
            reach[node] = reach[parent] * p
            context[node] = context[parent] * case.target.vocab + 1 + token
        assert abs(found[state] - (sum(reach.values()) - 1)) <= TOLERANCE, table


@pytest.mark.parametrize(
    "drafter, models",
    [("iid tree", (0, 0)), ("iid, three draws", (0, 0, 0)), ("three SSMs merged", (0, 1, 2))],
)
def test_first_node_accepts_what_recursive_rejection_promises(
    drafter: str, models: tuple[int, ...]
) -> None:
    """P(all rejected) = prod_i (1 - sum min(r_i, q_i)), r_{i+1} = norm((r_i - q_i)+)."""
    case = make_case(drafter, POLICIES["T=1"], STATES)
    found = first_accepted(enumerate_round(case, reject))
    for state, table in enumerate(STATES):
        residual, rejected = case.target.probs_SCV[state, 0], 1.0
        for model in models:
            q = case.draft_probs[model][state, 0]
            rejected *= 1 - torch.minimum(residual, q).sum().item()
            left = (residual - q).clamp_min(0)
            residual = left / left.sum() if left.sum() > 0 else residual
        assert abs(found[state] - (1 - rejected)) <= TOLERANCE, table


@pytest.mark.parametrize("drafter", ["iid, three draws", "three SSMs merged", "two SSMs merged"])
def test_multi_step_rejects_no_more_than_naive_sampling(drafter: str) -> None:
    """SpecInfer's theorem 4.3 at the first node. Both are exact; only this tells them apart."""
    case = make_case(drafter, POLICIES["T=1"], STATES)
    look_up = enumerate_round(case, naive)
    multi_step = first_accepted(enumerate_round(case, reject))
    assert max(deviations(case, look_up)) <= TOLERANCE
    gain = [a - b for a, b in zip(multi_step, first_accepted(look_up), strict=True)]
    assert min(gain) >= -TOLERANCE, dict(zip(STATES, gain, strict=True))
    assert gain[STATES.index("generic")] > 1e-3 and gain[STATES.index("q = p")] > 1e-3


@pytest.mark.parametrize(
    "law, drafter",
    [
        ("rejection", "chain"),
        ("block", "chain"),
        ("rejection", "without replacement"),
        ("rejection", "two SSMs merged"),
    ],
)
def test_equal_laws_accept_everything(law: str, drafter: str) -> None:
    case = make_case(drafter, POLICIES["T=1"], ["q = p"])
    accepted = mean_accepted(enumerate_round(case, LAWS[law].judge))
    assert accepted == [pytest.approx(case.depth, abs=TOLERANCE)]
