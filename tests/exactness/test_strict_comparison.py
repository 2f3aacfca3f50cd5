"""A uniform of exactly zero: nothing of probability zero may come out (sglang#35771)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inference.laws import LAWS
from inference.randomness import UniformSource
from tests.exactness.cases import POLICIES, TABLES, make_case, play
from tests.exactness.toy_drafters import CHAINS, DRAFTERS
from tests.exactness.toys import child_context

LARGEST = 1 - 2.0**-53  # the largest uniform there is


class Constant(UniformSource):
    """Production's way from uniforms to decisions, with one uniform for all."""

    def __init__(self, batch: int, value: float):
        self.value_B = torch.full((batch,), value, dtype=torch.float64)

    def uniform(self, purpose, node_B, trial) -> Tensor:
        return self.value_B


class NotStrict(Constant):
    """The mutant: `u <= prob`."""

    def bernoulli(self, prob_B, purpose, node_B, trial) -> Tensor:
        return self.uniform(purpose, node_B, trial) <= prob_B


def impossible_tokens(law: str, drafter: str, source_type: type, value: float) -> int:
    """How many of the emitted tokens have probability zero, over all kinds of tables."""
    case = make_case(drafter, POLICIES["top-k"], list(TABLES))
    state_B = torch.arange(case.num_states)
    source = source_type(case.num_states, value)
    text_BD = play(case, LAWS[law].judge, source, state_B)["text_BD"]
    context_B, impossible = torch.zeros_like(state_B), 0
    for token_B in text_BD.unbind(1):
        here_B = token_B >= 0
        probs_B = case.target.probs_SCV[state_B, context_B, token_B.clamp_min(0)]
        impossible += int((here_B & (probs_B == 0)).sum())
        context_B = child_context(context_B, token_B.clamp_min(0), case.target.vocab)
        context_B = torch.where(here_B, context_B, 0)
    return impossible


LAW_AND_DRAFTER = [("rejection", drafter) for drafter in DRAFTERS]
LAW_AND_DRAFTER += [("block", drafter) for drafter in CHAINS]


@pytest.mark.parametrize("value", [0.0, LARGEST])
@pytest.mark.parametrize("law, drafter", LAW_AND_DRAFTER)
def test_zero_probability_never_comes_out(law: str, drafter: str, value: float) -> None:
    assert impossible_tokens(law, drafter, Constant, value) == 0


def test_a_comparison_that_is_not_strict_is_seen() -> None:
    assert impossible_tokens("rejection", "chain", NotStrict, 0.0) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draw_has_positive_probability_at_both_ends(dtype: torch.dtype) -> None:
    probs_BV = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=dtype)
    assert Constant(1, 0.0).categorical(probs_BV, 1, 0, 0).item() == 1
    assert Constant(1, LARGEST).categorical(probs_BV, 1, 0, 0).item() == 3
    assert not Constant(1, 0.0).bernoulli(torch.zeros(1, dtype=dtype), 2, 0, 0).item()
    assert Constant(1, LARGEST).bernoulli(torch.ones(1, dtype=dtype), 2, 0, 0).item()
