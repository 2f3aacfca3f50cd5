"""Slot KV cache: one preallocated tensor, slots chosen by the caller.

Letters: B rows, C capacity in slots, N nodes, D longest accepted path, H key/value heads.

Row b's committed text occupies slots 0..length_b - 1. The nodes of a tree go to the scratch slots
behind it: node i to slot length_b + i. Nothing sees a slot behind a row's length except through the
tree mask, so rejected nodes, padding and finished rows need no cleaning up: they are overwritten.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """One layer's view of the slot cache."""

    is_compileable = True
    is_sliding = False

    def __init__(self, owner: SlotCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.owner = owner
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the owner allocated everything."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [rows, H, T, dim] states to the chosen slots; returns the visible part."""
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        owner = self.owner
        slots = owner.write_slots
        if owner.rows is not None and len(owner.rows) == 1:
            store = store[owner.rows[0] : owner.rows[0] + 1]
        elif owner.rows is not None:  # several rows of a larger batch: prefill only
            store[owner.row_index[:, None], :, slots] = states.transpose(1, 2)
            return store[owner.row_index, :, : owner.visible]
        if store.shape[0] == 1:
            store.index_copy_(2, slots[0], states)
        else:
            store.scatter_(2, slots[:, None, :, None].expand_as(states), states)
        return store[:, :, : owner.visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.visible, 0

    def get_seq_length(self) -> int:
        return 0  # positions are always given explicitly

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class SlotCache(Cache):
    """KV cache of all layers, written at slots that the caller chooses.

    Args:
        layer_shapes: per layer ((H, key_dim), (H, value_dim)).
        batch_size: rows.
        capacity: slots a row; committed text and one tree must fit.
    """

    def __init__(
        self,
        layer_shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]],
        batch_size: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_rows, self.capacity = batch_size, capacity
        self.visible = capacity
        self.rows: Sequence[int] | None = None
        self.write_slots = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        # One tensor per distinct shape: a usual model has one, [2·L, B, H, C, dim].
        members: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for layer, shapes in enumerate(layer_shapes):
            for kind, shape in enumerate(shapes):
                members[shape].append((layer, kind))
        self._stores: list[torch.Tensor] = []
        views: dict[tuple[int, int], torch.Tensor] = {}
        for (heads, dim), places in members.items():
            # Zeros, not empty: a masked slot still enters 0 · value, and 0 · NaN is NaN.
            store = torch.zeros(
                len(places), batch_size, heads, capacity, dim, dtype=dtype, device=device
            )
            self._stores.append(store)
            views |= {place: store[i] for i, place in enumerate(places)}
        layers = [SlotLayer(self, views[i, 0], views[i, 1]) for i in range(len(layer_shapes))]
        super().__init__(layers=layers)

    def write_to(
        self, slots_BT: torch.Tensor, visible: int, rows: Sequence[int] | None = None
    ) -> None:
        """Chooses where the next forward writes and how far it sees.

        Args:
            slots_BT: int64, one slot per token of the forward.
            visible: attention reads slots 0..visible - 1.
            rows: the rows of the cache that the forward carries; None for all.
        """
        if visible > self.capacity:
            raise ValueError(f"cache: {visible} visible slots of {self.capacity}")
        self.write_slots, self.visible, self.rows = slots_BT, visible, rows
        if rows is not None:
            self.row_index = torch.tensor(rows, device=slots_BT.device)

    def commit(self, lengths_B: torch.Tensor, path_BD: torch.Tensor) -> None:
        """Moves the accepted nodes down, behind the committed text, for all layers at once.

        Args:
            lengths_B: committed length before this round.
            path_BD: node indices, the root first, -1 after the last accepted node.
        """
        steps = torch.arange(path_BD.shape[1], device=path_BD.device)
        target_BD = lengths_B[:, None] + steps
        # A slot after the last accepted node is copied onto itself.
        source_BD = torch.where(path_BD >= 0, lengths_B[:, None] + path_BD, target_BD)
        for store in self._stores:
            places, batch, heads, _, dim = store.shape
            shape = (places, batch, heads, path_BD.shape[1], dim)
            moved = store.gather(3, source_BD[None, :, None, :, None].expand(shape))
            store.scatter_(3, target_BD[None, :, None, :, None].expand(shape), moved)

    def committed(self, row: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer (keys, values) [H, length, dim] of a row's committed text."""
        return [
            (layer.keys[row, :, :length], layer.values[row, :, :length]) for layer in self.layers
        ]
