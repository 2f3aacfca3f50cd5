"""Walks every random branch of a drafting round, so that its law is computed and not sampled.

`ScriptedSource` stands where the runtime has its `KeyedSource`: it answers each question of the
proposer and of the law from a script, one script a row. `walk` starts from the empty script; a row
whose script ends before the round does reports the question it was asked, and comes back once for
every answer, with the answer's probability multiplied into its weight. Rows of one length run as
one batch, so the code that is walked is the batched production code.

Letters: B rows (branches), K decisions, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_BRANCHES = 200_000
ROWS_AT_ONCE = 16_384  # keeps a batch's tensors in the processor's cache


class ScriptedSource:
    """Random source that reads its decisions from `script_BK`.

    A question with one possible answer takes no place in the script; nor does one asked for node
    -1, by which a law marks the rows that have stopped.
    """

    def __init__(self, script_BK: Tensor):
        self.script_BK = script_BK
        num_rows, self.length = script_BK.shape
        self.rows = torch.arange(num_rows)  # the rows that a call speaks for
        self.silent_B = torch.zeros(num_rows, dtype=torch.bool)
        self.cursor_B = torch.zeros(num_rows, dtype=torch.int64)
        self.open_B = torch.zeros(num_rows, dtype=torch.bool)
        self.open_probs: list[tuple[Tensor, Tensor]] = []  # rows, their answers' probabilities

    def for_rows(self, rows: Tensor, silent_B: Tensor | None = None) -> ScriptedSource:
        """The same source, for calls whose batch is these rows.

        Args:
            silent_B: bool, rows that are finished: their questions have no effect.
        """
        view = copy.copy(self)
        view.rows = rows
        view.silent_B = self.silent_B[rows] if silent_B is None else silent_B
        return view

    def categorical(self, probs_BV: Tensor, purpose: int, node_B: Tensor | int, trial) -> Tensor:
        probs_BV = probs_BV.detach().double()
        asked_B = self._asked(node_B)
        total_B = probs_BV.sum(-1)
        bad_B = asked_B & ~((total_B - 1).abs() < 1e-6)  # fp64 laws; catches NaN and empty rows too
        assert not bad_B.any(), f"categorical was asked with {probs_BV[bad_B][0].tolist()}"
        return self._answer(probs_BV / total_B[:, None], asked_B)

    def bernoulli(self, prob_B: Tensor, purpose: int, node_B: Tensor | int, trial) -> Tensor:
        yes_B = prob_B.detach().double()
        asked_B = self._asked(node_B)
        bad_B = asked_B & ~((yes_B >= 0) & (yes_B < 1 + 1e-9))
        assert not bad_B.any(), f"bernoulli was asked with {yes_B[bad_B][0].item()}"
        yes_B = yes_B.clamp(0, 1)
        return self._answer(torch.stack((1 - yes_B, yes_B), -1), asked_B).bool()

    def _asked(self, node_B: Tensor | int) -> Tensor:
        return (torch.as_tensor(node_B).expand(len(self.rows)) >= 0) & ~self.silent_B

    def _answer(self, probs_BV: Tensor, asked_B: Tensor) -> Tensor:
        rows, cursor_B = self.rows, self.cursor_B[self.rows]
        possible_BV = probs_BV > 0
        answer_B = possible_BV.int().argmax(-1)  # of a row that is not asked, any answer will do
        choice_B = asked_B & ~self.open_B[rows] & (possible_BV.sum(-1) > 1)
        opens_B = choice_B & (cursor_B == self.length)
        if opens_B.any():
            self.open_probs.append((rows[opens_B], probs_BV[opens_B]))
            self.open_B[rows[opens_B]] = True
        scripted_B = choice_B & ~opens_B
        if self.length:
            at_B1 = cursor_B.clamp_max(self.length - 1)[:, None]
            scripted_answer_B = self.script_BK[rows].gather(1, at_B1)[:, 0]
            answer_B = torch.where(scripted_B, scripted_answer_B, answer_B)
        self.cursor_B[rows] = cursor_B + scripted_B.long()
        return answer_B


@dataclass
class Branches:
    """Every branch of a round, from each of S starting states.

    Attributes:
        state_B: int64, the state a branch began in.
        weight_B: float64, its probability; each state's sum to 1.
        results: what the round returned, one row a branch.
    """

    state_B: Tensor
    weight_B: Tensor
    results: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.weight_B)

    def mean(self, value_B: Tensor) -> Tensor:
        """float64 [S]: the expectation of a value of the branches, by state."""
        total_S = torch.zeros(int(self.state_B.max()) + 1, dtype=torch.float64)
        return total_S.index_add(0, self.state_B, self.weight_B * value_B)


def walk(
    play_round: Callable[[ScriptedSource, Tensor], dict[str, Tensor]],
    num_states: int = 1,
    max_branches: int = MAX_BRANCHES,
) -> Branches:
    """Runs `play_round(source, state_B)` over every branch of its randomness.

    Args:
        play_round: returns tensors whose first dimension is the batch; the same code every time,
            its only randomness the source.
        num_states: separate walks that share their batches.
    Raises:
        RuntimeError: if a state has more than `max_branches` branches.
    """
    script_BK = torch.zeros(num_states, 0, dtype=torch.int64)
    state_B, weight_B = torch.arange(num_states), torch.ones(num_states, dtype=torch.float64)
    done: list[Branches] = []
    while len(script_BK):
        longer: list[tuple[Tensor, Tensor, Tensor]] = []
        for rows in torch.arange(len(script_BK)).split(ROWS_AT_ONCE):
            source = ScriptedSource(script_BK[rows])
            result = play_round(source, state_B[rows])
            ends_B = ~source.open_B
            replayed_B = source.cursor_B == source.length
            assert replayed_B[ends_B].all(), "the round did not repeat its script"
            results = {name: value[ends_B] for name, value in result.items()}
            done.append(Branches(state_B[rows][ends_B], weight_B[rows][ends_B], results))
            for asked, probs_RV in source.open_probs:
                row, answer = probs_RV.nonzero(as_tuple=True)
                origin = rows[asked[row]]
                script = torch.cat((script_BK[origin], answer[:, None]), 1)
                longer.append((script, state_B[origin], weight_B[origin] * probs_RV[row, answer]))
        if not longer:
            break
        script_BK, state_B, weight_B = (torch.cat(parts) for parts in zip(*longer, strict=True))
        count_S = torch.cat([state_B, *(part.state_B for part in done)]).bincount()
        if count_S.max() > max_branches:
            raise RuntimeError(f"more than {max_branches} branches: make the case smaller")
    return Branches(
        torch.cat([part.state_B for part in done]),
        torch.cat([part.weight_B for part in done]),
        {name: torch.cat([part.results[name] for part in done]) for name in done[0].results},
    )
