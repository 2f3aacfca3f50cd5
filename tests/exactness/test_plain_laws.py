"""The plain laws, which read like their equations: exact, and of one mind with the batched ones."""

from __future__ import annotations

import pytest
import torch

from inference.laws import LAWS
from inference.randomness import KeyedSource
from tests.exactness.cases import (
    POLICIES,
    TABLES,
    TOLERANCE,
    deviations,
    enumerate_round,
    make_case,
    play,
)
from tests.exactness.plain import row_by_row
from tests.exactness.toy_drafters import CHAINS, DRAFTERS

ROWS = 6  # for each drafter and table: 800 proposals that hold every kind of trial


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_plain_rejection_keeps_the_targets_law(drafter: str) -> None:
    # Two draft tokens of three: a few hundred branches, walked one by one.
    case = make_case(drafter, POLICIES["T=1"], ["small draft vocabulary"], vocab=3)
    branches = enumerate_round(case, row_by_row(LAWS["rejection"]))
    assert max(deviations(case, branches)) <= TOLERANCE


@pytest.mark.parametrize("policy", ["T=1"])
@pytest.mark.parametrize("drafter", CHAINS)
def test_plain_block_keeps_the_targets_law(drafter: str, policy: str) -> None:
    case = make_case(drafter, POLICIES[policy], list(TABLES), vocab=3)
    branches = enumerate_round(case, row_by_row(LAWS["block"]))
    assert max(deviations(case, branches)) <= TOLERANCE


@pytest.mark.parametrize("law", ["rejection", "block", "greedy", "typical"])
def test_plain_and_batched_take_the_same_decisions(law: str) -> None:
    state_B = torch.arange(len(TABLES)).repeat_interleave(ROWS)
    seeds_B = torch.arange(len(state_B)) * 7919
    policies = ["T=0"] if law == "greedy" else ["T=1", "top-p", "T=1.5", "all"]
    for index, drafter in enumerate(CHAINS if law == "block" else DRAFTERS):
        params = POLICIES[policies[index % len(policies)]]
        case = make_case(drafter, params, list(TABLES), seed=index)
        source = KeyedSource(seeds_B, torch.full_like(seeds_B, index))
        batched = play(case, LAWS[law].judge, source, state_B)
        rows = play(case, row_by_row(LAWS[law]), source, state_B)
        for name in batched:
            assert torch.equal(batched[name], rows[name]), (law, drafter, name)
