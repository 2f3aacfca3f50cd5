"""The real generator, batched, in fp32: chi-square against laws computed in fp64.

The enumerator proves the laws; this proves the uniforms they are fed. Draws are as many as it takes
to catch the negative control of each test with probability .999; a test alarms falsely with 1e-6.
Four tokens of a drafter that emits at most three a round: every text spans two rounds or more.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inference.laws import LAWS
from inference.randomness import (
    KeyedSource,
    PositionSource,
    gumbel_argmax,
    gumbel_noise,
    hash_words,
)
from inference.sampling import PolicyTensors, SamplingParams
from tests.exactness.cases import POLICIES, Judge
from tests.exactness.chi_square import FALSE_ALARM, draws_needed, p_value
from tests.exactness.mutants import (
    duplicates_collapsed,
    raw_q_without_replacement,
    token_residual_in_block,
)
from tests.exactness.toy_drafters import DRAFTERS
from tests.exactness.toy_text import ToyText

TOKENS, VOCAB = 4, 3
PARAMS = SamplingParams(temperature=1.0)


def keyed(seeds_B: Tensor, rounds_B: Tensor, root_positions_B: Tensor) -> tuple:
    source = KeyedSource(seeds_B, rounds_B)
    return source, source


def reused(seeds_B: Tensor, rounds_B: Tensor, root_positions_B: Tensor) -> tuple:
    """The same noise in every round."""
    return keyed(seeds_B, torch.zeros_like(rounds_B), root_positions_B)


def codes(text_BL: Tensor, vocab: int = VOCAB) -> Tensor:
    return (text_BL * vocab ** torch.arange(text_BL.shape[1] - 1, -1, -1)).sum(1)


def sample(toy: ToyText, judge, sources, draws: int, first_seed: int = 0) -> Tensor:
    policy = PolicyTensors.stack([PARAMS]).select(torch.zeros(draws, dtype=torch.int64))
    seeds_B = torch.arange(first_seed, first_seed + draws)
    text_BL = toy.decode(judge, sources, policy, seeds_B, TOKENS, torch.float32)
    return codes(text_BL)


def plain_law(toy: ToyText) -> Tensor:
    return toy.law_of_text({1: toy.logits_SV.softmax(-1)}, TOKENS)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rounds_follow_one_another_exactly(drafter: str) -> None:
    """The enumerated law of several rounds on the toy text is plain sampling's law."""
    toy = ToyText(*DRAFTERS[drafter], VOCAB)
    mass = toy.enumerate_rounds(LAWS["rejection"].judge, PARAMS)
    off = (toy.law_of_text(mass, TOKENS) - plain_law(toy)).abs().max().item()
    assert off <= 1e-12


@pytest.mark.parametrize(
    "law, drafter, control, tables",
    [
        ("rejection", "without replacement", raw_q_without_replacement, 1),
        ("rejection", "two SSMs merged", duplicates_collapsed, 12),
        ("block", "short chain", token_residual_in_block, 15),
    ],
)
def test_real_generator_keeps_the_law_over_rounds(
    law: str, drafter: str, control: Judge, tables: int
) -> None:
    toy = ToyText(*DRAFTERS[drafter], VOCAB, seed=tables)
    truth = plain_law(toy)
    wrong = toy.law_of_text(toy.enumerate_rounds(control, PARAMS), TOKENS)
    draws = draws_needed(truth, wrong)
    assert p_value(sample(toy, LAWS[law].judge, keyed, draws), truth) > FALSE_ALARM
    assert p_value(sample(toy, control, keyed, draws), truth) < FALSE_ALARM


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_noise_reused_in_the_next_round_is_seen(law: str) -> None:
    toy = ToyText(*DRAFTERS["short chain"], VOCAB, seed=3)
    truth, draws = plain_law(toy), 20_000
    assert p_value(sample(toy, LAWS[law].judge, keyed, draws), truth) > FALSE_ALARM
    assert p_value(sample(toy, LAWS[law].judge, reused, draws), truth) < FALSE_ALARM


class DraftsKeyedByPosition(KeyedSource):
    """Wrong for the block law, which has already looked at the drafts it then throws away."""

    def __init__(self, seeds_B: Tensor, rounds_B: Tensor, root_positions_B: Tensor):
        super().__init__(seeds_B, rounds_B)
        self.draft_source = KeyedSource(seeds_B, torch.zeros_like(rounds_B))
        self.root_positions_B = root_positions_B

    def categorical(self, probs_BV, purpose, node_B, trial) -> Tensor:
        if purpose != 1:
            return super().categorical(probs_BV, purpose, node_B, trial)
        return self.draft_source.categorical(
            probs_BV, purpose, self.root_positions_B + node_B, torch.zeros_like(node_B)
        )


def test_drafts_keyed_by_position_bias_the_block_law() -> None:
    toy = ToyText(*DRAFTERS["short chain"], VOCAB, seed=15)

    def by_position(*keys: Tensor) -> tuple:
        source = DraftsKeyedByPosition(*keys)
        return source, source

    truth, draws = plain_law(toy), 30_000
    assert p_value(sample(toy, LAWS["block"].judge, keyed, draws), truth) > FALSE_ALARM
    assert p_value(sample(toy, LAWS["block"].judge, by_position, draws), truth) < FALSE_ALARM


# ---- plain sampling: neighbouring seeds, positions, rounds -------------------------------------

PROBS = torch.tensor([0.45, 0.3, 0.2, 0.05, 0.0])
PAIR_LAW = (PROBS.double()[:, None] * PROBS.double()).flatten()
# A control that repeats one draw in two for 1 % of the pairs.
STICKY_LAW = 0.99 * PAIR_LAW + 0.01 * torch.diag(PROBS.double()).flatten()
DRAWS = draws_needed(PAIR_LAW, STICKY_LAW)


def gumbel_draws(seeds_B: Tensor, position: int) -> Tensor:
    noise_BV = gumbel_noise(seeds_B, torch.full((len(seeds_B), 1), position), len(PROBS))[:, 0]
    return gumbel_argmax(PROBS.expand(len(seeds_B), -1), noise_BV)


def keyed_draws(seeds_B: Tensor, played: int, node: int = 0, trial: int = 0) -> Tensor:
    source = KeyedSource(seeds_B, torch.full_like(seeds_B, played))
    return source.categorical(PROBS.expand(len(seeds_B), -1), 4, node, trial)


SEEDS = torch.arange(DRAWS)
PAIRS = {
    "coupled: positions 7 and 8": lambda: (gumbel_draws(SEEDS, 7), gumbel_draws(SEEDS, 8)),
    "coupled: seeds s and s + 1": lambda: (gumbel_draws(SEEDS, 7), gumbel_draws(SEEDS + 1, 7)),
    "coupled: seed and position swapped": lambda: (
        gumbel_draws(SEEDS, 3),
        gumbel_draws(SEEDS + 1, 2),
    ),
    "keyed: rounds 0 and 1": lambda: (keyed_draws(SEEDS, 0), keyed_draws(SEEDS, 1)),
    "keyed: seeds s and s + 1": lambda: (keyed_draws(SEEDS, 3), keyed_draws(SEEDS + 1, 3)),
    "keyed: seed and round swapped": lambda: (keyed_draws(SEEDS, 1), keyed_draws(SEEDS + 1, 0)),
    "keyed: nodes 1 and 2": lambda: (keyed_draws(SEEDS, 0, 1), keyed_draws(SEEDS, 0, 2)),
    "keyed: trials 0 and 1": lambda: (keyed_draws(SEEDS, 0, 1, 0), keyed_draws(SEEDS, 0, 1, 1)),
    "keyed: node and trial swapped": lambda: (
        keyed_draws(SEEDS, 0, 1, 2),
        keyed_draws(SEEDS, 0, 2, 1),
    ),
    "coupled and keyed": lambda: (gumbel_draws(SEEDS, 1), keyed_draws(SEEDS, 1)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_plain_sampling_draws_are_right_and_independent(name: str) -> None:
    first_B, second_B = PAIRS[name]()
    assert p_value(first_B * len(PROBS) + second_B, PAIR_LAW) > FALSE_ALARM


def test_pairs_that_stick_together_are_seen() -> None:
    first_B, second_B = gumbel_draws(SEEDS, 7), gumbel_draws(SEEDS, 8)
    sticks_B = hash_words(SEEDS, 99) % 100 == 0
    second_B = torch.where(sticks_B, first_B, second_B)
    assert p_value(first_B * len(PROBS) + second_B, PAIR_LAW) < FALSE_ALARM


# ---- rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_row_alone_gives_its_text_in_a_batch(drafter: str) -> None:
    """Its neighbours have other seeds, other policies and other states."""
    toy = ToyText(*DRAFTERS[drafter], vocab=4)
    params = list(POLICIES.values())
    law = LAWS["rejection"].judge
    seeds_B = torch.arange(100, 100 + len(params))
    batch = toy.decode(law, keyed, PolicyTensors.stack(params), seeds_B, 4, torch.float32)
    for row in (2, 5, 8):  # T = 1; top-p; everything at once
        policy = PolicyTensors.stack([params[row]])
        text = toy.decode(law, keyed, policy, seeds_B[row : row + 1], 4, torch.float32)
        assert torch.equal(text[0], batch[row])


def test_position_source_does_not_know_its_batch() -> None:
    seeds_B, positions_B = torch.tensor([5, 6, 5]), torch.tensor([2, 2, 3])
    noise_BV = PositionSource(seeds_B, positions_B).gumbel(0, 7)
    alone_BV = PositionSource(seeds_B[1:2], positions_B[1:2]).gumbel(0, 7)
    assert torch.equal(noise_BV[1:2], alone_BV)
    assert torch.equal(noise_BV[2], PositionSource(seeds_B[:1], positions_B[:1]).gumbel(1, 7)[0])
