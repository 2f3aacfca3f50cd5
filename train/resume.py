"""Checkpoints of a training run: complete or not at all, and enough to go on bit for bit.

A checkpoint is a folder `step-N`: the trained tensors, the optimizer, the random states of every
process, and state.json, which names the other files with their hashes. The data position and the
learning rate are functions of the step, so the step is all that is kept of them.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafters.atomic import complete_folder, remove_folder

STATE_FILE = "state.json"
FORMAT_VERSION = 1


@dataclass
class RunState:
    """What a run has to know besides its tensors.

    Attributes:
        step: optimizer steps done.
        run_id: the tracker's.
        settings: what decides the weights; another value under one key makes it another run.
        seconds: trained so far, over all sittings.
        world_size: processes that wrote the checkpoint.
        figures: of the last log.
    """

    step: int
    run_id: str
    settings: dict[str, Any]
    seconds: float
    world_size: int
    figures: dict[str, float]


def save_checkpoint(
    root: Path,
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: RunState,
    keep_last: int,
) -> None:
    """Writes `root/step-N` from the main process and removes all but the newest `keep_last`.

    Args:
        model: its `state_dict` holds trained tensors only (see `TrainingModel`).
    Raises:
        OSError: full disk; the checkpoints already there stay as they were.
    """
    random_states = gather_object([random_state()])  # every process takes part
    if accelerator.is_main_process:
        tensors = accelerator.unwrap_model(model).state_dict()
        with complete_folder(root / f"step-{state.step:08d}") as folder:
            try:
                whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
                save_file(whole, folder / "model.safetensors")
                torch.save(optimizer.state_dict(), folder / "optimizer.pt")
                torch.save(random_states, folder / "random.pt")
            except (SafetensorError, RuntimeError) as error:
                raise OSError(f"{root}: checkpoint not written: {error}") from error
            files = {path.name: _hash(path) for path in sorted(folder.iterdir())}
            record = {"format_version": FORMAT_VERSION, "files": files, **vars(state)}
            (folder / STATE_FILE).write_text(json.dumps(record, indent=2) + "\n")
        for old in _newest_first(root)[keep_last:]:
            remove_folder(old)
    accelerator.wait_for_everyone()


def load_newest(
    root: Path,
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
) -> RunState | None:
    """Restores the newest undamaged checkpoint below `root`; None if there is none.

    Raises:
        ValueError: if the checkpoint belongs to a run with other settings or another number of
            processes; what differs is named.
    """
    if accelerator.is_main_process:
        _remove_leftovers(root)
    accelerator.wait_for_everyone()
    for folder in _newest_first(root):
        try:
            state = read_state(folder)
            tensors = load_file(folder / "model.safetensors")
            moments = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
            random_states = torch.load(folder / "random.pt", weights_only=True)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            warnings.warn(f"checkpoint {folder} is damaged and passed over: {error}", stacklevel=2)
            continue
        _refuse_other_run(folder, state, settings, accelerator.num_processes)
        accelerator.unwrap_model(model).load_state_dict(tensors)
        optimizer.load_state_dict(moments)
        set_random_state(random_states[accelerator.process_index])
        return state
    return None


def read_state(folder: Path) -> RunState:
    """state.json of a checkpoint whose files all have the recorded hashes.

    Raises:
        ValueError: naming the file that is missing or altered.
    """
    record = json.loads((folder / STATE_FILE).read_text())
    if record.pop("format_version") != FORMAT_VERSION:
        raise ValueError(f"{STATE_FILE} has another format_version than {FORMAT_VERSION}")
    for name, digest in record.pop("files").items():
        if not (folder / name).is_file() or _hash(folder / name) != digest:
            raise ValueError(f"{name} is missing or not as it was written")
    return RunState(**record)


def has_checkpoints(root: Path) -> bool:
    return bool(_newest_first(root))


def random_state() -> dict[str, Any]:
    """The random states of this process, in types that torch.load reads with weights_only."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def _refuse_other_run(
    folder: Path, state: RunState, settings: dict[str, Any], world_size: int
) -> None:
    now = json.loads(json.dumps(settings))  # as it reads after a round through state.json
    then = state.settings
    changed = [key for key in sorted(now.keys() | then) if now.get(key) != then.get(key)]
    if changed:
        differences = ", ".join(f"{k}: {then.get(k)!r} → {now.get(k)!r}" for k in changed)
        raise ValueError(
            f"checkpoint {folder} belongs to a run with other settings ({differences}); "
            "set them back, or choose another run_folder"
        )
    if state.world_size != world_size:
        raise ValueError(
            f"checkpoint {folder} was written by {state.world_size} processes, and each has its "
            f"own random state; resume with {state.world_size}, not {world_size}"
        )


def _newest_first(root: Path) -> list[Path]:
    return sorted((p for p in root.glob("step-*") if p.is_dir()), reverse=True)


def _remove_leftovers(root: Path) -> None:
    """Half-written and half-deleted folders of a killed run; their names begin with a dot."""
    for path in _leftovers(root):
        shutil.rmtree(path, ignore_errors=True)


def _leftovers(root: Path) -> Iterator[Path]:
    yield from root.glob(".step-*.partial-*")
    yield from root.glob(".step-*.doomed-*")


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
