"""Where every random decision comes from, so that tests can walk them all and rows stay apart.

Letters: B rows, P positions, V vocabulary.

A law asks its `Source` two kinds of question, `categorical` and `bernoulli`. In production the
answers come from uniforms keyed by (row seed, the row's round, purpose, node, trial): nothing is
drawn twice, no row sees its neighbours, and nothing is stored. The coupled law alone is keyed by
(row seed, absolute position).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

NOT_ASKED = -1  # the node a law names for rows that have stopped: any answer will do


class Purpose(IntEnum):
    """What a uniform is for; drafts and verdicts never share one."""

    DRAFT = 1  # a proposer's draw
    ACCEPT = 2  # whether a trial is accepted
    SIBLINGS = 3  # the one draw that judges a block of delta trials
    FINAL = 4  # correction, bonus, or plain sampling
    POSITION = 5  # Gumbel noise of the coupled law


class Source(Protocol):
    """Answers random questions for all rows at once.

    `node_B` and `trial` are int64 [B] or int; rows with node -1 are not asking, and get any answer.
    """

    def categorical(
        self, probs_BV: Tensor, purpose: int, node_B: Tensor | int, trial: Tensor | int
    ) -> Tensor:
        """int64 [B]: a token from each row of probs_BV (non-negative, summing to one)."""
        ...

    def bernoulli(
        self, prob_B: Tensor, purpose: int, node_B: Tensor | int, trial: Tensor | int
    ) -> Tensor:
        """bool [B]: True with probability prob_B."""
        ...


class UniformSource:
    """Turns uniforms into decisions; subclasses say where the uniforms come from."""

    def uniform(self, purpose: int, node_B: Tensor | int, trial: Tensor | int) -> Tensor:
        """float64 [B] in [0, 1)."""
        raise NotImplementedError

    def categorical(
        self, probs_BV: Tensor, purpose: int, node_B: Tensor | int, trial: Tensor | int
    ) -> Tensor:
        """int64 [B]: inverse CDF; see `inverse_cdf`."""
        return inverse_cdf(probs_BV, self.uniform(purpose, node_B, trial))

    def bernoulli(
        self, prob_B: Tensor, purpose: int, node_B: Tensor | int, trial: Tensor | int
    ) -> Tensor:
        """bool [B]: u < prob, strict, so that probability zero never happens even at u = 0."""
        return self.uniform(purpose, node_B, trial) < prob_B.double()


class KeyedSource(UniformSource):
    """Counter-based uniforms: the same key gives the same uniform, in any batch, on any device.

    Args:
        seeds_B: int64 [B], each row's seed.
        rounds_B: int64 [B], how many rounds each row has played (the row's own count).
    """

    def __init__(self, seeds_B: Tensor, rounds_B: Tensor):
        self.key_B = hash_words(seeds_B, rounds_B)

    def uniform(self, purpose: int, node_B: Tensor | int, trial: Tensor | int) -> Tensor:
        return to_uniform(hash_words(self.key_B, int(purpose), node_B, trial))


class PositionSource:
    """Gumbel noise keyed by (row seed, absolute position), for the coupled law.

    Args:
        seeds_B: int64 [B].
        root_positions_B: int64 [B], index of the root token in its row's text. The token after
            the root is decided with the noise of root position + 1.
    """

    def __init__(self, seeds_B: Tensor, root_positions_B: Tensor):
        self.seeds_B, self.root_positions_B = seeds_B, root_positions_B

    def gumbel(self, depth: int, vocab_size: int) -> Tensor:
        """float64 [B, V]: noise for the token that follows a node of this depth (root: 0)."""
        positions_B1 = (self.root_positions_B + depth + 1)[:, None]
        return gumbel_noise(self.seeds_B, positions_B1, vocab_size)[:, 0]


def inverse_cdf(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """int64 [B]: the token at which the cumulative probability first exceeds uniform * total.

    The CDF is kept in integers of 2^-62: their sums are exact, so it is monotone however a device
    adds, and a token of probability zero has an empty interval. (A float64 CDF added in parallel is
    not monotone.) A uniform of 1 - 2^-53 still ends below the total: it takes off more than the
    total's rounding to float64 can have put on. What is lost is under 2^-62 a token. Rows without
    any mass give an arbitrary token.
    """
    weights_BV = (probs_BV.double() * 2.0**62).long()
    cdf_BV = weights_BV.cumsum(-1)
    total_B1 = cdf_BV[..., -1:]
    target_B1 = (uniform_B[..., None] * total_B1.double()).long()
    token_B1 = torch.searchsorted(cdf_BV, target_B1, right=True)
    return token_B1[..., 0].clamp(max=probs_BV.shape[-1] - 1)


def gumbel_noise(seeds_B: Tensor, positions_BP: Tensor, vocab_size: int) -> Tensor:
    """float64 [B, P, V]: standard Gumbel noise keyed by (row seed, absolute position, token).

    Args:
        seeds_B: int64 [B].
        positions_BP: int64 [B, P], index in the row's text of the token the noise decides.
    """
    key_BP1 = hash_words(seeds_B[:, None], int(Purpose.POSITION), positions_BP)[..., None]
    token_V = mix64(torch.arange(vocab_size, device=seeds_B.device) + GOLDEN)
    bits_BPV = mix64(key_BP1 ^ token_V)
    # 52 bits and a half: never 0 and never 1, so both logarithms are finite.
    uniform_BPV = ((_shift(bits_BPV, 12)).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform_BPV))


def gumbel_argmax(probs_BV: Tensor, gumbel_BV: Tensor) -> Tensor:
    """int64 [B]: argmax(log p + g), a draw from p when g is standard Gumbel noise."""
    return (probs_BV.double().log() + gumbel_BV).argmax(-1)


# splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words whose output bits each depend on
# every input bit. torch has no unsigned arithmetic, but int64 products wrap, which is the same.
def _signed(word: int) -> int:
    return (word & (2**64 - 1)) - (word >> 63 & 1) * 2**64


GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shift(word: Tensor, bits: int) -> Tensor:
    """Logical right shift of an int64 (torch's own keeps the sign)."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def mix64(word: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 tensors."""
    word = (word ^ _shift(word, 30)) * _MIX_1
    word = (word ^ _shift(word, 27)) * _MIX_2
    return word ^ _shift(word, 31)


def hash_words(first: Tensor, *words: Tensor | int) -> Tensor:
    """int64: a hash of a sequence of words (they broadcast).

    Each word is mixed before it meets the state and the state is mixed after, so keys that differ
    by the same sums or bits do not meet; (1, 2) and (2, 1) differ.
    """
    state = mix64(first + GOLDEN)
    for word in words:
        if not isinstance(word, Tensor):
            word = torch.full((), word, dtype=torch.int64, device=first.device)
        state = mix64((state + GOLDEN) ^ mix64(word + GOLDEN))
    return state


def to_uniform(bits: Tensor) -> Tensor:
    """float64 in [0, 1) from the upper 53 bits of an int64 hash."""
    return _shift(bits, 11).double() * 2.0**-53


def draw_iid(
    probs_BV: Tensor, source: Source, node_B: Tensor | int, trials: Sequence[int]
) -> Tensor:
    """int64 [B, K]: K = len(trials) independent draws from q at one parent ("iid" trials).

    Args:
        probs_BV: float, a proper distribution a row.
        node_B: the parent's node index; -1 for rows that lack the parent.
        trials: the trial index of each draw, part of its key.
    """
    draws = [source.categorical(probs_BV, Purpose.DRAFT, node_B, trial) for trial in trials]
    return torch.stack(draws, 1)


def draw_without_replacement(
    probs_BV: Tensor, source: Source, node_B: Tensor | int, trials: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """K = len(trials) draws from q without replacement, in draw order ("wor" trials).

    Args: as in `draw_iid`.
    Returns:
        (tokens_BK int64, exists_BK bool): a row whose q has fewer than K possible tokens gets fewer
        draws (the rest do not exist); rows with node -1 get none.
    """
    batch, device = probs_BV.shape[0], probs_BV.device
    if not isinstance(node_B, Tensor):
        node_B = torch.full((batch,), node_B, device=device)
    rest_BV = probs_BV
    tokens: list[Tensor] = []
    exists: list[Tensor] = []
    for index, trial in enumerate(trials):
        if index:
            rest_BV = rest_BV.scatter(1, tokens[-1][:, None], 0.0)
        total_B = rest_BV.sum(-1)
        exists_B = (node_B >= 0) & (total_B > 0)
        here_B = torch.where(exists_B, node_B, NOT_ASKED)
        share_BV = rest_BV / torch.where(total_B > 0, total_B, 1)[:, None]
        tokens.append(source.categorical(share_BV, Purpose.DRAFT, here_B, trial))
        exists.append(exists_B)
    return torch.stack(tokens, 1), torch.stack(exists, 1)
