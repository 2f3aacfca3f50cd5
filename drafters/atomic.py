"""Folders that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which takes the name `folder` when the block ends well.

    A folder already there is replaced only then, by two renames. If the block fails or the process
    is killed, `folder` is what it was; a kill exactly between the two renames leaves the old one
    beside it as `.NAME.previous`, and the next write (or `recover`) puts it back.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    recover(folder)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    previous = _previous(folder)
    try:
        yield partial
        for path in [*partial.rglob("*"), partial]:
            path.chmod(0o755 if path.is_dir() else 0o644)  # temporary folders are made for one user
            _flush(path)
        if folder.exists():
            folder.rename(previous)
        partial.rename(folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        recover(folder)


def recover(folder: Path) -> None:
    """Settles what the renames of `complete_folder` have left aside: drops it, or puts it back."""
    previous = _previous(folder)
    if not previous.exists():
        return
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
    else:
        previous.rename(folder)


def remove_folder(folder: Path) -> None:
    """Deletes a folder so that no reader ever sees half of it under its name."""
    doomed = folder.with_name(f".{folder.name}.doomed-{os.getpid()}")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _flush(path: Path) -> None:
    """To the disk itself: a rename must not survive a power cut that its contents did not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
