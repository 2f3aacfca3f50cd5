"""The whole path on a small model: answers, Medusa-1, export, benchmark. `make demo` runs this.

Every stage is an ordinary command, printed before it runs. A stage whose inputs have not changed
since it finished is skipped; a stopped demo goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from record import format_table

from drafters.target_files import DEFAULT_TARGET, cache_folder, resolve_target

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = "data_recipes/demo_prompts"
RECIPE = "configs/medusa/smollm2-demo.yaml"


@dataclass
class Stage:
    """A command, what it reads besides the stage before it, and the file that shows it ended."""

    title: str
    command: list[str]
    reads: list[str]
    product: Path

    def fingerprint(self, before: str) -> str:
        digest = hashlib.sha256(json.dumps([self.command, before]).encode())
        for name in self.reads:
            digest.update((ROOT / name).read_bytes())
        return digest.hexdigest()


def stages(folder: Path) -> list[Stage]:
    """The demo's stages, in order; `folder` takes all they write."""
    data, drafter, report = folder / "data", folder / "drafter", folder / "report.json"
    python = sys.executable
    generate = [python, "scripts/generate_data.py", "--target", DEFAULT_TARGET]
    generate += ["--prompts", f"{PROMPTS}/train.jsonl", "--output", str(data)]
    generate += ["--held_out", f"{PROMPTS}/heldout.jsonl"]
    generate += ["--max_new_tokens", "64", "--batch_size", "32"]
    generate += ["--rows_per_shard", "64", "--max_minutes", "2.5"]
    launch = [python, "-m", "accelerate.commands.launch"]
    launch += ["--config_file", "configs/accelerate/cpu.yaml", "train/medusa.py"]
    train = [*launch, "--config", RECIPE, "--data", str(data), "--output", str(drafter)]
    measure = [python, "scripts/benchmark.py", "--target", DEFAULT_TARGET]
    measure += ["--drafter", str(drafter), "--prompts", f"{PROMPTS}/heldout.jsonl"]
    measure += ["--limit", "6", "--passes", "1", "--max_new_tokens", "32"]
    measure += ["--identity_prompts", "30", "--identity_tokens", "64", "--out", str(report)]
    prompts = [f"{PROMPTS}/train.jsonl", f"{PROMPTS}/heldout.jsonl"]
    return [
        Stage("the target answers", generate, prompts, data / "manifest.json"),
        Stage("Medusa-1 learns from the answers", train, [RECIPE], drafter / "drafter.json"),
        Stage("benchmark on held-out prompts", measure, prompts[1:], report),
    ]


def main() -> None:
    folder = cache_folder() / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    memory = folder / "stages.json"
    finished = json.loads(memory.read_text()) if memory.is_file() else {}
    environment = os.environ | {
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }
    started = time.perf_counter()

    print("── default target: SmolLM2-135M-Instruct", flush=True)
    before = resolve_target(DEFAULT_TARGET)

    for stage in stages(folder):
        before = stage.fingerprint(before)
        if finished.get(stage.title) == before and stage.product.is_file():
            print(f"── {stage.title}: done before", flush=True)
            continue
        shown = " ".join(["python", *stage.command[1:]])
        print(f"\n── {stage.title}\n$ {shown}", flush=True)
        done = subprocess.run(stage.command, cwd=ROOT, env=environment)
        if done.returncode != 0:
            print(f"error: the stage '{stage.title}' failed (see above)", file=sys.stderr)
            sys.exit(done.returncode)
        finished[stage.title] = before
        partial = memory.with_suffix(".partial")
        partial.write_text(json.dumps(finished, indent=1))
        partial.replace(memory)

    report = folder / "report.json"
    record = json.loads(report.read_text())
    print(f"\n{format_table(record['rows'])}")
    if check := record.get("identity_check"):
        same = "the same text" if all(check["identical"].values()) else "NOT the same text"
        print(
            f"\n{check['prompts']} held-out prompts × {check['tokens']} greedy tokens in fp32: "
            f"{same} as transformers' generate; τ {check['tau']['medusa1']:.2f} with the heads"
        )
    print(f"\nall figures: {report}   ({time.perf_counter() - started:.0f} s)")


if __name__ == "__main__":
    main()
