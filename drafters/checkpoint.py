"""The one on-disk schema of a drafter: drafter.json + model.safetensors + README.md.

Strict and atomic: a load that does not use every tensor, or would leave one unset, fails and names
it; a folder appears complete or not at all. Only the drafter's own tensors are stored.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import drafters
from drafters.atomic import complete_folder
from drafters.model_card import model_card
from drafters.target import Target

SCHEMA_VERSION = 1
CONFIG_FILE = "drafter.json"
WEIGHTS_FILE = "model.safetensors"
# What decides whether heads fit a target. The template is left out: another template costs accepted
# tokens, never exactness.
IDENTITY_KEYS = ("weights_hash", "config_hash", "tokenizer_hash", "vocab_size")


def save_drafter(
    folder: str | Path,
    drafter: Any,
    target_identity: dict[str, Any],
    training_summary: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Writes a drafter folder; one already there is replaced by a complete one only.

    Args:
        drafter: a module of DRAFTERS; its `config` and its `state_dict` are what is written.
        target_identity: `Target.identity` of the target it was made for.
        training_summary: figures for the model card; "evaluation" holds the measured τ.
        extra: further keys of drafter.json, e.g. how the draft vocabulary was made.
    Raises:
        OSError: if the disk is full or not writable; the old folder stays as it was.
        ValueError: if the folder holds something else than a drafter.
    """
    refuse_foreign_folder(folder)
    tensors = {name: tensor.detach().contiguous() for name, tensor in drafter.state_dict().items()}
    method = drafter.config.method
    record = {
        "schema_version": SCHEMA_VERSION,
        "method": method,
        "config": dataclasses.asdict(drafter.config),
        "tensors": {name: describe(tensor) for name, tensor in sorted(tensors.items())},
        "target": target_identity,
        "training": training_summary or {},
    }
    if clash := record.keys() & (extra or {}).keys():
        raise ValueError(f"extra: {', '.join(sorted(clash))} belong to the schema")
    record |= extra or {}
    folder = Path(folder)
    with complete_folder(folder) as partial:
        try:
            save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        except SafetensorError as error:  # it wraps the system's own error, a full disk for one
            raise OSError(f"{folder / WEIGHTS_FILE}: cannot be written: {error}") from error
        (partial / CONFIG_FILE).write_text(json.dumps(record, indent=2) + "\n")
        (partial / "README.md").write_text(model_card(record))
    return folder


def refuse_foreign_folder(folder: str | Path) -> None:
    """Raises ValueError if saving a drafter there would replace files that are not a drafter's."""
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{folder} holds files, but no drafter: choose another folder")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another name for the drafter's folder")


def load_drafter(
    folder: str | Path,
    target: Target | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """The drafter of a folder, in eval mode.

    Args:
        target: checked against the target it was made for; None skips that check.
        dtype: of its floating tensors; None keeps what is stored.
        device: None takes the target's, else the CPU.
    Raises:
        ValueError: naming folder and tensor, key or hash, and what was expected.
    """
    folder = Path(folder)
    record = read_record(folder)
    if target is not None:
        check_target(folder, record["target"], target)
    drafter_class = drafters.DRAFTERS[record["method"]]
    try:
        config = drafter_class.config_class(**record["config"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG_FILE}: config: {error}") from error
    with torch.device("meta"):
        drafter = drafter_class(config)
    wanted = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
    tensors = read_tensors(folder / WEIGHTS_FILE, wanted, record["tensors"])
    drafter.load_state_dict(tensors, strict=True, assign=True)
    place = device or (target.device if target is not None else "cpu")
    return drafter.to(device=place, dtype=dtype).eval()


def read_record(folder: str | Path) -> dict[str, Any]:
    """drafter.json of a folder, checked for schema and method.

    Raises:
        ValueError: if this is no drafter folder of ours.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        what = "has no drafter.json" if path.parent.is_dir() else "does not exist"
        hint = "; a drafter is a folder written by a train script"
        previous = path.parent.with_name(f".{path.parent.name}.previous")
        if previous.is_dir():
            hint = f"; an interrupted save has left the one before in {previous}: rename it back"
        raise ValueError(f"drafter {folder}: the folder {what}{hint}")
    try:
        record = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
        found = record.get("schema_version") if isinstance(record, dict) else None
        raise ValueError(f"{path}: schema_version is {found}; this version reads {SCHEMA_VERSION}")
    for key, kind in (("config", dict), ("tensors", dict), ("target", dict), ("method", str)):
        if not isinstance(record.get(key), kind):
            raise ValueError(f"{path}: {key} is missing or not a {kind.__name__}")
    if record["method"] not in drafters.DRAFTERS:
        near = difflib.get_close_matches(record["method"], drafters.DRAFTERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(drafters.DRAFTERS)}"
        raise ValueError(f"{path}: method {record['method']!r} is unknown; {hint}")
    return record


def read_tensors(
    path: Path, wanted: dict[str, list[int]], recorded: dict[str, dict[str, Any]]
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, after all of them were found to be the wanted ones.

    Args:
        wanted: name → shape, by the config.
        recorded: name → {"shape", "dtype"}, by drafter.json when the file was written.
    """
    if not path.is_file():
        raise ValueError(f"{path}: missing")
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated or not a safetensors file ({error})") from error
    if missing := sorted(wanted.keys() - found.keys()):
        raise ValueError(f"{path}: tensor missing: {', '.join(missing)}")
    if unexpected := sorted(found.keys() - wanted.keys()):
        raise ValueError(f"{path}: tensor not expected: {', '.join(unexpected)}")
    for name, tensor in found.items():
        if list(tensor.shape) != wanted[name]:
            raise ValueError(
                f"{path}: tensor {name} has shape {list(tensor.shape)}, expected {wanted[name]}"
            )
        if describe(tensor) != recorded.get(name):
            raise ValueError(
                f"{path}: tensor {name} is {describe(tensor)}, drafter.json says "
                f"{recorded.get(name)}"
            )
    return found


def check_target(folder: str | Path, made_for: dict[str, Any], target: Target) -> None:
    """Raises ValueError unless `target` is the one that the drafter was made for."""
    identity = target.identity
    for key in IDENTITY_KEYS:
        if made_for.get(key) != identity[key]:
            raise ValueError(
                f"drafter {folder} was made for another target: {key} is {made_for.get(key)} "
                f"({made_for.get('name')}), but {target.name} has {identity[key]}"
            )


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """Shape and dtype, as drafter.json keeps them."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
