"""What requests may ask of decoding: checked one by one, then stacked as tensors.

Letters: B rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

LAW_NAMES = ("greedy", "rejection", "block", "coupled", "typical")
# Medusa's published defaults (arXiv 2401.10774; posterior_threshold and posterior_alpha).
TYPICAL_EPSILON, TYPICAL_DELTA = 0.09, 0.3


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    Attributes:
        temperature: 0 is greedy; top-k, top-p and min-p then do nothing.
        top_k: most probable tokens kept, 0 keeps all. top_p: nucleus mass, 1 keeps all.
        min_p: least share of the top token's probability, 0 keeps all.
        repetition_penalty: 1 is off; above 1 makes tokens of the text (prompt included) rarer.
        max_new_tokens: tokens, exactly. stop: strings that end the text.
        seed: int; the row's whole randomness.
        ignore_eos: go on after the end token.
        law: None is greedy at temperature 0 and rejection above; or a name from LAW_NAMES.
        typical_epsilon, typical_delta: the typical law's thresholds, in (0, 1].
    Raises:
        ValueError: naming field, value and what is allowed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    seed: int = 0
    ignore_eos: bool = False
    law: str | None = None
    typical_epsilon: float = TYPICAL_EPSILON
    typical_delta: float = TYPICAL_DELTA

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        for name in ("top_k", "max_new_tokens", "seed"):
            self._require(name, type(getattr(self, name)) is int, "an integer")
        for field in fields(self):
            if field.type == "float":
                value = getattr(self, field.name)
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                self._require(field.name, is_number and math.isfinite(value), "a finite number")
        self._require("temperature", self.temperature >= 0, "0 (greedy) or more")
        self._require("top_k", self.top_k >= 0, "0 (off) or more")
        self._require("top_p", 0 < self.top_p <= 1, "in (0, 1], 1 is off")
        self._require("min_p", 0 <= self.min_p <= 1, "in [0, 1], 0 is off")
        self._require("repetition_penalty", self.repetition_penalty > 0, "above 0, 1 is off")
        self._require("max_new_tokens", self.max_new_tokens >= 1, "1 or more")
        self._require("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings")
        self._require("seed", -(2**63) <= self.seed < 2**63, "a 64-bit integer")
        self._require("law", self.law is None or self.law in LAW_NAMES, f"None or {LAW_NAMES}")
        greedy_fits = self.law != "greedy" or self.temperature == 0
        self._require("law", greedy_fits, "not 'greedy' at a temperature above 0")
        for name in ("typical_epsilon", "typical_delta"):
            self._require(name, 0 < getattr(self, name) <= 1, "in (0, 1]")

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ValueError(f"SamplingParams.{name} = {getattr(self, name)!r}: must be {allowed}")

    @property
    def law_name(self) -> str:
        """The law that judges this request."""
        return self.law or ("greedy" if self.temperature == 0 else "rejection")


@dataclass
class PolicyTensors:
    """The parameters of B rows as tensors, and host flags of what no row needs.

    Attributes:
        temperature_B, top_p_B, min_p_B, repetition_penalty_B, typical_epsilon_B, typical_delta_B:
            float64 [B]. top_k_B: int64 [B].
        max_top_k: the largest top-k of the batch, 0 if off everywhere (static).
    """

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    repetition_penalty_B: Tensor
    typical_epsilon_B: Tensor
    typical_delta_B: Tensor
    max_top_k: int
    any_greedy: bool
    all_greedy: bool
    any_temperature: bool
    any_top_p: bool
    any_min_p: bool
    any_penalty: bool

    @staticmethod
    def stack(
        params: Sequence[SamplingParams], device: torch.device | str = "cpu"
    ) -> PolicyTensors:
        """One row for each entry of `params`."""
        sampled = [p for p in params if p.temperature > 0]

        def column(name: str) -> Tensor:
            return torch.tensor([float(getattr(p, name)) for p in params], dtype=torch.float64).to(
                device
            )

        return PolicyTensors(
            temperature_B=column("temperature"),
            top_k_B=torch.tensor([p.top_k for p in params]).to(device),
            top_p_B=column("top_p"),
            min_p_B=column("min_p"),
            repetition_penalty_B=column("repetition_penalty"),
            typical_epsilon_B=column("typical_epsilon"),
            typical_delta_B=column("typical_delta"),
            max_top_k=max((p.top_k for p in sampled), default=0),
            any_greedy=len(sampled) < len(params),
            all_greedy=not sampled,
            any_temperature=any(p.temperature != 1 for p in sampled),
            any_top_p=any(p.top_p < 1 for p in sampled),
            any_min_p=any(p.min_p > 0 for p in sampled),
            any_penalty=any(p.repetition_penalty != 1 for p in params),
        )

    def select(self, index_X: Tensor) -> PolicyTensors:
        """The rows of index_X (int64), repeated or reordered; the batch's flags stay."""
        tensors = {
            field.name: getattr(self, field.name)[index_X]
            for field in fields(self)
            if field.name.endswith("_B")
        }
        return replace(self, **tensors)
