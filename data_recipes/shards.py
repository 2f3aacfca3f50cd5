"""The folder of answered rows: Parquet shards and manifest.json, each there whole or not at all.

    answers/
      manifest.json         what made the rows, counts, dropped rows by reason
      shard-00000.parquet   rows, and in the file's metadata the counts of this shard alone

The manifest's counts are sums over the shards that are there, so a run that is killed between a
shard and the manifest loses nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_recipes.conversation import AnsweredRow

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
COUNTS_KEY = b"draftsmith.counts"
ROW_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "task": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "seeds": pa.list_(pa.int64()),
        "finish_reasons": pa.list_(pa.string()),
    }
)

Counts = dict[str, Any]  # numbers, and dictionaries of numbers


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.parquet"


def write_shard(path: Path, rows: Iterable[AnsweredRow], counts: Counts) -> None:
    """Writes rows and their counts; the file appears under its name when it is complete.

    Raises:
        OSError: names the file; nothing is left of it then.
    """
    schema = ROW_SCHEMA.with_metadata({COUNTS_KEY: json.dumps(counts).encode()})
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=schema)
    _appear(path, lambda partial: pq.write_table(table, partial, compression="zstd"))


def read_shard(path: Path) -> tuple[list[dict[str, Any]], Counts]:
    """(rows, counts) of a shard.

    Raises:
        ValueError: names the file if it is not a whole shard.
    """
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a readable shard ({error})") from error
    if table.schema != ROW_SCHEMA:
        raise ValueError(f"{path}: its columns are not those of answered rows")
    return table.to_pylist(), _counts(table.schema.metadata, path)


def read_counts(path: Path) -> Counts:
    """The counts of a shard, without reading its rows."""
    try:
        return _counts(pq.read_schema(path).metadata, path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a readable shard ({error})") from error


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Replaces manifest.json by rename.

    Raises:
        OSError: names the file; the manifest before it stays.
    """
    text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    _appear(folder / MANIFEST, lambda partial: partial.write_text(text, encoding="utf-8"))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None where there is none.

    Raises:
        ValueError: names the file if it is damaged or of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a manifest of answered rows ({error!r})") from error
    if version != SCHEMA_VERSION:
        raise ValueError(f"{path}: schema version {version}, this program reads {SCHEMA_VERSION}")
    return manifest


def refuse_difference(
    folder: Path, before: dict[str, Any], now: dict[str, Any], prefix: str = ""
) -> None:
    """Raises ValueError naming the first field in which two `made_with` differ.

    The name of a target may differ: it is a path or an id, and the hashes say what it is.
    """
    for field in sorted({*before, *now} - ({"name"} if prefix == "target." else set())):
        old, new = before.get(field), now.get(field)
        if isinstance(old, dict) and isinstance(new, dict) and field != "template_kwargs":
            refuse_difference(folder, old, new, f"{prefix}{field}.")
        elif old != new:
            raise ValueError(
                f"{folder} was made with {prefix}{field} = {old!r}, now it is {new!r}; use the "
                "same setting, or another folder"
            )


def add_counts(total: Counts, more: Counts) -> Counts:
    """Sum of two sets of counts, key by key."""
    added = dict(total)
    for key, value in more.items():
        if isinstance(value, dict):
            added[key] = add_counts(added.get(key, {}), value)
        else:
            added[key] = added.get(key, 0) + value
    return added


def _counts(metadata: dict[bytes, bytes] | None, path: Path) -> Counts:
    if not metadata or COUNTS_KEY not in metadata:
        raise ValueError(f"{path}: not a shard of answered rows (it carries no counts)")
    return json.loads(metadata[COUNTS_KEY])


def _appear(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes beside `path`, flushes to the disk, and renames."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error
