"""Shows answered rows with their supervised tokens coloured, and the share of each task.

    python scripts/inspect_data.py .cache/answers --rows 3 --task code

Green is supervised: exactly the target's answers and their end tokens. Without colours (a pipe, or
--color never) supervised text stands between ⟦ and ⟧.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from data_recipes.answered import AnsweredDataset, Document
from data_recipes.chat import supervised_spans
from drafters.identity import tokenizer_hash
from drafters.target_files import resolve_target
from train.config import run_script

GREEN, GREY, RESET = "\x1b[1;32m", "\x1b[90m", "\x1b[0m"
OPEN, CLOSE = "⟦", "⟧"


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    dataset = AnsweredDataset(args.folder, allow_unfinished=True)
    documents = [d for d in dataset if args.task in (None, d.task)]
    if not documents:
        tasks = ", ".join(sorted({d.task for d in dataset}))
        raise ValueError(f"{args.folder}: no row of task {args.task!r}; it has {tasks}")
    tokenizer = _tokenizer(args.tokenizer, dataset.manifest["made_with"]["target"])
    color = args.color == "always" or (
        args.color == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    )
    if args.id is not None:
        shown = [d for d in documents if d.id == args.id]
        if not shown:
            raise ValueError(f"{args.folder}: no row has the id {args.id!r}")
    else:
        shown = documents[: args.rows]
    for document in shown:
        print(row_header(document))
        print(row_text(document, tokenizer, color), end="\n\n")
    print(manifest_text(dataset.manifest))
    print(task_table(documents))


def row_header(document: Document) -> str:
    """Id, task, tokens and supervised share of a row."""
    supervised = int(document.loss_mask.sum())
    return (
        f"── {document.id} · {document.task} · {len(document)} tokens, {supervised} supervised "
        f"({supervised / len(document):.0%}) · {', '.join(document.finish_reasons)}"
    )


def row_text(document: Document, tokenizer: Any, color: bool) -> str:
    """The row's text, special tokens shown, supervised spans marked."""
    start_mark, end_mark = (GREEN, RESET) if color else (OPEN, CLOSE)
    pieces, at = [], 0
    for start, end in [*supervised_spans(document.loss_mask.tolist()), (len(document),) * 2]:
        context = tokenizer.decode(document.input_ids[at:start].tolist())
        answer = tokenizer.decode(document.input_ids[start:end].tolist())
        pieces.append(f"{GREY}{context}{RESET}" if color and context else context)
        pieces.append(f"{start_mark}{answer}{end_mark}" if start < end else "")
        at = end
    return "".join(pieces)


def task_table(documents: Iterable[Document]) -> str:
    """Rows, tokens and supervised share of each task, and of all."""
    by_task: dict[str, list[Document]] = {}
    for document in documents:
        by_task.setdefault(document.task, []).append(document)
    groups = sorted(by_task.items(), key=lambda group: -len(group[1]))
    groups.append(("all", [d for _, group in groups for d in group]))
    total = sum(int(d.loss_mask.sum()) for d in groups[-1][1])
    width = max(4, *(len(task) for task, _ in groups))
    title = f"{'task':<{width}} {'rows':>7} {'tokens':>9} {'supervised':>10}"
    lines = [f"{title} {'of its tokens':>13} {'of all supervised':>17}"]
    for task, group in groups:
        tokens = sum(len(d) for d in group)
        supervised = sum(int(d.loss_mask.sum()) for d in group)
        lines.append(
            f"{task:<{width}} {len(group):>7} {tokens:>9} {supervised:>10} "
            f"{supervised / tokens:>13.1%} {supervised / total:>17.1%}"
        )
    return "\n".join(lines)


def manifest_text(manifest: dict[str, Any]) -> str:
    """Who made the rows and how, and what was dropped."""
    made_with, shards = manifest["made_with"], manifest["shards"]
    sampling = made_with["sampling"]
    dropped = ", ".join(f"{n} × {reason}" for reason, n in manifest["dropped"].items())
    return (
        f"target {made_with['target']['name']}, temperature {sampling['temperature']}, "
        f"max_new_tokens {made_with['max_new_tokens']}, seed {sampling['seed']}; "
        f"{shards['finished']} of {shards['total']} shards; dropped: {dropped or 'none'}"
    )


def _tokenizer(name: str | None, identity: dict[str, Any]) -> Any:
    """The tokenizer the rows were made with; any other would show other text."""
    name = name or identity["name"]
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve_target(name))
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(
            f"the tokenizer of {name} cannot be loaded ({first_line}); say where it is with "
            "--tokenizer"
        ) from error
    if tokenizer_hash(tokenizer) != identity["tokenizer_hash"]:
        raise ValueError(f"the tokenizer of {name} is not the one that these rows were made with")
    return tokenizer


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="as scripts/generate_data.py writes it")
    parser.add_argument("--rows", type=int, default=5, help="rows to print; 0: only the table")
    parser.add_argument("--task", help="only rows of this task")
    parser.add_argument("--id", help="only the row with this id")
    parser.add_argument("--tokenizer", help="hub id or folder; none: the target's name")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    args = parser.parse_args(argv)
    if args.rows < 0:
        parser.error(f"--rows is {args.rows}; it must be ≥ 0")
    return args


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


if __name__ == "__main__":
    run_script(main)
