"""The README's table of laws: rendered from results, and checked by verdict, not by digit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.laws_table import BEGIN, END, render
from tests.exactness.recorder import Recorder

SCRIPT = Path(__file__).parents[2] / "scripts" / "laws_table.py"


def results(deviation: float = 3e-16, block_on_tree: str = "refused") -> Recorder:
    recorder = Recorder()
    for policy in ("T=0", "T=1"):
        recorder.add("rejection", "chain", policy, "exact", deviation)
        recorder.add("rejection", "tree", policy, "exact", 0.0)
        recorder.add("block", "chain", policy, "exact", deviation)
        recorder.add("block", "tree", policy, block_on_tree)
        recorder.add("typical", "chain", policy, "not exact", 0.21)
        recorder.add("typical", "tree", policy, "not exact", 0.3)
    return recorder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    results().write(tmp_path / "exactness.json")
    return tmp_path


def run(folder: Path, *options: str) -> subprocess.CompletedProcess:
    paths = ["--readme", folder / "README.md", "--results", folder / "exactness.json"]
    command = [sys.executable, SCRIPT, *paths, *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_table_has_a_row_for_each_law_and_kind_of_proposal() -> None:
    lines = render(list(results().entries.values())).splitlines()
    assert lines[0] == "| law | proposal | T=0 | T=1 |"
    assert lines[2:] == [
        "| `rejection` | chain | exact, 3e-16 | exact, 3e-16 |",
        "| `rejection` | tree | exact | exact |",
        "| `block` | chain | exact, 3e-16 | exact, 3e-16 |",
        "| `block` | tree | refused | refused |",
        "| `typical` | chain; tree | not exact, 0.30 | not exact, 0.30 |",
    ]


def test_written_table_is_up_to_date_whatever_its_digits(folder: Path) -> None:
    assert run(folder, "--check").returncode == 1
    assert run(folder).returncode == 0
    text = (folder / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    results(deviation=5e-15).write(folder / "exactness.json")
    assert run(folder, "--check").returncode == 0
    assert (folder / "README.md").read_text() == text


def test_another_verdict_is_out_of_date(folder: Path) -> None:
    run(folder)
    results(block_on_tree="exact").write(folder / "exactness.json")
    check = run(folder, "--check")
    assert check.returncode == 1 and "out of date" in check.stderr


def test_missing_results_and_markers_are_named(folder: Path) -> None:
    (folder / "README.md").write_text("no markers")
    assert "laws-table:begin" in run(folder).stderr
    (folder / "exactness.json").unlink()
    assert "exactness.json is missing" in run(folder).stderr


def test_results_are_plain_json(folder: Path) -> None:
    entries = json.loads((folder / "exactness.json").read_text())
    assert {"law", "proposal", "policy", "verdict", "deviation", "cases"} == set(entries[0])
