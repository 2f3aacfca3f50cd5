"""Writes the README's table of laws from what the exactness tests have computed.

    pytest tests/exactness                     # writes .cache/exactness.json
    python scripts/laws_table.py               # puts the table between the README's markers
    python scripts/laws_table.py --check       # exit code 1 if a verdict in the README is not that

`--check` compares rows, columns and verdicts, not digits: the last digits of a deviation depend on
the machine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- laws-table:begin -->", "<!-- laws-table:end -->"
LAW_ORDER = ("greedy", "rejection", "block", "coupled", "typical")


def render(entries: list[dict]) -> str:
    """The Markdown table: a law and its proposals a row, a policy a column.

    Proposals of one law whose verdicts agree share a row; its deviations are the largest of them.
    """
    policies = list(dict.fromkeys(entry["policy"] for entry in entries))
    rows = []
    for law in sorted({entry["law"] for entry in entries}, key=LAW_ORDER.index):
        groups: dict[tuple, dict[str, list[dict]]] = {}
        for proposal in dict.fromkeys(e["proposal"] for e in entries if e["law"] == law):
            cells = {
                e["policy"]: e for e in entries if (e["law"], e["proposal"]) == (law, proposal)
            }
            verdicts = tuple(cells[policy]["verdict"] for policy in policies)
            alone = (proposal,) if set(verdicts) == {"exact"} else ()
            group = groups.setdefault((verdicts, alone), {})
            group[proposal] = [cells[policy] for policy in policies]
        for group in groups.values():
            columns = zip(*group.values(), strict=True)
            names = "; ".join(group)
            if len(group) > 4:
                names = "all proposals" if len(groups) == 1 else "all others"
            rows.append([f"`{law}`", names, *(_cell(list(column)) for column in columns)])
    header = ["law", "proposal", *policies]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(entries: list[dict]) -> str:
    verdict = entries[0]["verdict"]
    if verdict not in ("exact", "not exact"):
        return verdict
    worst = max(entry["deviation"] for entry in entries)
    if not worst:
        return verdict
    return f"{verdict}, {worst:.2f}" if worst >= 0.01 else f"{verdict}, {worst:.0e}"


def verdicts(table: str) -> str:
    """The table without its digits."""
    return re.sub(r", \d(\.\d+)?(e[-+]\d+)?", "", table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / ".cache" / "exactness.json",
        help="file that the tests wrote (default: .cache/exactness.json)",
    )
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="file to update")
    parser.add_argument("--check", action="store_true", help="change nothing, compare verdicts")
    args = parser.parse_args()
    if not args.results.exists():
        sys.exit(f"{args.results} is missing: run pytest tests/exactness to the end first")
    text = args.readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"{args.readme}: expected one {BEGIN} and one {END}")
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    table = render(json.loads(args.results.read_text(encoding="utf-8")))
    if args.check:
        if verdicts(old.strip()) != verdicts(table):
            sys.exit(f"{args.readme}: the table of laws is out of date; run {Path(__file__).name}")
        print("the table of laws is up to date")
        return
    args.readme.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    print(f"{args.readme}: table of laws written")


if __name__ == "__main__":
    main()
