"""The demo runs every stage once, goes on where it was stopped, and notices changed inputs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import demo
import pytest


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Titles of the stages that ran; each writes what it promises."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "resolve_target", lambda name: "target-1")
    titles: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        stage = next(s for s in demo.stages(tmp_path / "demo") if s.command == command)
        titles.append(stage.title)
        stage.product.parent.mkdir(parents=True, exist_ok=True)
        stage.product.write_text(json.dumps({"rows": []}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(demo.subprocess, "run", run)
    return titles


def test_a_second_run_does_nothing(ran: list[str]) -> None:
    demo.main()
    assert len(ran) == 3
    demo.main()
    assert len(ran) == 3


def test_another_target_makes_every_stage_run_again(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    demo.main()
    monkeypatch.setattr(demo, "resolve_target", lambda name: "target-2")
    demo.main()
    assert ran == ran[:3] * 2


def test_a_lost_product_is_made_again(ran: list[str], tmp_path: Path) -> None:
    demo.main()
    (tmp_path / "demo" / "report.json").unlink()
    demo.main()
    assert ran == [*ran[:3], ran[2]]


def test_a_failed_stage_ends_the_demo_and_is_tried_again(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    working = demo.subprocess.run
    monkeypatch.setattr(
        demo.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 3)
    )
    with pytest.raises(SystemExit) as stop:
        demo.main()
    assert stop.value.code == 3
    assert "the target answers" in capsys.readouterr().err
    monkeypatch.setattr(demo.subprocess, "run", working)
    demo.main()
    assert len(ran) == 3
