"""Measure decoding: tokens/s, speed-up, τ and identity, against plain decoding and HF generate.

    python scripts/benchmark.py --target default --drafter .cache/demo/drafter \
        --prompts data_recipes/demo_prompts/heldout.jsonl --out results.json

All methods decode every prompt in the same run, in an order that changes from prompt to prompt;
figures are medians over passes. The record's format is that of every file in scripts/results/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from contenders import (
    check_identity,
    engine_contender,
    hf_contender,
    near_ties,
    time_contenders,
)
from record import environment, format_table, record_rows, write_record

from data_recipes.prompts import PromptRow, read_prompts
from drafters.target import Target
from inference.generate import SpeculativeEngine
from train.config import option, parse_config, run_script


@dataclass(kw_only=True)
class BenchmarkConfig:
    """What is measured on what."""

    target: str = option("default", "hub id, folder, .gguf file, or 'default' (SmolLM2-135M)")
    drafter: str = option(help="drafter folder")
    prompts: list[str] = option(help="prompt files or hub ids")
    limit: int = option(30, "prompts, taken evenly from the tasks")
    max_new_tokens: int = option(64, "tokens of each answer; end tokens are honoured")
    temperatures: list[float] = field(
        default_factory=lambda: [0.0, 1.0], metadata={"help": "sampling temperatures; 0 first"}
    )
    dtype: str = option("auto", "of the target; auto: what is fast on this machine")
    passes: int = option(3, "times that every prompt is decoded by every method")
    identity_prompts: int = option(30, "prompts of the fp32 identity check; 0: none")
    identity_tokens: int = option(64, "tokens of each answer in that check")
    out: str | None = option(None, "JSON record; none: only the table is printed")

    def __post_init__(self) -> None:
        for name in ("limit", "max_new_tokens", "passes", "identity_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be ≥ 1")


def stratified(rows: Sequence[PromptRow], limit: int) -> list[PromptRow]:
    """`limit` rows, one of each task in turn."""
    waiting: dict[str, list[PromptRow]] = {}
    for row in rows:
        waiting.setdefault(row.task, []).append(row)
    chosen: list[PromptRow] = []
    while len(chosen) < min(limit, len(rows)):
        for task in waiting.values():
            if task and len(chosen) < limit:
                chosen.append(task.pop(0))
    return chosen


def main() -> None:
    config = parse_config(BenchmarkConfig)
    dtype = None if config.dtype == "auto" else config.dtype
    rows, _ = read_prompts(config.prompts)
    chosen = stratified(rows, config.limit)
    target = Target.from_pretrained(config.target, dtype=dtype)
    plain = SpeculativeEngine(target, batch_size=1)
    drafted = SpeculativeEngine.from_pretrained(target, config.drafter, batch_size=1)
    method = "medusa1"
    prompts = [plain.encode(list(row.messages)) for row in chosen]
    identical: dict[str, bool | None] = {}
    taus: dict[str, float] = {}
    if config.identity_prompts:
        if target.dtype == torch.float32:
            exact_target, engines = target, {"plain": plain, method: drafted}
        else:
            exact_target = Target.from_pretrained(config.target, dtype="float32")
            engines = {
                "plain": SpeculativeEngine(exact_target),
                method: SpeculativeEngine.from_pretrained(exact_target, config.drafter),
            }
        check = [plain.encode(list(r.messages)) for r in stratified(rows, config.identity_prompts)]
        found, taus = check_identity(exact_target, engines, check, config.identity_tokens)
        identical |= found
    contenders = [hf_contender(target, config.max_new_tokens)]
    for temperature in config.temperatures:
        contenders.append(engine_contender("plain", plain, temperature, config.max_new_tokens))
        contenders.append(engine_contender(method, drafted, temperature, config.max_new_tokens))
    time_contenders(contenders, prompts, config.passes)
    tasks = [row.task for row in chosen]
    greedy = {
        c.method: [g.token_ids for g in c.generations] for c in contenders if c.law == "greedy"
    }
    record = {
        "environment": environment(target) | {"settings": asdict(config)},
        "rows": record_rows(contenders, tasks, str(target.dtype).removeprefix("torch."), identical),
    }
    if greedy:
        record["near_ties"] = near_ties(target, prompts, greedy[method], greedy["plain"])
    if taus:
        record["identity_check"] = {
            "prompts": len(check),
            "tokens": config.identity_tokens,
            "dtype": "float32",
            "identical": identical,
            "tau": {name: round(tau, 3) for name, tau in taus.items()},
        }
    print(format_table(record["rows"]))
    if config.out:
        write_record(config.out, record)


if __name__ == "__main__":
    run_script(main)
