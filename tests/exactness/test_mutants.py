"""The mutation gate: the enumerator sees every wrong law, or it proves nothing."""

from __future__ import annotations

import pytest

from inference.laws import LAWS
from tests.exactness.cases import POLICIES, TOLERANCE, deviations, enumerate_round, make_case
from tests.exactness.mutants import MUTANTS

# Rounding is below 1e-14; the faintest of these faults moves a probability by more than this.
VISIBLE = 1e-6


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_law_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    case = make_case(mutant.drafter, POLICIES[mutant.policy])
    right = max(deviations(case, enumerate_round(case, LAWS[mutant.law].judge)))
    wrong = max(deviations(case, enumerate_round(case, mutant.judge)))
    assert right <= TOLERANCE
    assert wrong > VISIBLE, f"survived: {name}"
