"""The rows of a training run: read, split into training and held-out, packed."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from data_recipes.answered import AnsweredDataset, Document
from data_recipes.batches import Batches, collate
from train.config import LoopConfig


@dataclass
class Rows:
    """What a run trains and evaluates on.

    Attributes:
        documents: answered rows to train on; `packed` are the same, several to a row.
        held_out: answered rows that training never sees.
        data_hash: of the training documents in their order.
    """

    documents: list[Document]
    packed: list[list[Document]]
    held_out: list[Document]
    data_hash: str


def read_rows(config: LoopConfig, target_identity: dict[str, Any]) -> Rows:
    """Reads `config.data`, and `config.eval_data` or a part of the former as held-out rows.

    Raises:
        ValueError: a folder that is none, was made by another target, or leaves no row to train on.
    """
    documents = list(AnsweredDataset(config.data, target_identity))
    if config.eval_data:
        held_out = list(AnsweredDataset(config.eval_data, target_identity))
    else:
        documents, held_out = split_held_out(documents, config.heldout_rows, config.seed)
    batches = Batches(documents, config.max_length, batch_size=1, seed=config.seed)
    if batches.cut:
        warnings.warn(
            f"{batches.cut} of {len(documents)} training rows are longer than max_length "
            f"{config.max_length} and cut there; {batches.left_out} of them lose their whole "
            "answer and are left out",
            stacklevel=2,
        )
    packed = [[batches.documents[i] for i in row] for row in batches.rows]
    return Rows(batches.documents, packed, held_out, hash_documents(batches.documents))


def split_held_out(
    documents: list[Document], count: int, seed: int
) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents; the parts of one conversation stay on one side.

    Args:
        count: held-out documents, at least; the last conversation may bring a few more.
    Raises:
        ValueError: if nothing would be left to train on.
    """
    conversations: dict[str, list[Document]] = {}
    for document in documents:
        conversations.setdefault(document.id.split("#")[0], []).append(document)
    names = list(conversations)
    generator = torch.Generator().manual_seed(seed)
    held_out: list[Document] = []
    chosen: set[str] = set()
    for i in torch.randperm(len(names), generator=generator).tolist():
        if len(held_out) >= count:
            break
        held_out += conversations[names[i]]
        chosen.add(names[i])
    training = [d for name in names if name not in chosen for d in conversations[name]]
    if not training:
        raise ValueError(
            f"heldout_rows is {count}, but there are only {len(documents)} rows: nothing is left "
            "to train on"
        )
    return training, held_out


def collate_named(rows: list[list[Document]]) -> dict[str, Any]:
    """A batch of packed rows that also carries `row_ids`: the documents' ids, row by row."""
    return collate(rows) | {"row_ids": [[document.id for document in row] for row in rows]}


def hash_documents(documents: list[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.id.encode() + document.input_ids.tobytes())
        digest.update(document.loss_mask.tobytes())
    return digest.hexdigest()[:16]
