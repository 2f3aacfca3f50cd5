"""Which rows a training step sees: a function of the seed and the step, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class StepOrder:
    """Global step s takes rows s·B .. (s+1)·B - 1 of an endless stream of shuffled epochs.

    The global batch of a step is cut into micro-batches, and those are dealt to the processes, so
    1 process × 8 rows, 2 × 4 and 2 × 2 × 2 accumulation steps see the same rows. The step is the
    whole data position: nothing else has to be saved. An epoch that ends inside a step goes on with
    the next one, so that all processes always have full batches.

    Args:
        rows: packed rows; `collate` makes a batch of some of them.
        batch_size: rows of a global step. micro_batch_size: rows of one forward.
    Raises:
        ValueError: if the batch cannot be dealt out evenly.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        collate: Callable[[list[Any]], dict[str, Any]],
        batch_size: int,
        micro_batch_size: int,
        seed: int,
        process_index: int = 0,
        num_processes: int = 1,
    ) -> None:
        if not rows:
            raise ValueError("there is not one row to train on")
        share = micro_batch_size * num_processes
        if batch_size % share:
            raise ValueError(
                f"batch_size {batch_size} is no multiple of micro_batch_size {micro_batch_size} × "
                f"{num_processes} processes"
            )
        self.num_rows = len(rows)
        self.accumulation = batch_size // share
        self._rows, self._collate, self._seed = rows, collate, seed
        self._batch_size, self._micro_batch_size = batch_size, micro_batch_size
        self._process_index, self._num_processes = process_index, num_processes
        self._epochs: dict[int, torch.Tensor] = {}

    def indices(self, step: int) -> list[int]:
        """Row numbers of a global step, all processes together."""
        start = step * self._batch_size
        return [self._at(position) for position in range(start, start + self._batch_size)]

    def of_step(self, step: int) -> list[dict[str, Any]]:
        """This process's micro-batches of a global step."""
        indices, size = self.indices(step), self._micro_batch_size
        parts = [indices[i : i + size] for i in range(0, len(indices), size)]
        mine = parts[self._process_index :: self._num_processes]
        return [self._collate([self._rows[i] for i in part]) for part in mine]

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self.num_rows)
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            # A step touches two epochs at most, unless it is larger than an epoch.
            self._epochs = {k: v for k, v in self._epochs.items() if k >= epoch - 1}
            self._epochs[epoch] = torch.randperm(self.num_rows, generator=generator)
        return int(self._epochs[epoch][offset])
