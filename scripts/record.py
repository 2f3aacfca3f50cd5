"""The record that every benchmark writes: environment and rows, as JSON and as a table."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from drafters.target import Target
from inference.row import Generation

if TYPE_CHECKING:
    from contenders import Contender


def tokens_per_second(contender: Contender, chosen: Sequence[int]) -> float:
    """Of the chosen prompts: all their tokens over the median pass's seconds."""
    seconds = statistics.median(sum(one[i] for i in chosen) for one in contender.seconds)
    return sum(contender.tokens[i] for i in chosen) / seconds


def tau_of(generations: Sequence[Generation]) -> float:
    """Tokens per target forward over all answers (see GenerationStats)."""
    rounds = sum(g.stats.rounds for g in generations)
    return sum(g.stats.emitted_tokens for g in generations) / rounds if rounds else float("nan")


def acceptance_of(generations: Sequence[Generation]) -> list[float]:
    """P(depth d accepted | depth d - 1 accepted) over all answers."""
    reached = [sum(g.stats.rounds for g in generations)]
    reached += [sum(c) for c in zip(*(g.stats.accepted_by_depth for g in generations), strict=True)]
    return [b / a if a else 0.0 for a, b in zip(reached, reached[1:], strict=False)]


def record_rows(
    contenders: Sequence[Contender],
    tasks: Sequence[str],
    dtype: str,
    identical: dict[str, bool | None],
) -> list[dict[str, Any]]:
    """Rows of the record, for all prompts together and for each task.

    `speedup` is over plain decoding at the same temperature in this runtime, dtype and run.
    """
    rows = []
    groups = {"all": list(range(len(tasks)))}
    groups |= {t: [i for i, task in enumerate(tasks) if task == t] for t in sorted(set(tasks))}
    plain = {c.temperature: c for c in contenders if c.method == "plain"}
    for contender in contenders:
        for task, chosen in groups.items():
            rate = tokens_per_second(contender, chosen)
            answers = [contender.generations[i] for i in chosen] if contender.generations else []
            base = tokens_per_second(plain[contender.temperature], chosen)
            row = {
                "method": contender.method,
                "law": contender.law,
                "temperature": contender.temperature,
                "dtype": dtype,
                "batch": 1,
                "task": task,
                "tree_nodes": contender.tree_nodes,
                "tokens_per_s": round(rate, 2),
                "speedup": round(rate / base, 3),
                "tau": round(tau_of(answers), 3) if answers else None,
                "acceptance_by_depth": [round(a, 3) for a in acceptance_of(answers)],
                "identical": identical.get(contender.method) if not contender.temperature else None,
                "exact": answers[0].exact if answers else True,
            }
            rows.append(row)
    return rows


def environment(target: Target) -> dict[str, Any]:
    """Machine, versions and settings that the figures depend on."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": str(target.device),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "target": target.identity,
        "compile": "none on either side",
    }


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of all tasks together, as text."""
    head = ["method", "T", "dtype", "tokens/s", "× plain", "τ", "acceptance by depth", "identical"]
    lines = [head]
    for row in rows:
        if row["task"] == "all":
            same = {True: "yes", False: "NO", None: "–"}[row["identical"]]
            lines.append([
                row["method"], f"{row['temperature']:g}", row["dtype"],
                f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f}",
                "–" if row["tau"] is None else f"{row['tau']:.2f}",
                " ".join(f"{a:.2f}" for a in row["acceptance_by_depth"]) or "–", same,
            ])  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def write_record(path: str | Path, record: dict[str, Any]) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []
