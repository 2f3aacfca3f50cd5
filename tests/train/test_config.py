"""Settings: YAML and command line go through one parser, and every mistake is named."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from train.config import LoopConfig, option, parse_config, run_script
from train.medusa import MedusaTrainConfig


@dataclass(kw_only=True)
class Settings:
    name: str = option(help="needed")
    rate: float = option(1e-3, "")
    steps: int = option(5, "")
    shift: float = option(0.0, "")
    fast: bool = option(False, "")
    kind: Literal["a", "b"] = option("a", "")
    limit: int | None = option(None, "")
    levels: list[int] = field(default_factory=lambda: [1, 2])


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_yaml_then_command_line_the_later_wins(yaml_file):
    path = yaml_file("name: x\nrate: 1e-4\nsteps: 7\nfast: true\nkind: b\nlevels: [3, 4]\n")
    config = parse_config(Settings, ["--config", path, "--steps", "9", "--levels", "8"])
    assert config == Settings(name="x", rate=1e-4, steps=9, fast=True, kind="b", levels=[8])


def test_every_form_of_the_same_setting(yaml_file):
    path = yaml_file("name: x\nshift: -2.5\nlimit: 4\n")
    wanted = Settings(name="x", shift=-2.5, limit=4)
    assert parse_config(Settings, [f"--config={path}"]) == wanted
    assert parse_config(Settings, ["--name=x", "--shift=-2.5", "--limit=4"]) == wanted
    assert parse_config(Settings, ["--name", "x", "--shift", "-2.5", "--limit", "4"]) == wanted
    first = parse_config(Settings, ["--steps", "6", f"--config={path}", "--fast"])
    assert first.steps == 6 and first.fast


def test_small_numbers_in_scientific_notation_survive(yaml_file):
    assert parse_config(Settings, ["--config", yaml_file("name: x\nshift: -1e-3")]).shift == -1e-3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nrat: 1", r"settings.yaml: 'rat' is no setting; did you mean 'rate'\?"),
        ("name: x\nzzzzqqq: 1", "'zzzzqqq' is no setting; known: name, rate"),
        ("name: x\nsteps: many", "steps.*invalid int value: 'many'"),
        ("name: x\nsteps: 1.5", "steps.*invalid int value: '1.5'"),
        ("name: x\nsteps: true", "steps.*invalid int value: 'true'"),
        ("name: x\nfast: 2", "fast.*2"),
        ("name: x\nkind: c", "kind.*invalid choice: 'c'.*a.*b"),
        ("name: x\nlevels: [1, x]", "levels.*invalid int value: 'x'"),
        ("name: x\nlimit:", "limit is empty"),
        ("name: x\nrate: {a: 1}", "rate is nested"),
        ("name: x\nrate: 1\nrate: 2", "key 'rate' appears twice"),
        ("- name", "expected lines of `key: value`"),
        ("name: [", "settings.yaml: "),
        ("rate: 1", "required: --name"),
    ],
)
def test_what_is_wrong_in_a_yaml_is_named(yaml_file, text, message):
    with pytest.raises(ValueError, match=message):
        parse_config(Settings, ["--config", yaml_file(text)])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--name", "x", "--stepz", "3"], r"--stepz is no setting; did you mean 'steps'\?"),
        (["--name", "x", "--stepz=3"], r"--stepz is no setting; did you mean 'steps'\?"),
        (["--name", "x", "--step", "3"], r"--step is no setting; did you mean 'steps'\?"),
        (["--name", "x", "stray"], "'stray' on the command line belongs to no setting"),
        (["--name", "x", "--steps", "x"], "steps.*invalid int value: 'x'"),
        (["--config"], "--config needs a YAML file"),
        (["--config", "nowhere.yaml"], "config nowhere.yaml: No such file"),
        (["--config", "a.yaml", "--config=b.yaml"], "--config is given twice"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_named(argv, message):
    with pytest.raises(ValueError, match=message):
        parse_config(Settings, argv)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 6, "micro_batch_size": 4}, "batch_size is 6; it must be a multiple of mi"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be > 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"warmup_ratio": 1.0}, "warmup_ratio is 1.0"),
        ({"keep_last": 0}, "keep_last is 0; it must be ≥ 1"),
        ({"epochs": 0.0}, "epochs is 0.0"),
        ({"resume": "yes"}, "resume is 'yes'; it must be 'auto' or 'none'"),
        ({"head_type": "reduced"}, "draft_vocab_size is 0 and head_type is 'reduced'"),
        ({"draft_vocab_size": 9}, "draft_vocab_size is 9 and head_type is 'own'"),
        ({"tree_nodes": 0}, "tree_nodes is 0"),
        ({"head_decay": 0.0}, "head_decay is 0.0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        MedusaTrainConfig(data="d", output="o", **changes)


def test_settings_that_decide_the_weights_are_told_from_the_others():
    config = MedusaTrainConfig(data="d", output="o/", tracker="wandb", tree_nodes=9)
    assert config.run_folder == "o-run"
    decisive = config.decisive()
    assert {"learning_rate", "seed", "num_heads", "batch_size", "epochs"} <= decisive.keys()
    assert not {"tracker", "output", "run_folder", "tree_nodes", "data", "resume"} & decisive.keys()
    assert LoopConfig.FREE <= {field for field in vars(config)}


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("bad key"), 2), (OSError("disk full"), 2),
                        (ArithmeticError("nan"), 1)],
)  # fmt: skip
def test_a_users_error_is_one_line_and_an_exit_code(capsys, error, code):
    def main():
        raise error

    with pytest.raises(SystemExit) as raised:
        run_script(main)
    assert raised.value.code == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_the_traceback_can_be_had(monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_TRACEBACK", "1")

    def main():
        raise ValueError("where from?")

    with pytest.raises(ValueError, match="where from"):
        run_script(main)
