"""One round of each batched law, walked branch by branch and completed by the target.

By induction this covers every number of rounds, because a round depends on the committed text
alone; `test_rounds_on_a_transformer.py` checks that it does.
"""

from __future__ import annotations

import pytest

from inference.laws import LAWS
from inference.proposal import check
from inference.sampling import SamplingParams
from tests.exactness.branches import walk
from tests.exactness.cases import (
    POLICIES,
    TABLES,
    TOLERANCE,
    deviations,
    enumerate_round,
    make_case,
)
from tests.exactness.recorder import Recorder
from tests.exactness.toy_drafters import CHAINS, DRAFTERS

SAMPLED = [name for name, params in POLICIES.items() if params.temperature > 0]


def largest_deviation(law: str, drafter: str, policy: str) -> float:
    case = make_case(drafter, POLICIES[policy], list(TABLES))
    found = deviations(case, enumerate_round(case, LAWS[law].judge))
    assert max(found) <= TOLERANCE, dict(zip(TABLES, found, strict=True))
    return max(found)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rejection_keeps_the_targets_law(drafter: str, policy: str, recorder: Recorder) -> None:
    worst = largest_deviation("rejection", drafter, policy)
    recorder.add("rejection", drafter, policy, "exact", worst, len(TABLES))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", CHAINS)
def test_block_keeps_the_targets_law(drafter: str, policy: str, recorder: Recorder) -> None:
    worst = largest_deviation("block", drafter, policy)
    recorder.add("block", drafter, policy, "exact", worst, len(TABLES))


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in CHAINS])
def test_block_refuses_trees(drafter: str, recorder: Recorder) -> None:
    for policy, params in POLICIES.items():
        case = make_case(drafter, params)
        with pytest.raises(ValueError, match="'block' judges chains only"):
            enumerate_round(case, LAWS["block"].judge)
        recorder.add("block", drafter, policy, "refused")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_gives_the_argmax_text(drafter: str, recorder: Recorder) -> None:
    worst = largest_deviation("greedy", drafter, "T=0")
    recorder.add("greedy", drafter, "T=0", "exact", worst, len(TABLES))
    for policy in SAMPLED:
        recorder.add("greedy", drafter, policy, "refused")


def test_greedy_is_refused_above_temperature_zero() -> None:
    for policy in SAMPLED:
        with pytest.raises(ValueError, match="law"):
            SamplingParams(temperature=POLICIES[policy].temperature, law="greedy")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_typical_is_not_exact_and_says_so(drafter: str, recorder: Recorder) -> None:
    assert not LAWS["typical"].exact
    for policy, params in POLICIES.items():
        case = make_case(drafter, params, ["generic"] * 3, vocab=3)
        found = max(deviations(case, enumerate_round(case, LAWS["typical"].judge)))
        if policy in SAMPLED:
            assert found > 1e-3, f"{drafter}, {policy}: typical acceptance looks exact"
            recorder.add("typical", drafter, policy, "not exact", found, case.num_states)
        else:
            assert found <= TOLERANCE  # p is one-hot, and the law accepts what greedy accepts
            recorder.add("typical", drafter, policy, "as greedy", found, case.num_states)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_enumerated_proposal_keeps_the_rules(drafter: str) -> None:
    """The toy drafters say truthfully how their tokens were drawn, as far as that can be seen."""
    case = make_case(drafter, POLICIES["T=1"], list(TABLES))

    def play(source, state_B):
        proposal = case.propose(source, state_B)
        check(proposal)
        return {"tokens_BN": proposal.tokens_BN}

    assert len(walk(play, case.num_states)) >= case.num_states
