"""The target's forward over prompts and token trees, unpatched: mask, positions, slots.

Letters: B rows, T tokens, N nodes (the root included), S visible slots, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from transformers import DynamicCache

from drafters.target import Target
from inference.attention import attention_configs, use_folded_attention
from inference.cache import SlotCache
from inference.packing import PackedLinears, can_pack
from inference.tree import ancestor_mask

VISIBLE_BUCKET = 64  # attention reads a multiple of this many slots
PREFILL_CHUNK = 512  # prompt tokens a forward, so that a long prompt's memory stays bounded


class UnsupportedTargetError(ValueError):
    """The target cannot be run over a token tree; the message says why."""


class TargetForward:
    """Runs a target over prompts and trees against a slot cache.

    Args:
        pack_weights: keep packed copies of the linear layers (CPU only, doubles their memory);
            None: where the machine has the kernels.
    """

    def __init__(self, target: Target, pack_weights: bool | None = None) -> None:
        self.target = target
        self._configs = attention_configs(target.model)
        self._layer_shapes = probe_layer_shapes(target)
        kv_heads = {shape[0][0] for shape in self._layer_shapes}
        heads = getattr(target.config, "num_attention_heads", None)
        # The mask is folded once a step where all layers group their queries alike.
        self._groups = heads // kv_heads.pop() if heads and len(kv_heads) == 1 else 1
        self._windows = attention_windows(target)
        packable = can_pack(target.dtype, target.device)
        if pack_weights and not packable:
            raise ValueError(f"pack_weights: no packed kernels for {target.dtype} on this device")
        use_packed = packable if pack_weights is None else pack_weights
        self._packed = PackedLinears(target.model) if use_packed else None

    def new_cache(self, batch_size: int, capacity: int) -> SlotCache:
        target = self.target
        return SlotCache(self._layer_shapes, batch_size, capacity, target.dtype, target.device)

    def tree(
        self,
        tokens_BN: torch.Tensor,
        parents_BN: torch.Tensor,
        max_depth: int,
        lengths_B: torch.Tensor,
        longest: int,
        cache: SlotCache,
    ) -> torch.Tensor:
        """Features f [B, N, D] of every node, each given the committed text and its ancestors.

        Args:
            tokens_BN, parents_BN: see `Proposal`.
            lengths_B: int64, committed tokens of each row; `longest` is their maximum.
        """
        num_nodes = tokens_BN.shape[1]
        visible = min(_bucket(longest + num_nodes), cache.capacity)
        ancestors_BNN = ancestor_mask(parents_BN, max_depth)
        depths_BN = ancestors_BNN.sum(-1) - 1
        slots_BN = lengths_B[:, None] + torch.arange(num_nodes, device=tokens_BN.device)
        positions_BN = lengths_B[:, None] + depths_BN
        masks = self._masks(ancestors_BNN, positions_BN, lengths_B, visible)
        cache.write_to(slots_BN, visible)
        return self._run(tokens_BN, positions_BN, masks, cache)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        cache: SlotCache,
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Runs prompts into their rows of the cache, a chunk at a time, padded on the right.

        Yields:
            (start, tokens_BT, features_BTD) of each chunk. Columns behind a prompt's end are
            padding: their features mean nothing, and nothing sees their slots.
        """
        device = self.target.device
        longest = max(len(prompt) for prompt in prompts)
        padded = [list(prompt) + [0] * (longest - len(prompt)) for prompt in prompts]
        all_tokens = torch.tensor(padded, device=device)
        every_row = list(rows) == list(range(cache.num_rows))
        for start in range(0, longest, PREFILL_CHUNK):
            tokens_BT = all_tokens[:, start : start + PREFILL_CHUNK]
            batch, length = tokens_BT.shape
            positions_BT = torch.arange(start, start + length, device=device).expand(batch, -1)
            causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            lengths_B = torch.full((batch,), start, device=device)
            visible = min(_bucket(start + length), cache.capacity)
            masks = self._masks(causal.expand(batch, -1, -1), positions_BT, lengths_B, visible)
            cache.write_to(positions_BT, visible, None if every_row else rows)
            yield start, tokens_BT, self._run(tokens_BT, positions_BT, masks, cache)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """target.logits on the packed head."""
        with self._fast():
            return self.target.logits(features)

    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        masks: torch.Tensor | dict[str, torch.Tensor],
        cache: SlotCache,
    ) -> torch.Tensor:
        # Learned positions end at the context's end. A node beyond it can only propose text that is
        # cut, so its position is clamped; no committed token ever sits there.
        positions = positions.clamp_max(self.target.max_length - 1)
        with self._fast():
            return self.target.features(
                tokens, attention_mask=masks, position_ids=positions, cache=cache, use_cache=True
            )

    @contextmanager
    def _fast(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(use_folded_attention(self._configs))
            if self._packed is not None:
                stack.enter_context(self._packed.active())
            yield

    def _masks(
        self,
        ancestors_BTT: torch.Tensor,
        positions_BT: torch.Tensor,
        lengths_B: torch.Tensor,
        visible: int,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [B, 1, G·T, S], one per layer type if they differ.

        A query sees the committed slots of its row and, among the tokens of this forward (slots
        length_b + i), its ancestors and itself. Windows go by position, never by slot.
        """
        batch, length, _ = ancestors_BTT.shape
        slots_S = torch.arange(visible, device=positions_BT.device)
        offset_BS = slots_S - lengths_B[:, None]
        node_BS = offset_BS.clamp(0, length - 1)
        in_forward_BS = (offset_BS >= 0) & (offset_BS < length)
        among_nodes_BTS = ancestors_BTT.gather(2, node_BS[:, None, :].expand(-1, length, -1))
        seen_BTS = (offset_BS < 0)[:, None] | (among_nodes_BTS & in_forward_BS[:, None])
        masks = {}
        for layer_type, window in self._windows.items():
            allowed_BTS = seen_BTS
            if window is not None:
                key_positions_BS = torch.where(
                    in_forward_BS, positions_BT.gather(1, node_BS), slots_S
                )
                distance_BTS = positions_BT[..., None] - key_positions_BS[:, None]
                allowed_BTS = seen_BTS & (distance_BTS < window)
            mask = torch.zeros(
                batch, length, visible, dtype=self.target.dtype, device=slots_S.device
            )
            mask = mask.masked_fill_(~allowed_BTS, float("-inf"))[:, None]
            masks[layer_type] = mask.repeat(1, 1, self._groups, 1)
        return masks if len(masks) > 1 else next(iter(masks.values()))


def attention_windows(target: Target) -> dict[str, int | None]:
    """Per layer type the attention window in tokens (None: everything is seen)."""
    config = target.config
    window = getattr(config, "sliding_window", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or []))
    if not kinds:
        return {"every_layer": window}
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedTargetError(
            f"target {target.name}: layers of type {', '.join(sorted(unknown))} cannot be run over "
            "a token tree"
        )
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def probe_layer_shapes(target: Target) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Per layer ((heads, key_dim), (heads, value_dim)), read off a one-token forward.

    Raises:
        UnsupportedTargetError: if the model keeps anything but keys and values.
    """
    cache = DynamicCache(config=target.model.config)
    with torch.inference_mode():
        target.features(torch.zeros(1, 1, dtype=torch.int64, device=target.device), cache=cache)
    shapes = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4:
            raise UnsupportedTargetError(
                f"target {target.name}: layer {index} keeps a recurrent state "
                f"({type(layer).__name__}), which a token tree cannot rewind"
            )
        shapes.append(((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])))
    return shapes


def _bucket(length: int) -> int:
    return -(-length // VISIBLE_BUCKET) * VISIBLE_BUCKET
