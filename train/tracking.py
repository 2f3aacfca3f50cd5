"""Tracking through Accelerate: none, wandb or tensorboard. A tracker never ends a run."""

from __future__ import annotations

import netrc
import os
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from accelerate import Accelerator

TrackerName = Literal["none", "wandb", "tensorboard"]


class Tracking:
    """Sends a run's settings and figures to one tracker.

    After the tracker's first failure one warning is given, nothing more is sent, and training goes
    on. No entity is ever set: wandb takes the user's own default.

    Args:
        accelerator: made with `log_with` set to the same tracker (None for "none").
        folder: where the tracker keeps its files.
        run_id: of the run that is resumed; None begins a new one.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        name: TrackerName,
        folder: Path,
        project: str = "draftsmith",
        settings: Mapping[str, Any] | None = None,
        run_id: str | None = None,
    ) -> None:
        self.run_id = run_id or uuid.uuid4().hex[:8]
        self._accelerator = accelerator
        self._name = name
        self._alive = name != "none"
        options: dict[str, Any] = {}
        if name == "wandb":
            options = {"id": self.run_id, "resume": "allow", "dir": str(folder)}
            if mode := wandb_mode():
                options["mode"] = mode
        elif name == "tensorboard":
            # Accelerate writes to logging_dir/project; the id in the path lets a resumed run go on.
            project = f"{project}/{self.run_id}"
        plain = {key: _plain(value) for key, value in (settings or {}).items()}

        def start() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            accelerator.init_trackers(project, plain, {name: options} if options else {})

        self._attempt(start)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Sends figures of a step; does nothing after a failure."""
        self._attempt(lambda: self._accelerator.log(dict(values), step=step))

    def finish(self) -> None:
        """Closes the tracker; Accelerate's own `end_training` would also part the processes."""
        for tracker in self._accelerator.trackers:
            self._attempt(tracker.finish)
        self._accelerator.trackers = []
        self._alive = False

    def _attempt(self, action: Callable[[], None]) -> None:
        if not self._alive:
            return
        try:
            action()
        except Exception as error:  # whatever a tracker may raise, the run is worth more
            self._alive = False
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            warnings.warn(
                f"tracker {self._name} failed ({reason}); training goes on without it", stacklevel=3
            )


def wandb_mode() -> str | None:
    """ "offline" where wandb would ask for a key; None where the user has a key or chose a mode."""
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return None
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        has_key = netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        has_key = False
    return None if has_key else "offline"


def _plain(value: Any) -> Any:
    """A setting as trackers take them: number, text or flag."""
    return value if isinstance(value, (bool, int, float, str)) else str(value)
