"""Medusa heads: K small networks that all read the same f_t (arXiv 2401.10774).

Letters: K heads, L layers of a head, D hidden width, V the target's vocabulary, U the heads' own
(draft) vocabulary, N positions.

Head k = 1..K reads the target's feature f_t and predicts x_{t+1+k}; the LM head itself is "head 0".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional as F

from drafters.logit_tail import family_finishes_logits, finish_logits
from drafters.target import Target

HeadType = Literal["own", "tied", "reduced"]


@dataclass(kw_only=True)
class MedusaConfig:
    """What a Medusa drafter is made of.

    Attributes:
        num_heads: K; how many tokens ahead of the next one are guessed.
        num_layers: residual blocks of each head, every one with its own weights.
        hidden_size, vocab_size: D and V of the target.
        head_type: "own": each head has an output matrix of its own; "tied": all use the target's LM
            head; "reduced": own matrices over `draft_vocab_size` of the target's tokens.
        head_bias: the target's LM head has a bias, so the heads' own matrices have one too.
        finish_logits: the target's family does something after its LM head (soft-cap, scale).
        tree: rank paths of the proposed tree, e.g. [[0], [0, 0], [1]]; None: the runtime's choice.
    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    method: Literal["medusa"] = "medusa"
    num_heads: int
    num_layers: int = 1
    hidden_size: int
    vocab_size: int
    head_type: HeadType = "own"
    draft_vocab_size: int | None = None
    head_bias: bool = False
    finish_logits: bool = False
    tree: list[list[int]] | None = None

    def __post_init__(self) -> None:
        if self.method != "medusa":
            raise ValueError(f"method is {self.method!r}; a Medusa drafter's is 'medusa'")
        for name, least in (("num_heads", 1), ("num_layers", 0), ("hidden_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be ≥ {least}")
        if self.head_type not in get_args(HeadType):
            allowed = ", ".join(get_args(HeadType))
            raise ValueError(f"head_type is {self.head_type!r}; use one of {allowed}")
        size = self.draft_vocab_size
        if self.head_type == "reduced" and (size is None or not 1 <= size <= self.vocab_size):
            raise ValueError(
                f"draft_vocab_size is {size}; head_type 'reduced' needs 1 to {self.vocab_size}, "
                "the target's vocabulary"
            )
        if self.head_type != "reduced" and size is not None:
            raise ValueError(
                f"draft_vocab_size is {size}, but head_type {self.head_type!r} uses the whole "
                "vocabulary; set head_type 'reduced' or leave the size out"
            )
        if self.tree is not None:
            self.tree = [list(path) for path in self.tree]
            self.check_tree(self.tree)

    @property
    def num_draft_tokens(self) -> int:
        """U: how many tokens a head chooses from."""
        return self.draft_vocab_size or self.vocab_size

    def check_tree(self, paths: Sequence[Sequence[int]]) -> None:
        """Raises ValueError if a tree of these rank paths is more than the heads can fill."""
        depth = max((len(path) for path in paths), default=0)
        if depth > self.num_heads:
            raise ValueError(
                f"the tree is {depth} deep, but the drafter has {self.num_heads} heads; "
                "take a tree of at most that depth or train more heads"
            )
        rank = max((rank for path in paths for rank in path), default=0)
        if rank >= self.num_draft_tokens:
            raise ValueError(
                f"the tree asks for a head's choice number {rank + 1}, but a head chooses from "
                f"{self.num_draft_tokens} tokens"
            )


class MedusaDrafter(nn.Module):
    """K Medusa heads, stored stacked so that all of them are one batched matrix product.

    Differs from the paper's code: every layer has weights of its own, and the bias of W1 starts at
    zero as W1 does, so that at step 0 a head is the LM head.

    Args:
        config: see `MedusaConfig`. All weights are zero until `from_target` or a load fills them.
    """

    config_class = MedusaConfig
    draft_vocab: torch.Tensor

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        heads, layers, width = config.num_heads, config.num_layers, config.hidden_size
        self.w1 = nn.Parameter(torch.zeros(heads, layers, width, width))
        self.b1 = nn.Parameter(torch.zeros(heads, layers, width))
        if config.head_type != "tied":
            self.w2 = nn.Parameter(torch.zeros(heads, config.num_draft_tokens, width))
            if config.head_bias:
                self.b2 = nn.Parameter(torch.zeros(heads, config.num_draft_tokens))
        if config.head_type == "reduced":
            ids = torch.zeros(config.num_draft_tokens, dtype=torch.int64)
            self.register_buffer("draft_vocab", ids)

    @property
    def draft_vocab_size(self) -> int:
        """U: how many tokens a head chooses from."""
        return self.config.num_draft_tokens

    @classmethod
    def from_target(
        cls,
        target: Target,
        config: MedusaConfig,
        draft_vocab: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> MedusaDrafter:
        """Heads that start as the target's LM head.

        At step 0 the logits of every head equal the LM head's bit for bit in the target's dtype
        ("reduced": those of the chosen rows of the LM head; a matrix product over fewer rows may
        round its last bit otherwise than the whole one).

        Args:
            draft_vocab: int64 [U], distinct token ids, for head_type "reduced" only.
            dtype: of the heads; None takes the target's.
        Raises:
            ValueError: if config and target, or config and draft_vocab, do not belong together.
        """
        check_fit(config, target)
        head: Any = target.model.get_output_embeddings()
        config.head_bias = getattr(head, "bias", None) is not None and config.head_type != "tied"
        config.finish_logits = config.head_type != "tied" and family_finishes_logits(target)
        rows = check_draft_vocab(config, draft_vocab)
        drafter = cls(config).to(device=target.device, dtype=dtype or target.dtype)
        with torch.no_grad():
            if config.head_type != "tied":
                drafter.w2.copy_(head.weight[rows].expand_as(drafter.w2))
            if config.head_bias:
                drafter.b2.copy_(head.bias[rows].expand_as(drafter.b2))
            if config.head_type == "reduced":
                drafter.draft_vocab.copy_(rows)
        return drafter

    def hidden(self, features: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """[K, ..., D]: x ← x + SiLU(W1 x + b1), block after block, for the first `num_heads` heads.

        Args:
            features: f [..., D], the target's last hidden states after the final norm.
        """
        count = self.config.num_heads if num_heads is None else num_heads
        w1, b1 = self.w1[:count], self.b1[:count]
        flat_ND = features.reshape(-1, features.shape[-1]).to(w1.dtype)
        x_KND = flat_ND.expand(count, -1, -1)
        for layer in range(self.config.num_layers):
            weight_KDD = w1[:, layer].transpose(1, 2)
            x_KND = x_KND + F.silu(torch.baddbmm(b1[:, layer, None], x_KND, weight_KDD))
        return x_KND.reshape(count, *features.shape)

    def logits(
        self, features: torch.Tensor, target: Target, num_heads: int | None = None
    ) -> torch.Tensor:
        """[K, ..., U]: every head's logits at every position of `features` [..., D].

        Args:
            target: the target the heads were made for.
            num_heads: only the first so many heads; None for all.
        """
        x = self.hidden(features, num_heads)
        if self.config.head_type == "tied":
            return target.logits(x.to(target.dtype))
        count = x.shape[0]
        x_KND, weight_KDU = x.reshape(count, -1, x.shape[-1]), self.w2[:count].transpose(1, 2)
        if self.config.head_bias:
            logits = torch.baddbmm(self.b2[:count, None], x_KND, weight_KDU)
        else:
            logits = torch.bmm(x_KND, weight_KDU)
        if self.config.finish_logits:
            logits = finish_logits(target, logits)
        return logits.reshape(*x.shape[:-1], self.draft_vocab_size)

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's token ids for a head's choices."""
        return self.draft_vocab[draft_ids] if self.config.head_type == "reduced" else draft_ids

    def to_draft_ids(self, target_ids: torch.Tensor) -> torch.Tensor:
        """A head's indices for target tokens; -100 for what no head can say, -100 included."""
        if self.config.head_type != "reduced":
            return target_ids
        inverse = target_ids.new_full((self.config.vocab_size,), -100)
        inverse[self.draft_vocab] = torch.arange(self.config.num_draft_tokens).to(inverse)
        return torch.where(target_ids >= 0, inverse[target_ids.clamp_min(0)], -100)


def check_fit(config: MedusaConfig, target: Target) -> None:
    """Raises ValueError unless heads of this config fit the target's widths."""
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise ValueError(f"{name} is {ours}, but target {target.name} has {theirs}")


def check_draft_vocab(config: MedusaConfig, draft_vocab: torch.Tensor | None) -> torch.Tensor:
    """The rows of the LM head that the heads start from, int64 [U].

    Raises:
        ValueError: if the map is missing, not wanted, of another size, repeated or out of range.
    """
    if config.head_type != "reduced":
        if draft_vocab is not None:
            raise ValueError(f"draft_vocab was given, but head_type is {config.head_type!r}")
        return torch.arange(config.vocab_size)
    if draft_vocab is None or draft_vocab.shape != (config.draft_vocab_size,):
        found = "none" if draft_vocab is None else f"shape {tuple(draft_vocab.shape)}"
        raise ValueError(f"draft_vocab: {found} given, [{config.draft_vocab_size}] needed")
    if int(draft_vocab.min()) < 0 or int(draft_vocab.max()) >= config.vocab_size:
        raise ValueError(f"draft_vocab: ids must lie within 0 and {config.vocab_size - 1}")
    if draft_vocab.unique().numel() != draft_vocab.numel():
        raise ValueError("draft_vocab: a token id appears twice")
    return draft_vocab
