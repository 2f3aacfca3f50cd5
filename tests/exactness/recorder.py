"""Collects what the enumerations found; the README's table is rendered from it.

One entry is a law, a proposal and a policy with its verdict: "exact" (with the largest deviation),
"refused", "identical" (token for token that of plain sampling), "not exact", or "as greedy".
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

RESULTS = Path(__file__).parents[2] / ".cache" / "exactness.json"


@dataclass
class Recorder:
    entries: dict[tuple[str, str, str], dict] = field(default_factory=dict)

    def add(
        self,
        law: str,
        proposal: str,
        policy: str,
        verdict: str,
        deviation: float | None = None,
        cases: int = 1,
    ) -> None:
        """Args: deviation: largest difference of a probability; cases: how many were computed."""
        self.entries[law, proposal, policy] = {
            "law": law,
            "proposal": proposal,
            "policy": policy,
            "verdict": verdict,
            "deviation": deviation,
            "cases": cases,
        }

    def write(self, path: Path = RESULTS) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".json.partial")
        partial.write_text(json.dumps(list(self.entries.values()), indent=1) + "\n")
        partial.replace(path)
