"""What Medusa-1 trains: weighted cross-entropy of K heads at the supervised positions.

Letters: B rows, T tokens, N supervised positions, K heads, D hidden width, U a head's vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from data_recipes.batches import shifted_labels
from drafters.medusa import MedusaDrafter
from drafters.target import Target
from train.acceptance import MAX_RANK, NO_TOKEN
from train.features import Features, document_features
from train.objective import Batch, BatchLoss

IGNORED = -100
# Logits of all heads held at once: 128 MB in fp32, and a few times that within the loss.
LOGITS_PER_CHUNK = 2**25


def medusa_loss(
    logits_KNU: torch.Tensor, labels_KN: torch.Tensor, head_weights_K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted cross-entropy of the Medusa heads (arXiv 2401.10774, Medusa-1 loss).

    The loss of a global step is Σ_k λ_k · sum_k / count_0, where count_0 is the number of
    supervised *next* tokens: one scale for all heads, which the loop divides by.

    Args:
        logits_KNU: float [K, N, U], head k's logits at the N supervised positions.
        labels_KN: int64 [K, N], the head's index of x_{t+1+k}; -100 where that token is outside the
            mask, the document or the draft vocabulary.
        head_weights_K: float [K], λ_k.
    Returns:
        (loss_K, count): λ_k · nats summed over head k's labels, in fp32 at least; and how many
        labels there are; (0, 0) for none.
    Raises:
        ValueError: if shapes disagree.
    """
    if logits_KNU.shape[:2] != labels_KN.shape or len(head_weights_K) != len(labels_KN):
        raise ValueError(
            f"medusa_loss: logits {tuple(logits_KNU.shape)}, labels {tuple(labels_KN.shape)} and "
            f"{len(head_weights_K)} head weights do not belong together"
        )
    wide = logits_KNU.to(torch.promote_types(logits_KNU.dtype, torch.float32))
    nats_KN = F.cross_entropy(
        wide.flatten(0, 1), labels_KN.flatten(), ignore_index=IGNORED, reduction="none"
    ).view_as(labels_KN)
    return nats_KN.sum(1) * head_weights_K.to(nats_KN), (labels_KN != IGNORED).sum()


def true_ranks(logits_KNU: torch.Tensor, labels_KN: torch.Tensor) -> torch.Tensor:
    """int64 [K, N]: how many tokens a head likes better than the label; U for a label of -100."""
    at_label = logits_KNU.gather(2, labels_KN.clamp_min(0)[..., None])
    ranks_KN = (logits_KNU > at_label).sum(2)
    return ranks_KN.masked_fill(labels_KN == IGNORED, logits_KNU.shape[2])


class MedusaObjective:
    """Medusa-1: the target frozen and without gradient, the heads at supervised positions only.

    With a reduced draft vocabulary a label outside it teaches its head nothing, but its position
    still counts in the divisor: the scale of the loss does not depend on the vocabulary's size.

    Args:
        head_decay: λ_k = head_decay^k for head k = 1..K.
        features: how the target's features of a batch are had, e.g. `KeptFeatures`.
        logits_per_chunk: logits of all heads held at once; where there are more, they are computed
            again in the backward pass.
    """

    def __init__(
        self,
        num_heads: int,
        head_decay: float,
        features: Features = document_features,
        logits_per_chunk: int = LOGITS_PER_CHUNK,
    ) -> None:
        powers = torch.arange(1, num_heads + 1, dtype=torch.float64)
        self.head_weights_K = head_decay**powers
        self.features, self.logits_per_chunk = features, logits_per_chunk

    def count(self, batch: Batch) -> torch.Tensor:
        """count_0: supervised next tokens."""
        return (shifted_labels(batch, 1) != IGNORED).sum()

    def loss(self, target: Target, drafter: MedusaDrafter, batch: Batch) -> BatchLoss:
        with torch.no_grad():
            features_BTD = self.features(target, batch)
        labels_KBT = head_labels(batch, drafter.config.num_heads)
        used_BT = (labels_KBT != IGNORED).any(0)
        # With nothing supervised one ignored position is kept: the loss is 0 with a gradient of 0,
        # and all processes reduce the same tensors.
        used_BT[0, 0] |= ~used_BT.any()
        features_ND, labels_KN = features_BTD[used_BT], labels_KBT[:, used_BT]
        draft_labels_KN = drafter.to_draft_ids(labels_KN)

        size = self.chunk_size(drafter)
        chunks = list(zip(features_ND.split(size), draft_labels_KN.split(size, dim=1), strict=True))
        heads = []
        for features, labels in chunks:
            if len(chunks) == 1:
                heads.append(self._heads(target, drafter, features, labels))
            else:
                heads.append(
                    checkpoint(self._heads, target, drafter, features, labels, use_reentrant=False)
                )
        loss_K = torch.stack([loss for loss, _ in heads]).sum(0)
        top1_K, top5_K = torch.stack([hits for _, hits in heads]).sum(0)
        nats_K = loss_K.detach().double() / self.head_weights_K.to(loss_K.device)
        labels_K = (labels_KN != IGNORED).sum(1)
        sums = {"nats": nats_K, "top1": top1_K, "top5": top5_K, "labels": labels_K}
        return BatchLoss(loss_K.sum(), sums)

    def _heads(
        self,
        target: Target,
        drafter: MedusaDrafter,
        features_ND: torch.Tensor,
        labels_KN: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss [K], hits int64 [2, K] within the first 1 and 5 choices)."""
        logits_KNU = drafter.logits(features_ND, target)
        loss_K, _ = medusa_loss(logits_KNU, labels_KN, self.head_weights_K)
        with torch.no_grad():  # after the loss, so that a recomputation stops before it
            ranks_KN = true_ranks(logits_KNU, labels_KN)
            known_KN = labels_KN != IGNORED
            hits = [((ranks_KN < k) & known_KN).sum(1) for k in (1, 5)]
        return loss_K, torch.stack(hits)

    def chunk_size(self, drafter: MedusaDrafter) -> int:
        """Positions whose logits are held at once."""
        per_position = drafter.config.num_heads * drafter.draft_vocab_size
        return max(1, self.logits_per_chunk // per_position)

    def report(self, sums: dict[str, torch.Tensor], count: int) -> dict[str, float]:
        """The loss as trained, and each head's own cross-entropy (nats), top-1 and top-5 rates."""
        labels_K = sums["labels"].clamp_min(1)
        figures = {"loss": float(sums["nats"].cpu() @ self.head_weights_K) / count}
        for k in range(len(self.head_weights_K)):
            for name, key in (("loss", "nats"), ("top1", "top1"), ("top5", "top5")):
                figures[f"head{k + 1}_{name}"] = float(sums[key][k] / labels_K[k])
        return figures

    def blame(self, sums: dict[str, torch.Tensor]) -> str | None:
        bad = [f"head {k + 1}" for k, nats in enumerate(sums["nats"].tolist()) if nats - nats != 0]
        return ", ".join(bad) or None


def head_labels(batch: Batch, num_heads: int) -> torch.Tensor:
    """int64 [K, B, T]: x_{t+1+k} for head k = 1..K; -100 outside the mask or the document."""
    return torch.stack([shifted_labels(batch, k + 1) for k in range(1, num_heads + 1)])


@torch.no_grad()
def answer_ranks(
    target: Target, drafter: MedusaDrafter, batch: Batch, chunk_size: int
) -> list[torch.Tensor]:
    """int64 [M, K] on the CPU for each answer of M tokens: see `AnswerRanks.ranks_NK`."""
    roots_BT = shifted_labels(batch, 1) != IGNORED
    # A head's label counts only if everything before it belongs to the same answer.
    labels_KBT = head_labels(batch, drafter.config.num_heads)
    unbroken_KBT = (labels_KBT != IGNORED).cumprod(0).bool()
    labels_KN, exists_KN = labels_KBT[:, roots_BT], unbroken_KBT[:, roots_BT]
    features_ND = document_features(target, batch)[roots_BT]
    draft_labels_KN = drafter.to_draft_ids(labels_KN)
    chunks = zip(features_ND.split(chunk_size), draft_labels_KN.split(chunk_size, 1), strict=True)
    ranks_KN = torch.cat([true_ranks(drafter.logits(f, target), y) for f, y in chunks], dim=1)
    ranks_KN = ranks_KN.clamp_max(MAX_RANK).masked_fill(draft_labels_KN == IGNORED, MAX_RANK)
    ranks_NK = ranks_KN.masked_fill(~exists_KN, NO_TOKEN).T.cpu()
    # Two answers are never adjacent: the position before an answer's first token is no root of the
    # answer before, or that token would belong to it.
    row_N, column_N = (index.cpu() for index in roots_BT.nonzero(as_tuple=True))
    is_start_N = torch.ones(len(row_N), dtype=torch.bool)
    is_start_N[1:] = (column_N[1:] != column_N[:-1] + 1) | (row_N[1:] != row_N[:-1])
    bounds = [*is_start_N.nonzero()[:, 0].tolist(), len(row_N)]
    return [ranks_NK[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
