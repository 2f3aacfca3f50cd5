"""Raw rows from JSONL, JSON, Parquet or a hub data set, each with the place it came from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Place = tuple[str, int]  # name of the file or data set, row (line in JSONL), counted from 1
SUFFIXES = (".jsonl", ".json", ".parquet")


def iterate_rows(source: str, split: str = "train") -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yields ((file, row), columns) in file order.

    Args:
        source: a .jsonl, .json (one array, or JSONL under that name) or .parquet file, or a hub id.
        split: split of a hub data set.
    Raises:
        ValueError: names the file, and the row where there is one.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{source}: prompts are read from {', '.join(SUFFIXES)} files")
        read = _parquet_rows if path.suffix == ".parquet" else _json_rows
        return read(path)
    if path.is_dir():
        raise ValueError(f"{source} is a folder; name the prompt files in it")
    if path.suffix in SUFFIXES or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source):
        raise ValueError(f"{source}: no such file")
    return _hub_rows(source, split)


def _json_rows(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    with path.open("rb") as file:
        is_array = path.suffix == ".json" and file.read(512).lstrip()[:1] == b"["
        file.seek(0)
        if is_array:
            rows = _parse(file.read(), f"{path}")
            yield from (_checked((str(path), i), row) for i, row in enumerate(rows, 1))
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                place = (str(path), number)
                yield _checked(place, _parse(line, name_place(place)))


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from error


def _parquet_rows(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    number += 1
                    yield _checked((str(path), number), row)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error})") from error


def _hub_rows(name: str, split: str) -> Iterator[tuple[Place, dict[str, Any]]]:
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # the hub client raises a dozen kinds, its own and others'
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{name}: no such file, and it cannot be loaded from the hub as a data set with the "
            f"split {split!r}: {first_line}"
        ) from error
    for number, row in enumerate(rows, 1):
        yield _checked((name, number), row)


def _checked(place: Place, row: Any) -> tuple[Place, dict[str, Any]]:
    if not isinstance(row, dict):
        raise ValueError(f"{name_place(place)}: a row is an object, not {type(row).__name__}")
    return place, row


def name_place(place: Place) -> str:
    """How errors name a row."""
    return f"{place[0]}, row {place[1]}"
