"""Checkpoints: complete or not at all, and a resumed run is the uninterrupted one, bit for bit."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import train.resume
from train.medusa_objective import MedusaObjective
from train.resume import random_state, read_state, set_random_state


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the loop may catch it."""


def checkpoints(run) -> list[Path]:
    return sorted(Path(run.config.run_folder).glob("checkpoints/step-*"))


def train_until_killed(run, at_step: int) -> None:
    """Trains and dies in a forward pass, counted from the first of this sitting."""
    plain, calls = run.model.objective.loss, []

    def dying(*args):
        calls.append(1)
        if len(calls) == at_step:
            raise Killed
        return plain(*args)

    run.model.objective.loss = dying
    with pytest.raises(Killed):
        run.train()


def assert_equal(run, other) -> None:
    for name, tensor in run.weights().items():
        assert torch.equal(tensor, other.weights()[name]), name


@pytest.fixture
def uninterrupted(new_run, tmp_path):
    run = new_run(run_folder=str(tmp_path / "uninterrupted"))
    run.train()
    return run


@pytest.mark.parametrize("at_step", [1, 2, 3, 4, 6])
def test_a_killed_run_resumes_to_the_uninterrupted_weights(new_run, uninterrupted, at_step):
    train_until_killed(new_run(), at_step)
    again = new_run()
    result = again.train()
    assert result.step == 6
    assert_equal(again, uninterrupted)


def test_it_may_be_killed_again_and_again(new_run, uninterrupted):
    for _ in range(3):
        train_until_killed(new_run(checkpoint_every=1), at_step=2)
    last = new_run(checkpoint_every=1)
    assert last.train().step == 6
    assert_equal(last, uninterrupted)


def test_noise_drawn_in_training_goes_on_where_it_was(new_run, tmp_path):
    """A method that draws from all three generators (Medusa draws from none)."""

    class Noisy(MedusaObjective):
        def loss(self, target, drafter, batch):
            loss = super().loss(target, drafter, batch)
            draw = torch.rand(()) + np.random.rand() + random.random()
            loss.loss_sum = loss.loss_sum * float(draw)
            return loss

    def noisy(**changes):
        run = new_run(**changes)
        run.model.objective.__class__ = Noisy
        return run

    whole = noisy(run_folder=str(tmp_path / "whole"))
    whole.train()
    train_until_killed(noisy(), at_step=4)
    torch.manual_seed(99)
    again = noisy()
    np.random.rand(3)
    again.train()
    assert_equal(again, whole)


def test_evaluation_does_not_disturb_training(new_run, uninterrupted, tmp_path):
    run = new_run(eval_every=1, run_folder=str(tmp_path / "evaluated"))
    run.train(evaluate=lambda: {"tau": 1.0})
    assert_equal(run, uninterrupted)


def test_a_finished_run_started_again_trains_no_step(new_run, uninterrupted):
    again = new_run(run_folder=uninterrupted.config.run_folder)
    again.model.objective.loss = None  # would fail if called
    result = again.train()
    assert result.step == 6 and result.figures["loss"] > 0  # the card of a second export is whole
    assert_equal(again, uninterrupted)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "random.pt", "state.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(new_run, uninterrupted, file, damage):
    first = new_run(keep_last=2)
    train_until_killed(first, at_step=6)
    older, newest = checkpoints(first)
    path = newest / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 64]) + content[-8:])
    again = new_run()
    if file == "state.json" and damage == "flipped":
        path.write_text(json.dumps(json.loads(content) | {"files": {"model.safetensors": "0"}}))
    with pytest.warns(UserWarning, match=f"{newest.name} is damaged and passed over"):
        again.train()
    assert_equal(again, uninterrupted)
    assert read_state(older.with_name("step-00000006")).step == 6


def test_half_written_and_half_deleted_checkpoints_are_never_seen(new_run, uninterrupted):
    first = new_run()
    train_until_killed(first, at_step=4)
    (newest,) = checkpoints(first)
    root = newest.parent
    shutil.copytree(newest, root / ".step-00000004.partial-abc")
    (root / ".step-00000004.partial-abc" / "state.json").unlink()
    shutil.copytree(newest, root / ".step-00000001.doomed-7")
    again = new_run()
    again.train()
    assert_equal(again, uninterrupted)
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("file", ["model", "optimizer", "random", "state"])
def test_a_save_that_fails_leaves_the_checkpoints_before(new_run, monkeypatch, file):
    first = new_run(steps=3)
    train_until_killed(first, at_step=3)
    before = {p.name: p.read_bytes() for p in checkpoints(first)[0].iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if file == "model":
        monkeypatch.setattr(train.resume, "save_file", full)
    elif file == "state":
        monkeypatch.setattr(train.resume, "_hash", full)
    else:
        plain = torch.save
        monkeypatch.setattr(
            torch, "save", lambda o, path: full() if path.stem == file else plain(o, path)
        )
    second = new_run(steps=3)
    monkeypatch.setattr("train.resume.read_state", lambda folder: reading(folder))
    reading = _reader_without_hash
    with pytest.raises(OSError, match="No space left"):
        second.train()
    (kept,) = checkpoints(first)
    assert {p.name: p.read_bytes() for p in kept.iterdir()} == before
    assert [p.name for p in kept.parent.iterdir()] == [kept.name]


def _reader_without_hash(folder):
    record = json.loads((folder / "state.json").read_text())
    del record["format_version"], record["files"]
    return train.resume.RunState(**record)


def test_the_newest_checkpoints_stay_and_older_ones_go(new_run):
    run = new_run(steps=6, checkpoint_every=1, keep_last=2)
    run.train()
    assert [path.name for path in checkpoints(run)] == ["step-00000005", "step-00000006"]


def test_checkpoints_come_at_the_asked_cadence_and_at_the_end(new_run, monkeypatch):
    saved = []
    plain = train.resume.save_checkpoint
    monkeypatch.setattr(
        "train.loop.save_checkpoint", lambda *a: (saved.append(a[4].step), plain(*a))
    )
    new_run(steps=5, checkpoint_every=2).train()
    assert saved == [2, 4, 5]


def test_a_checkpoint_holds_no_frozen_tensor(new_run):
    run = new_run()
    run.train()
    folder = checkpoints(run)[-1]
    assert set(load_file(folder / "model.safetensors")) == {
        "drafter.w1", "drafter.b1", "drafter.w2",
    }  # fmt: skip
    moments = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    trained = {p.shape for p in run.drafter.parameters()}
    assert len(moments) == 3 and {m["exp_avg"].shape for m in moments.values()} == trained


def test_a_run_with_other_settings_is_refused_by_name(new_run):
    new_run().train()
    with pytest.raises(ValueError, match=r"other settings \(learning_rate: 0.001 → 0.01\)"):
        new_run(learning_rate=0.01).train()
    again = new_run(log_every=1, keep_last=1, max_minutes=5.0)  # these do not decide the weights
    assert again.train().step == 6


def test_resume_none_refuses_a_folder_with_checkpoints(new_run):
    new_run().train()
    with pytest.raises(ValueError, match="resume is 'none'"):
        new_run(resume="none").train()


def test_another_number_of_processes_is_refused_with_the_reason(new_run, monkeypatch):
    run = new_run()
    run.train()
    path = checkpoints(run)[-1] / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"world_size": 2}))
    with pytest.raises(ValueError, match="written by 2 processes.*resume with 2, not 1"):
        new_run().train()


def test_the_tracker_run_id_survives(new_run):
    first = new_run()
    train_until_killed(first, at_step=4)
    run_id = read_state(checkpoints(first)[-1]).run_id
    assert run_id and new_run().train().run_id == run_id


def test_random_states_go_through_a_file_that_only_holds_data(tmp_path):
    torch.save([random_state()], tmp_path / "random.pt")
    expected = (random.random(), np.random.rand(), torch.rand(3))
    (state,) = torch.load(tmp_path / "random.pt", weights_only=True)
    set_random_state(state)
    again = (random.random(), np.random.rand(), torch.rand(3))
    assert again[:2] == expected[:2] and torch.equal(again[2], expected[2])
