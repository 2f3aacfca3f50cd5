"""Uniforms keyed by what they are for, the inverse CDF, and draws for proposals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inference.randomness import (
    NOT_ASKED,
    KeyedSource,
    PositionSource,
    Purpose,
    UniformSource,
    draw_iid,
    draw_without_replacement,
    gumbel_argmax,
    gumbel_noise,
    hash_words,
    inverse_cdf,
    mix64,
    to_uniform,
)

LARGEST = 1 - 2.0**-53


def splitmix64(word: int) -> int:
    """The published finaliser, in unsigned Python integers."""
    mask = 2**64 - 1
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return word ^ (word >> 31)


def keyed(seed: int = 0, round_: int = 0) -> KeyedSource:
    return KeyedSource(torch.tensor([seed]), torch.tensor([round_]))


def chi_square(counts_V: Tensor, probs_V: Tensor) -> float:
    expected_V = probs_V * counts_V.sum()
    return float((((counts_V - expected_V) ** 2) / expected_V).sum())


def test_mixing_is_splitmix64():
    words = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    mixed = mix64(torch.tensor(words)).tolist()
    assert [word % 2**64 for word in mixed] == [splitmix64(word % 2**64) for word in words]


def test_uniform_uses_the_upper_53_bits():
    bits = torch.tensor([0, -1, 1 << 11, -(2**63)])
    assert to_uniform(bits).tolist() == [0.0, LARGEST, 2.0**-53, 0.5]


def test_every_word_of_the_key_counts_and_none_add_up():
    """All keys of a grid that sums, products and swaps would fold together are distinct."""
    grid = torch.cartesian_prod(*[torch.arange(-4, 12)] * 4)
    hashes = hash_words(grid[:, 0], grid[:, 1], grid[:, 2], grid[:, 3])
    assert len(hashes.unique()) == len(grid)
    # A one-bit change of one word flips half of the hash's 64 bits.
    for word in range(4):
        other = grid.clone()
        other[:, word] ^= 1
        flipped = hashes ^ hash_words(*other.unbind(1))
        ones = torch.stack([(flipped >> bit) & 1 for bit in range(64)]).double()
        assert ones.mean(1).sub(0.5).abs().max() < 5 * 0.5 / len(grid) ** 0.5


def test_source_keys_by_seed_round_purpose_node_and_trial():
    base = (3, 5, int(Purpose.ACCEPT), 2, 1)
    seen = set()
    for word in range(5):
        for change in (0, 1, 2, 1000):
            key = list(base)
            key[word] += change
            uniform = keyed(*key[:2]).uniform(*key[2:])
            assert uniform.dtype == torch.float64
            seen.add(float(uniform))
    assert len(seen) == 5 * 3 + 1


def test_neighbouring_keys_are_independent():
    """16 x 16 cells of (u, the next key's u): χ² with 255 degrees of freedom.

    At 200,000 pairs, a false alarm at 400 has odds under 1e-8; sharing a stream, or a drift of 2 %
    of the mass, is far beyond it.
    """
    count = 200_000
    seeds_B, zeros_B = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    source = KeyedSource(seeds_B, zeros_B)
    first = source.uniform(Purpose.ACCEPT, 0, 0)
    others = {
        "seed": KeyedSource(seeds_B + 1, zeros_B).uniform(Purpose.ACCEPT, 0, 0),
        "round": KeyedSource(seeds_B, zeros_B + 1).uniform(Purpose.ACCEPT, 0, 0),
        "purpose": source.uniform(Purpose.DRAFT, 0, 0),
        "node": source.uniform(Purpose.ACCEPT, 1, 0),
        "trial": source.uniform(Purpose.ACCEPT, 0, 1),
    }
    flat_V = torch.full((256,), 1 / 256, dtype=torch.float64)
    for name, second in others.items():
        cells = (first * 16).long() * 16 + (second * 16).long()
        assert chi_square(cells.bincount(minlength=256), flat_V) < 400, name
    same = (first * 16).long() * 17  # the negative control: one stream used twice
    assert chi_square(same.bincount(minlength=256), flat_V) > 100_000


def test_row_is_the_same_alone_and_in_a_batch():
    seeds_B, rounds_B = torch.tensor([7, 1, 7, -5]), torch.tensor([0, 2, 3, 0])
    node_B = torch.tensor([0, 4, 2, 1])
    probs_BV = torch.rand(4, 9, dtype=torch.float64).softmax(-1)
    together = KeyedSource(seeds_B, rounds_B).categorical(probs_BV, Purpose.FINAL, node_B, 3)
    for row in range(4):
        source = keyed(int(seeds_B[row]), int(rounds_B[row]))
        alone = source.categorical(probs_BV[row : row + 1], Purpose.FINAL, int(node_B[row]), 3)
        assert alone == together[row]


def test_categorical_follows_its_distribution():
    """χ² over seeds, 4 degrees of freedom; beyond 50 has odds of 4e-10. A zero never comes."""
    probs_V = torch.tensor([0.02, 0.5, 0.0, 0.28, 0.15, 0.05], dtype=torch.float64)
    count = 100_000
    source = KeyedSource(torch.arange(count), torch.zeros(count, dtype=torch.int64))
    draws = source.categorical(probs_V.expand(count, -1), Purpose.FINAL, 0, 0)
    counts_V = draws.bincount(minlength=6)
    possible_V = probs_V > 0
    assert counts_V[2] == 0
    assert chi_square(counts_V[possible_V], probs_V[possible_V]) < 50
    shifted_V = probs_V[possible_V] + torch.tensor([0.01, -0.01, 0, 0, 0])
    assert chi_square(counts_V[possible_V], shifted_V) > 50  # 1 % of mass moved is seen


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, LARGEST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_cdf_never_gives_an_impossible_token(uniform, dtype):
    generator = torch.Generator().manual_seed(0)
    probs_BV = torch.rand(200, 1000, generator=generator, dtype=dtype) ** 8
    probs_BV[torch.rand(200, 1000, generator=generator) < 0.9] = 0
    probs_BV[:, 500] += 1e-3
    probs_BV[:, :10] = probs_BV[:, -10:] = 0
    probs_BV /= probs_BV.sum(-1, keepdim=True)
    probs_BV[::2] *= 1 - 1e-6  # sums as far from one as fp32 leaves them
    token_B = inverse_cdf(probs_BV, torch.full((200,), uniform, dtype=torch.float64))
    assert (probs_BV.gather(1, token_B[:, None]) > 0).all()


def test_inverse_cdf_at_the_edges():
    probs_BV = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    for uniform, token in [(0.0, 1), (0.25 - 2**-53, 1), (0.25, 3), (LARGEST, 3)]:
        assert inverse_cdf(probs_BV, torch.tensor([uniform], dtype=torch.float64)) == token


def test_bernoulli_is_strict():
    class Zero(UniformSource):
        def uniform(self, purpose, node_B, trial):
            return torch.zeros(3, dtype=torch.float64)

    probs_B = torch.tensor([0.0, 1e-300, 1.0], dtype=torch.float64)
    assert Zero().bernoulli(probs_B, Purpose.ACCEPT, 0, 0).tolist() == [False, True, True]


def test_gumbel_noise_depends_on_seed_position_and_token_only():
    seeds_B = torch.tensor([4, 9])
    noise_BPV = gumbel_noise(seeds_B, torch.tensor([[10, 11, 12], [3, 10, 4]]), 50)
    assert noise_BPV.shape == (2, 3, 50) and noise_BPV.isfinite().all()
    assert len(noise_BPV.unique()) == noise_BPV.numel()
    source = PositionSource(seeds_B[:1], torch.tensor([10]))
    assert torch.equal(source.gumbel(0, 50)[0], noise_BPV[0, 1])  # decides position 11
    assert torch.equal(source.gumbel(1, 50)[0], noise_BPV[0, 2])
    wider = gumbel_noise(seeds_B[:1], torch.tensor([[11]]), 60)
    assert torch.equal(wider[0, 0, :50], noise_BPV[0, 1])


def test_plain_sampling_by_gumbel_follows_p_and_positions_are_independent():
    """Pairs of tokens at neighbouring positions, over seeds: χ², 15 degrees of freedom.

    At 60,000 pairs a false alarm at 80 has odds of 7e-11; noise shared by the two positions gives
    thousands.
    """
    probs_V, count = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), 60_000
    noise_BPV = gumbel_noise(torch.arange(count), torch.tensor([[5, 6]]).expand(count, -1), 4)
    first, second = (gumbel_argmax(probs_V, noise_BPV[:, p]) for p in (0, 1))
    pairs = (first * 4 + second).bincount(minlength=16)
    assert chi_square(pairs, torch.outer(probs_V, probs_V).flatten()) < 80
    twice = (first * 5).bincount(minlength=16)
    assert chi_square(twice, torch.outer(probs_V, probs_V).flatten()) > 1000


class Asked(KeyedSource):
    """Remembers the distributions, purposes, nodes and trials it was asked for."""

    def __init__(self, seeds_B, rounds_B):
        super().__init__(seeds_B, rounds_B)
        self.questions = []

    def categorical(self, probs_BV, purpose, node_B, trial):
        self.questions.append((probs_BV, purpose, node_B, trial))
        return super().categorical(probs_BV, purpose, node_B, trial)


def test_draws_without_replacement_come_from_what_is_left():
    probs_BV = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).expand(40, -1)
    source = Asked(torch.arange(40), torch.zeros(40, dtype=torch.int64))
    tokens_BK, exists_BK = draw_without_replacement(probs_BV, source, 2, (5, 6, 7))
    assert exists_BK.all()
    for k, (asked_BV, purpose, node_B, trial) in enumerate(source.questions):
        assert (purpose, trial) == (Purpose.DRAFT, 5 + k) and (node_B == 2).all()
        for row in range(40):
            earlier = tokens_BK[row, :k].tolist()
            expected = [0.0 if v in earlier else probs_BV[row, v].item() for v in range(4)]
            expected = [weight / sum(expected) for weight in expected]
            assert asked_BV[row].tolist() == pytest.approx(expected, abs=1e-15)
            assert tokens_BK[row, k].item() not in earlier


def test_exhausted_support_gives_fewer_draws():
    probs_BV = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5]])
    node_B = torch.tensor([0, 1, 2, NOT_ASKED])
    source = Asked(torch.arange(4), torch.zeros(4, dtype=torch.int64))
    tokens_BK, exists_BK = draw_without_replacement(probs_BV, source, node_B, (0, 1, 2))
    assert exists_BK.sum(1).tolist() == [1, 2, 3, 0]
    assert exists_BK.tolist() == [[k < n for k in range(3)] for n in (1, 2, 3, 0)]
    assert tokens_BK[0, 0] == 1 and sorted(tokens_BK[1, :2].tolist()) == [0, 2]
    assert [node_B.tolist() for _, _, node_B, _ in source.questions] == [
        [0, 1, 2, -1],
        [-1, 1, 2, -1],
        [-1, -1, 2, -1],
    ]
    for asked_BV, _, _, _ in source.questions:
        assert asked_BV.isfinite().all()


def test_iid_draws_have_keys_of_their_own():
    probs_BV = torch.full((2000, 50), 1 / 50, dtype=torch.float64)
    source = Asked(torch.arange(2000), torch.zeros(2000, dtype=torch.int64))
    tokens_BK = draw_iid(probs_BV, source, 3, (0, 1))
    assert tokens_BK.shape == (2000, 2)
    assert [question[1:] for question in source.questions] == [
        (Purpose.DRAFT, 3, t) for t in (0, 1)
    ]
    equal = (tokens_BK[:, 0] == tokens_BK[:, 1]).double().mean().item()
    assert abs(equal - 1 / 50) < 6 * (0.02 * 0.98 / 2000) ** 0.5
