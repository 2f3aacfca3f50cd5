"""The target answers prompts; its answers are what drafters learn from.

    python scripts/generate_data.py --target default \
        --prompts data_recipes/demo_prompts/train.jsonl \
        --held-out data_recipes/demo_prompts/heldout.jsonl \
        --output .cache/answers --max-new-tokens 96 --batch-size 32

A stopped run goes on where it was when the same command is given again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from data_recipes.generate import GenerationSettings, engine_answerer, generate_answers
from data_recipes.overlap import without_overlap
from data_recipes.prompts import PromptRow, read_prompts
from drafters.target import Target
from inference.generate import SpeculativeEngine
from inference.params import SamplingParams
from train.config import option, parse_config, run_script


@dataclass(kw_only=True)
class GenerateConfig:
    """Prompts, target, and how it answers."""

    target: str = option("default", "hub id, folder, .gguf file, or 'default' (SmolLM2-135M)")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = option(
        "auto", "of the target; auto: bfloat16 where the hardware has it, else float32"
    )
    prompts: list[str] = option(help=".jsonl, .json, .parquet files or hub ids; they take turns")
    output: str = option(help="folder of the answers; one that is there is gone on with")
    split: str = option("train", "split of a hub data set")
    limit: int | None = option(None, "prompts in all, evenly from each source; none: every one")
    held_out: list[str] | None = option(
        None, "prompt files; a prompt that is near one of theirs is left out"
    )
    keep_answers: bool = option(False, "train on the answers of the input where it has them")
    max_new_tokens: int = option(256, "tokens of an answer")
    temperature: float = option(0.0, "0: greedy")
    top_k: int = option(0, "most probable tokens kept; 0: all")
    top_p: float = option(1.0, "nucleus mass; 1: all")
    min_p: float = option(0.0, "least share of the top token's probability; 0: all")
    repetition_penalty: float = option(1.0, "1: off")
    seed: int = option(0, "with the row's id and the turn, the seed of an answer")
    batch_size: int = option(32, "prompts decoded side by side")
    max_length: int | None = option(None, "tokens of a row; none: the target's context")
    rows_per_shard: int = option(256, "prompts of a shard; a stopped run loses at most one shard")
    max_minutes: float = option(
        0.0,
        "then the rest is left out, by whole shards; the same command goes on; 0: never",
    )
    template_kwargs: str = option("{}", 'for the chat template: JSON, {"enable_thinking": false}')

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be ≥ 1")
        if self.max_minutes < 0:
            raise ValueError(f"max_minutes is {self.max_minutes}; it must be ≥ 0")

    @property
    def settings(self) -> GenerationSettings:
        """Checked before the target is loaded."""
        names = {field.name for field in fields(SamplingParams)}
        return GenerationSettings(
            SamplingParams(**{k: v for k, v in vars(self).items() if k in names}),
            self.max_length,
            self.rows_per_shard,
            _json_object(self.template_kwargs, "template_kwargs"),
        )


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_config(GenerateConfig, argv)
    settings = config.settings

    # Prompts
    prompts, dropped = read_prompts(config.prompts, config.limit, config.split, config.keep_answers)
    if config.held_out:
        held_out, _ = read_prompts(config.held_out)
        prompts, num_near = without_overlap(prompts, held_out)
        if num_near:
            dropped["near_held_out"] = num_near
    _say_prompts(prompts, dropped)

    # Answers
    dtype = None if config.dtype == "auto" else config.dtype
    target = Target.from_pretrained(config.target, dtype=dtype)
    engine = SpeculativeEngine(target, batch_size=config.batch_size)
    manifest = generate_answers(
        target,
        prompts,
        Path(config.output),
        engine_answerer(engine),
        settings,
        dropped,
        max_minutes=config.max_minutes,
    )

    # What came out
    counts = manifest["counts"]
    print(
        f"{config.output}: {counts['rows']} rows, {counts['answers']} answers, "
        f"{counts['tokens']} tokens, {counts['supervised_tokens']} of them supervised"
    )
    for title in ("dropped", "ended_early"):
        found = manifest["dropped"] if title == "dropped" else counts["ended_early"]
        for reason, count in found.items():
            print(f"  {title.replace('_', ' ')}: {count} × {reason}")
    if counts["split_conversations"]:
        print(f"  one row per answer, as the template rewrites: {counts['split_conversations']}")


def _say_prompts(prompts: Sequence[PromptRow], dropped: dict[str, int]) -> None:
    left_out = ", ".join(f"{count} × {reason}" for reason, count in sorted(dropped.items()))
    print(f"{len(prompts)} prompts; dropped: {left_out or 'none'}", file=sys.stderr)


def _json_object(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is {text!r}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {text!r}; it must be a JSON object")
    return value


if __name__ == "__main__":
    run_script(main)
