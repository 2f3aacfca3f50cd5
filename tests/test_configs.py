"""Every shipped YAML is accepted by what reads it: its script, or Accelerate."""

import importlib
import inspect
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from train.config import LoopConfig, parse_config

CONFIGS = Path(__file__).parents[1] / "configs"
ACCELERATE = sorted((CONFIGS / "accelerate").glob("*.yaml"))
RECIPES = sorted(path for path in CONFIGS.rglob("*.yaml") if path not in ACCELERATE)


def name(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def config_class(recipe: Path) -> type[LoopConfig]:
    """The settings of train/<method>.py for a recipe in configs/<method>/."""
    module = importlib.import_module(f"train.{recipe.parent.name}")
    (found,) = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, LoopConfig)
        and value.__module__ == module.__name__
    ]
    return found


def test_every_yaml_lies_in_the_folder_of_its_script_or_of_accelerate():
    assert RECIPES and ACCELERATE
    scripts = {path.stem for path in (CONFIGS.parent / "train").glob("*.py")}
    for path in RECIPES:
        assert path.parent.parent == CONFIGS and path.parent.name in scripts, name(path)
    assert sorted(CONFIGS.rglob("*.yml")) == []


@pytest.mark.parametrize("recipe", RECIPES, ids=name)
def test_recipe_is_accepted_by_its_script_with_every_value(recipe):
    config = parse_config(config_class(recipe), ["--config", str(recipe)])
    written = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    for key, value in written.items():
        read = getattr(config, key)
        assert read == (float(value) if isinstance(read, float) else value), key


@pytest.mark.parametrize("recipe", RECIPES, ids=name)
def test_misspelt_key_in_a_recipe_is_an_error_that_names_the_right_one(recipe, tmp_path):
    text = recipe.read_text(encoding="utf-8")
    broken = tmp_path / "recipe.yaml"
    broken.write_text(text + "\nlearning_rat: 0.1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"learning_rat\b.*learning_rate"):
        parse_config(config_class(recipe), ["--config", str(broken)])


@pytest.mark.parametrize("path", ACCELERATE, ids=name)
def test_launcher_config_is_accepted_by_accelerate(path):
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = load_config_from_file(str(path))
    for key, value in written.items():
        if key in ("compute_environment", "distributed_type", "mixed_precision"):
            assert str(getattr(getattr(config, key), "value", getattr(config, key))) == str(value)
        else:
            assert getattr(config, key) == value, key
    # Precision and process count are the launcher's, so a launcher file says both.
    assert {"mixed_precision", "num_processes"} <= set(written), name(path)
