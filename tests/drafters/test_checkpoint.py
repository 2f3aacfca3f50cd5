"""The drafter folder: strict, atomic, and the drafter's own tensors only."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import load_drafter, save_drafter
from drafters.atomic import complete_folder
from drafters.medusa import MedusaConfig, MedusaDrafter
from tests.tiny_models import VOCAB, tiny_target


@pytest.fixture
def target():
    return tiny_target()


@pytest.fixture
def drafter(target):
    torch.manual_seed(0)
    config = MedusaConfig(
        num_heads=2, hidden_size=32, vocab_size=VOCAB, head_type="reduced", draft_vocab_size=11,
        tree=[[0], [1], [0, 0]],
    )  # fmt: skip
    drafter = MedusaDrafter.from_target(target, config, torch.arange(20, 31))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter))
    return drafter


@pytest.fixture
def folder(tmp_path, target, drafter):
    summary = {"steps": 12, "evaluation": {"tree_tau": 1.75}}
    return save_drafter(tmp_path / "drafter", drafter, target.identity, summary)


def change_tensors(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_record(folder, **changes) -> None:
    path = folder / "drafter.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_saved_drafter_loads_as_it_was(folder, target, drafter):
    loaded = load_drafter(folder, target)
    assert loaded.config == drafter.config
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert not loaded.training
    half = load_drafter(folder, target, dtype=torch.bfloat16)
    assert half.w1.dtype == torch.bfloat16 and half.draft_vocab.dtype == torch.int64


def test_only_the_drafters_own_tensors_are_saved(folder, target):
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "w1": (2, 1, 32, 32), "b1": (2, 1, 32), "w2": (2, 11, 32), "draft_vocab": (11,),
    }  # fmt: skip
    bytes_of_tensors = sum(t.numel() * t.element_size() for t in tensors.values())
    assert (folder / "model.safetensors").stat().st_size < bytes_of_tensors + 2000


def test_model_card_and_record_tell_target_and_figures(folder, target):
    record = json.loads((folder / "drafter.json").read_text())
    assert record["target"] == target.identity and record["method"] == "medusa"
    card = (folder / "README.md").read_text()
    assert "tree_tau: 1.75" in card and target.identity["weights_hash"] in card


@pytest.mark.parametrize("name", ["w1", "b1", "w2", "draft_vocab"])
def test_a_missing_tensor_is_an_error_that_names_it(folder, name):
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"tensor missing: {name}$"):
        load_drafter(folder)


def test_an_extra_tensor_is_an_error_that_names_it(folder):
    change_tensors(folder, lambda tensors: tensors.update(fc_bias=torch.zeros(2)))
    with pytest.raises(ValueError, match="tensor not expected: fc_bias"):
        load_drafter(folder)


def test_a_misshapen_tensor_is_an_error_that_names_it(folder):
    change_tensors(folder, lambda tensors: tensors.update(b1=torch.zeros(2, 1, 31)))
    with pytest.raises(ValueError, match=r"tensor b1 has shape \[2, 1, 31\], expected \[2, 1, 32"):
        load_drafter(folder)


def test_a_tensor_of_another_dtype_is_an_error_that_names_it(folder):
    change_tensors(folder, lambda tensors: tensors.update(w1=tensors["w1"].half()))
    with pytest.raises(ValueError, match=r"tensor w1 is .*float16.*drafter.json says .*float32"):
        load_drafter(folder)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_an_error_that_names_it(folder, share):
    path = folder / "model.safetensors"
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(ValueError, match="model.safetensors: truncated"):
        load_drafter(folder)


def test_foreign_folders_are_refused(tmp_path, folder):
    with pytest.raises(ValueError, match="does not exist"):
        load_drafter(tmp_path / "nowhere")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no drafter.json"):
        load_drafter(foreign)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors: missing"):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "schema_version is 2; this version reads 1"),
        ({"method": "medussa"}, "method 'medussa' is unknown; did you mean 'medusa'"),
        ({"config": {"num_heads": 2}}, "config: .*hidden_size"),
        ({"config": {"num_headz": 2}}, "config: .*num_headz"),
        ({"config": None}, "config is missing or not a dict"),
        ({"target": []}, "target is missing or not a dict"),
    ],
)
def test_a_record_of_another_kind_is_refused(folder, changes, message):
    change_record(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)


def test_a_record_that_is_no_json_is_refused(folder):
    (folder / "drafter.json").write_text('{"schema_version": 1,')
    with pytest.raises(ValueError, match="drafter.json: not readable as JSON"):
        load_drafter(folder)


def test_another_target_is_refused_by_the_hash_that_differs(folder):
    with pytest.raises(ValueError, match="made for another target: weights_hash is"):
        load_drafter(folder, tiny_target(seed=1))


def test_saving_replaces_a_drafter_and_nothing_else(tmp_path, folder, target, drafter):
    with torch.no_grad():
        drafter.w1.fill_(3.0)
    save_drafter(folder, drafter, target.identity)
    assert load_drafter(folder).w1.max().item() == 3.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter"]
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter1.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds files, but no drafter"):
        save_drafter(thesis, drafter, target.identity)
    assert (thesis / "chapter1.txt").read_text() == "years of work"


def test_a_failed_save_leaves_the_old_drafter(tmp_path, folder, target, drafter, monkeypatch):
    before = (folder / "model.safetensors").read_bytes()

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drafters.checkpoint.model_card", full_disk)
    with torch.no_grad():
        drafter.w1.fill_(3.0)
    with pytest.raises(OSError, match="No space left"):
        save_drafter(folder, drafter, target.identity)
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter"]


def test_the_old_drafter_stays_until_the_new_one_has_its_name(folder, monkeypatch):
    rename = Path.rename

    def no_new_name(self, target):
        if "partial" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", no_new_name)
    with pytest.raises(OSError, match="Input/output"), complete_folder(folder):
        pass
    load_drafter(folder)


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path, folder):
    previous = tmp_path / ".drafter.previous"
    folder.rename(previous)  # where a kill right after the first rename leaves things
    with pytest.raises(ValueError, match="rename it back"):
        load_drafter(folder)
    with pytest.raises(RuntimeError), complete_folder(folder):
        raise RuntimeError("the next save fails too")
    load_drafter(folder)
    assert not previous.exists()


def test_extra_keys_may_not_shadow_the_schema(tmp_path, target, drafter):
    with pytest.raises(ValueError, match="extra: config"):
        save_drafter(tmp_path / "x", drafter, target.identity, extra={"config": {}})
