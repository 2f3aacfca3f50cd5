"""Reads a folder of answered rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_recipes.chat import ChatTemplate
from data_recipes.shards import (
    MANIFEST,
    read_manifest,
    read_shard,
    refuse_difference,
    shard_path,
)


@dataclass(frozen=True)
class Document:
    """An answered row in memory.

    Attributes:
        input_ids: int32 [T]. loss_mask: bool [T], True on tokens of the target's answers.
    """

    id: str
    task: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    finish_reasons: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.input_ids)

    def cut(self, length: int) -> Document:
        """The first `length` tokens."""
        if length >= len(self):
            return self
        return replace(self, input_ids=self.input_ids[:length], loss_mask=self.loss_mask[:length])


class AnsweredDataset:
    """The rows of a folder that `generate_answers` made.

    Args:
        folder: with manifest.json and shards.
        target_identity: refuse rows of another target; None takes any.
        template: proves every row's mask again against the chat template; None checks only that
            each row has a supervised token and begins with a prompt.
        allow_unfinished: take a folder whose run has not come to its end.
    Raises:
        ValueError: names the folder, file, field or row: not such a folder, unfinished, made by
            another target, or a row nothing is supervised in.
    """

    def __init__(
        self,
        folder: str | Path,
        target_identity: dict[str, Any] | None = None,
        template: ChatTemplate | None = None,
        allow_unfinished: bool = False,
    ) -> None:
        self.folder = Path(folder)
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise ValueError(f"{folder}: no {MANIFEST} there, so these are not answered prompts")
        self.manifest = manifest
        shards = manifest["shards"]
        if shards["finished"] < shards["total"] and not allow_unfinished:
            raise ValueError(
                f"{folder}: {shards['finished']} of {shards['total']} shards are finished; run "
                "scripts/generate_data.py again with the same settings to go on"
            )
        if target_identity is not None:
            made_by = manifest["made_with"]["target"]
            refuse_difference(self.folder, made_by, target_identity, "target.")
        self.template_name = (
            f"chat template {manifest['made_with']['target']['template_hash']} of "
            f"{manifest['made_with']['target']['name']}"
        )
        self.documents: list[Document] = []
        for index in range(shards["total"]):
            path = shard_path(self.folder, index)
            if path.exists():
                self.documents += [self._document(row, template) for row in read_shard(path)[0]]
            elif not allow_unfinished:
                raise ValueError(f"{path}: the manifest counts this shard, but it is not there")

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Document:
        return self.documents[index]

    def __iter__(self) -> Iterator[Document]:
        return iter(self.documents)

    def _document(self, row: dict[str, Any], template: ChatTemplate | None) -> Document:
        input_ids = np.array(row["input_ids"], dtype=np.int32)
        loss_mask = np.array(row["loss_mask"], dtype=bool)
        where = f"{self.folder}, row {row['id']} ({self.template_name})"
        if len(input_ids) != len(loss_mask):
            raise ValueError(f"{where}: {len(input_ids)} tokens, {len(loss_mask)} mask values")
        if not loss_mask.any():
            raise ValueError(f"{where}: no token is supervised")
        if loss_mask[0]:
            raise ValueError(f"{where}: the first token of the prompt is supervised")
        if template is not None:
            template.prove(row["input_ids"], row["loss_mask"], row["id"])
        return Document(row["id"], row["task"], input_ids, loss_mask, tuple(row["finish_reasons"]))
