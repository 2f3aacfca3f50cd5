"""The order of the rooms: each may import from itself and from those further down, never up."""

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# scripts → train → data_recipes → inference → drafters
ROOMS = ("scripts", "train", "data_recipes", "inference", "drafters")
MAX_LINES = 350
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "misc", "common", "tools"}


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported_modules(source: str, package: str) -> list[tuple[int, str]]:
    """Every module that a source imports: (line, absolute dotted name).

    Imports inside functions and under TYPE_CHECKING count, and so do literal arguments of
    `import_module` and `__import__`.

    Args:
        source: the text of a module.
        package: dotted name of the package it lies in, against which relative imports resolve.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                parts = package.split(".")
                base = parts[: len(parts) - node.level + 1]
                name = ".".join([*base, *([node.module] if node.module else [])])
            else:
                name = node.module or ""
            # `from .. import drafters` names the room in the alias, at the top level.
            names = [name] if name else [alias.name for alias in node.names]
            found += [(node.lineno, name) for name in names]
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            argument = node.args[0]
            if called in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                found.append((node.lineno, str(argument.value)))
    return found


def upward_imports(source: str, room: str, package: str | None = None) -> list[str]:
    """The imports of a module in `room` that lead up to a room which must not be known there."""
    above = ROOMS[: ROOMS.index(room)]
    forbidden = {*above, "tests"}
    return [
        f"line {line}: {room} imports {name}"
        for line, name in imported_modules(source, package or room)
        if name.split(".")[0] in forbidden
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_one_way(room):
    assert modules(room), f"{room}/ has no modules"
    faults = []
    for path in modules(room):
        package = ".".join(path.parent.relative_to(ROOT).parts)
        found = upward_imports(path.read_text(encoding="utf-8"), room, package)
        faults += [f"{path.relative_to(ROOT)}, {fault}" for fault in found]
    assert faults == []


@pytest.mark.parametrize(
    "source",
    [
        "import train.loop",
        "from train import loop",
        "def late():\n    from scripts.demo import main",
        "if TYPE_CHECKING:\n    import data_recipes.batches as b",
        "importlib.import_module('train.medusa')",
        "from tests.exactness import toys",
        "from ... import train",
        "from ...train import loop",
    ],
)
def test_an_upward_import_is_found_in_every_form(source):
    assert len(upward_imports(source, "inference", "inference.laws")) == 1


@pytest.mark.parametrize(
    "source",
    ["from drafters import target", "from . import tree", "from .train import x", "import os"],
)
def test_downward_and_own_imports_are_allowed(source):
    assert upward_imports(source, "inference") == []


def test_no_file_in_train_has_the_name_of_a_library():
    """`python train/x.py` puts train/ first on sys.path: its files would shadow the library."""
    own = set(ROOMS)
    libraries = (set(sys.stdlib_module_names) | set(packages_distributions())) - own
    assert {"datasets", "accelerate", "types", "logging"} <= libraries
    names = {path.stem for path in (ROOT / "train").iterdir() if not path.name.startswith("_")}
    assert names & libraries == set()


@pytest.mark.parametrize("room", ROOMS[1:])
def test_every_folder_of_modules_is_a_package(room):
    """setuptools installs packages only: a folder without __init__.py would be left out."""
    folders = {path.parent for path in modules(room)}
    assert [f for f in sorted(folders) if not (f / "__init__.py").exists()] == []


@pytest.mark.parametrize("room", ROOMS)
def test_files_are_named_after_what_they_do_and_do_one_thing(room):
    for path in modules(room):
        assert path.stem not in VAGUE_NAMES, path
        lines = path.read_text(encoding="utf-8").count("\n")
        assert lines <= MAX_LINES, (
            f"{path.relative_to(ROOT)} has {lines} lines: is it still one thing?"
        )
