"""Answered rows → batches: packing, labels and attention that never cross a document.

Letters: B rows of a batch, T tokens. A *document* is an answered row; a row of a batch holds one of
them, or several one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from data_recipes.answered import AnsweredDataset, Document

Batch = dict[str, torch.Tensor]
IGNORED_LABEL = -100
PADDING_DOCUMENT = -1
# Rows that first-fit looks back at. Measured on 5,000 answers of 50-700 tokens in rows of 1024:
# fill .943 at 8, .971 at 64, .976 at 512 (and four times the time).
OPEN_ROWS = 64


class Batches:
    """Batches of a data set, its documents packed once.

    Training takes `rows` in an order of its own (train/order.py); evaluation goes through the
    batches as they are.

    Args:
        max_length: longest row in tokens. Longer documents are cut there; how many, and how many
            lost their last supervised token and are left out, is in `cut` and `left_out`.
        batch_size: rows of a batch; the last batch of an epoch may have fewer.
        packed: False puts one document in each row.
        shuffle: mix the documents before packing, by `seed`; False keeps the data set's order.
    Raises:
        ValueError: if no document is left, or an argument is below 1.
    """

    def __init__(
        self,
        dataset: AnsweredDataset | Sequence[Document],
        max_length: int,
        batch_size: int,
        seed: int = 0,
        packed: bool = True,
        shuffle: bool = True,
    ) -> None:
        for name, value in (("max_length", max_length), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name} = {value}: must be 1 or more")
        self.max_length, self.batch_size = max_length, batch_size
        documents = [document.cut(max_length) for document in dataset]
        self.cut = sum(len(a) < len(b) for a, b in zip(documents, dataset, strict=True))
        # The first token of a document is predicted by none, so it cannot be what is supervised.
        self.documents = [d for d in documents if d.loss_mask[1:].any()]
        self.left_out = len(documents) - len(self.documents)
        if not self.documents:
            raise ValueError(
                f"no document has a supervised token within max_length = {max_length}; "
                f"{self.left_out} were left out"
            )
        order = list(range(len(self.documents)))
        if shuffle:
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(order), generator=generator).tolist()
        lengths = [len(self.documents[i]) for i in order]
        packing = first_fit(lengths, max_length) if packed else [[i] for i in range(len(order))]
        self.rows = [[order[i] for i in row] for row in packing]

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    @property
    def fill(self) -> float:
        """Share of the packed rows' tokens, at max_length each, that are not padding."""
        tokens = sum(len(document) for document in self.documents)
        return tokens / (len(self.rows) * self.max_length)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.rows), self.batch_size):
            chosen = self.rows[start : start + self.batch_size]
            yield collate([[self.documents[i] for i in row] for row in chosen])


def first_fit(
    lengths: Sequence[int], max_length: int, open_rows: int = OPEN_ROWS
) -> list[list[int]]:
    """Packs items into rows: each goes into the oldest of the last `open_rows` rows it fits into.

    Args:
        lengths: tokens of each item; none above max_length.
    Returns:
        Indices of the items of each row; every index once.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for item, length in enumerate(lengths):
        if length > max_length:
            raise ValueError(f"item {item} has {length} tokens, a row has {max_length}")
        first = max(0, len(rows) - open_rows)
        row = next((r for r in range(first, len(rows)) if room[r] >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(max_length)
        rows[row].append(item)
        room[row] -= length
    return rows


def collate(rows: Sequence[Sequence[Document]], length: int | None = None) -> Batch:
    """A batch of rows, padded on the right.

    Nothing depends on a padding token: what is padding is said by document_ids, and an end token is
    attended to and supervised whatever its id.

    Args:
        rows: the documents of each row.
        length: tokens of a row; None is the longest row's.
    Returns:
        input_ids, position_ids (from 0 in each document), document_ids (0, 1, … in each row, -1 on
        padding): int64 [B, T]; loss_mask: bool [B, T].
    """
    longest = max(sum(len(document) for document in row) for row in rows)
    shape = (len(rows), longest if length is None else length)
    if shape[1] < longest:
        raise ValueError(f"length = {length}: a row has {longest} tokens")
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "position_ids": torch.zeros(shape, dtype=torch.int64),
        "document_ids": torch.full(shape, PADDING_DOCUMENT, dtype=torch.int64),
        "loss_mask": torch.zeros(shape, dtype=torch.bool),
    }
    for b, row in enumerate(rows):
        start = 0
        for number, document in enumerate(row):
            here = (b, slice(start, start + len(document)))
            batch["input_ids"][here] = torch.from_numpy(document.input_ids).long()
            batch["position_ids"][here] = torch.arange(len(document))
            batch["document_ids"][here] = number
            batch["loss_mask"][here] = torch.from_numpy(document.loss_mask)
            start += len(document)
    return batch


def shifted_labels(batch: Batch, offset: int) -> torch.Tensor:
    """Labels of a predictor that reads position t and predicts token x_{t+offset}.

    Offset 1 is the next token; Medusa's head k has offset k + 1.

    Args:
        batch: of `collate`.
        offset: 1 or more.
    Returns:
        int64 [B, T]: x_{t+offset} where it lies in t's document and in the loss mask, else -100.
    """
    if offset < 1:
        raise ValueError(f"offset = {offset}: must be 1 or more")
    input_ids, documents = batch["input_ids"], batch["document_ids"]
    labels = torch.full_like(input_ids, IGNORED_LABEL)
    if offset >= input_ids.shape[1]:
        return labels
    ahead = slice(offset, None)
    here = slice(None, -offset)
    supervised = (
        batch["loss_mask"][:, ahead]
        & (documents[:, ahead] == documents[:, here])
        & (documents[:, here] != PADDING_DOCUMENT)
    )
    labels[:, here] = torch.where(supervised, input_ids[:, ahead], IGNORED_LABEL)
    return labels


def document_causal_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Which tokens a token attends to: itself and those before it in its own document.

    Args:
        document_ids: int64 [B, T]; padding (-1) attends to padding only, never to nothing.
    Returns:
        bool [B, 1, T, T], True where query (third axis) sees key (last axis).
    """
    length = document_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return ((document_ids[:, :, None] == document_ids[:, None, :]) & causal)[:, None]
