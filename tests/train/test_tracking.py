"""Trackers never kill a run, never ask for a key, and keep the run's id."""

import subprocess
import sys
from pathlib import Path

import pytest
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from train.tracking import Tracking, wandb_mode


@pytest.fixture(autouse=True)
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


class FakeAccelerator:
    """Records what a tracker would be told; fails where asked."""

    def __init__(self, failing: str = "") -> None:
        self.calls, self.failing = [], failing

    def _take(self, name, *args):
        self.calls.append((name, *args))
        if name == self.failing:
            raise RuntimeError(f"{name} broke\nlong story")

    def init_trackers(self, *args):
        self._take("init_trackers", *args)

    def log(self, values, step):
        self._take("log", values, step)

    @property
    def trackers(self):
        return [self]

    @trackers.setter
    def trackers(self, left):
        self.left = left

    def finish(self):
        self._take("finish")


def test_wandb_is_offline_without_a_key_and_never_given_an_entity(tmp_path):
    accelerator = FakeAccelerator()
    tracking = Tracking(accelerator, "wandb", tmp_path, "proj", {"lr": 1e-3, "tree": None})
    ((_, project, settings, options),) = accelerator.calls
    assert project == "proj" and settings == {"lr": 1e-3, "tree": "None"}
    assert options == {
        "wandb": {"id": tracking.run_id, "resume": "allow", "dir": str(tmp_path), "mode": "offline"}
    }


def test_a_key_or_a_chosen_mode_is_left_alone(monkeypatch, tmp_path):
    assert wandb_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert wandb_mode() is None
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode() is None
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert wandb_mode() is None
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_mode() == "offline"


def test_a_resumed_run_keeps_its_id(tmp_path):
    accelerator = FakeAccelerator()
    tracking = Tracking(accelerator, "wandb", tmp_path, run_id="abc123")
    assert tracking.run_id == "abc123" and accelerator.calls[0][3]["wandb"]["id"] == "abc123"


@pytest.mark.parametrize("failing", ["init_trackers", "log", "finish"])
def test_a_failing_tracker_warns_once_and_is_left_alone(tmp_path, failing, recwarn):
    accelerator = FakeAccelerator(failing)
    tracking = Tracking(accelerator, "wandb", tmp_path)
    for step in range(3):
        tracking.log({"loss": 1.0}, step)
    tracking.finish()
    messages = [str(warning.message) for warning in recwarn]
    assert messages == [f"tracker wandb failed ({failing} broke); training goes on without it"]
    assert [call[0] for call in accelerator.calls].count(failing) == 1


def test_training_goes_on_when_the_tracker_cannot_start(new_run, monkeypatch):
    def no_service(*_, **__):
        raise OSError("tracker service unreachable")

    run = new_run(steps=2)
    run.config.tracker = "wandb"
    monkeypatch.setattr(run.accelerator, "init_trackers", no_service)
    with pytest.warns(UserWarning, match="tracker wandb failed .tracker service unreachable"):
        assert run.train().step == 2


def test_tensorboard_gets_figures_and_a_resumed_run_writes_beside_them(tmp_path):
    for step in (1, 2):
        project = ProjectConfiguration(str(tmp_path), logging_dir=str(tmp_path))
        accelerator = Accelerator(log_with="tensorboard", project_config=project)
        tracking = Tracking(accelerator, "tensorboard", tmp_path, "p", {"lr": 0.1}, run_id="run1")
        tracking.log({"train/loss": 4.0 / step}, step)
        tracking.finish()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "p" / "run1"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 4.0), (2, 2.0)]


def test_none_writes_nothing(tmp_path):
    accelerator = FakeAccelerator()
    tracking = Tracking(accelerator, "none", tmp_path / "t")
    tracking.log({"loss": 1.0}, 1)
    tracking.finish()
    assert accelerator.calls == [] and not (tmp_path / "t").exists()


@pytest.mark.slow
def test_importing_the_training_code_starts_no_tracker():
    code = (
        "import sys, train.medusa; print([m for m in ('wandb', 'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_wandb_really_runs_offline_without_a_key(tmp_path):
    accelerator = Accelerator(log_with="wandb")
    tracking = Tracking(accelerator, "wandb", tmp_path, "p", {"lr": 0.1}, run_id="run1")
    tracking.log({"train/loss": 2.0}, 1)
    tracking.finish()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-run1")
    assert list(folder.glob("run-run1.wandb"))
