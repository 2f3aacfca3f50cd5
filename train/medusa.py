"""Trains Medusa-1 heads on a target's own answers.

accelerate launch train/medusa.py --config configs/medusa/smollm2-demo.yaml
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device

from data_recipes.answered import Document
from data_recipes.batches import Batches
from drafters.checkpoint import refuse_foreign_folder, save_drafter
from drafters.medusa import MedusaConfig, MedusaDrafter
from drafters.target import Target
from inference.tree import TokenTree
from train.acceptance import (
    AnswerRanks,
    acceptance_figures,
    best_tree,
    rank_accuracy,
)
from train.config import LoopConfig, option, parse_config, run_script
from train.draft_vocab import DraftVocab, choose_draft_vocab, count_answer_tokens
from train.features import Features, KeptFeatures, document_features
from train.loop import TrainResult, make_accelerator, run_training
from train.medusa_objective import MedusaObjective, answer_ranks
from train.objective import TrainingModel
from train.order import StepOrder
from train.real_decode import compare_with_decoding
from train.rows import Rows, collate_named, read_rows


@dataclass(kw_only=True)
class MedusaTrainConfig(LoopConfig):
    """Medusa-1: see `LoopConfig` for what all methods share."""

    num_heads: int = option(3, "heads; head k guesses the token k after the next one")
    num_layers: int = option(1, "residual blocks of each head")
    head_type: Literal["own", "tied", "reduced"] = option(
        "own", "output matrix: the head's own, the target's, or over a reduced draft vocabulary"
    )
    draft_vocab_size: int = option(0, "tokens of the reduced draft vocabulary; 0: not reduced")
    head_decay: float = option(0.8, "the loss of head k weighs head_decay^k")
    keep_features: bool = option(
        False, "keep the target's features of all rows in memory, so that it runs once a row"
    )
    tree_nodes: int = option(7, "draft nodes of the tree written into the drafter")

    FREE = LoopConfig.FREE | {"tree_nodes"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.head_type == "reduced") != (self.draft_vocab_size != 0):
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size} and head_type is {self.head_type!r}; "
                "'reduced' needs a size, the others take 0"
            )
        if self.head_decay <= 0:
            raise ValueError(f"head_decay is {self.head_decay}; it must be > 0")
        if self.tree_nodes < 1:
            raise ValueError(f"tree_nodes is {self.tree_nodes}; it must be ≥ 1")


def main() -> None:
    # ---------------------------------------------------------------- settings
    config = parse_config(MedusaTrainConfig)
    refuse_foreign_folder(config.output)
    accelerator = make_accelerator(config)

    # ---------------------------------------------------------------- target and its answers
    dtype = None if config.dtype == "auto" else config.dtype
    target = Target.from_pretrained(config.target, dtype=dtype, device=accelerator.device)
    identity = target.identity
    rows = read_rows(config, identity)
    order = StepOrder(
        rows.packed, collate_named, config.batch_size, config.micro_batch_size, config.seed,
        accelerator.process_index, accelerator.num_processes,
    )  # fmt: skip

    # ---------------------------------------------------------------- drafter
    vocab = make_draft_vocab(config, rows, target)
    drafter = make_drafter(config, target, vocab)
    features = make_features(config, rows, target)
    objective = MedusaObjective(config.num_heads, config.head_decay, features)
    model = TrainingModel(target, drafter, objective)
    evaluation = Evaluation(accelerator, config, target, drafter, objective, rows.held_out)
    accelerator.print(
        f"{len(rows.documents)} answers in {len(rows.packed)} rows, {len(rows.held_out)} held out; "
        f"{sum(p.numel() for p in drafter.parameters()):,} parameters to train"
    )

    # ---------------------------------------------------------------- train
    settings = config.decisive() | {
        "method": "medusa", "target": identity["weights_hash"], "data": rows.data_hash,
    }  # fmt: skip
    result = run_training(accelerator, model, order, config, settings, evaluation.figures)
    if result.stopped_by == "max_minutes":
        accelerator.print(
            f"stopped by max_minutes at step {result.step} of {result.total_steps}; the same "
            "command goes on from there"
        )

    # ---------------------------------------------------------------- export
    if accelerator.is_main_process:
        drafter.config.tree = [list(path) for path in evaluation.tree] or None
        summary = training_summary(config, rows, result)
        extra = {"trained_with": settings}
        if vocab:
            extra["draft_vocab"] = {"made_from": vocab.made_from, "coverage": vocab.coverage}
        save_drafter(config.output, drafter, identity, summary, extra)
        for name, value in result.held_out.items():
            print(f"{name:28} {value:.3f}")
        print(f"drafter saved to {config.output}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def make_draft_vocab(config: MedusaTrainConfig, rows: Rows, target: Target) -> DraftVocab | None:
    """Chosen from the training answers of this run; never read from an earlier one."""
    if config.head_type != "reduced":
        return None
    counts = count_answer_tokens(
        ((torch.from_numpy(d.input_ids), torch.from_numpy(d.loss_mask)) for d in rows.documents),
        target.vocab_size,
    )
    return choose_draft_vocab(counts, config.draft_vocab_size, target.identity["tokenizer_hash"])


def make_drafter(
    config: MedusaTrainConfig, target: Target, vocab: DraftVocab | None
) -> MedusaDrafter:
    """Heads that start as the target's LM head; trained in fp32, or fp64 under an fp64 target."""
    drafter_config = MedusaConfig(
        num_heads=config.num_heads,
        num_layers=config.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        head_type=config.head_type,
        draft_vocab_size=config.draft_vocab_size or None,
    )
    dtype = torch.promote_types(target.dtype, torch.float32)
    return MedusaDrafter.from_target(target, drafter_config, vocab.ids if vocab else None, dtype)


def make_features(config: MedusaTrainConfig, rows: Rows, target: Target) -> Features:
    """The target is run on every batch, or once a row; the memory that takes is printed first."""
    if not config.keep_features:
        return document_features
    kept = KeptFeatures(target, sum(len(document) for document in rows.documents))
    print(f"keep_features: up to {kept.memory_bytes / 1e6:,.0f} MB of memory")
    return kept


class Evaluation:
    """Held-out figures: head accuracy, simulated acceptance, and a real decode.

    The tree is chosen on every second held-out answer and measured on the others.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: MedusaTrainConfig,
        target: Target,
        drafter: MedusaDrafter,
        objective: MedusaObjective,
        held_out: list[Document],
    ) -> None:
        self.accelerator, self.config = accelerator, config
        self.target, self.drafter, self.held_out = target, drafter, held_out
        self.chunk_size = objective.chunk_size(drafter)
        self.tree: list[tuple[int, ...]] = []

    def figures(self) -> dict[str, float]:
        """Called by all processes; each reads its share of the rows. Sets `tree`."""
        if not self.held_out:
            return {}
        answers = [ranks for batch in self._share() for ranks in self._ranks(batch)]
        answers = gather_object(answers)
        if len(answers) < 2:
            answers = answers * 2
        calibration, measured = AnswerRanks.join(answers[::2]), AnswerRanks.join(answers[1::2])
        accuracy_KR = rank_accuracy(calibration.ranks_NK)
        self.tree = best_tree(accuracy_KR, self.config.tree_nodes, calibration.ranks_NK)
        tree = TokenTree.from_paths(self.tree)
        figures = acceptance_figures(measured, tree)
        if self.config.decode_rows and self.accelerator.is_main_process:
            rows = self.held_out[: self.config.decode_rows]
            figures |= compare_with_decoding(
                self.target, self.drafter, tree, rows, self._ranks, self.config.decode_tokens
            )
        self.accelerator.wait_for_everyone()
        return figures

    def _share(self) -> Iterator[dict[str, torch.Tensor]]:
        config, process = self.config, self.accelerator
        batches = Batches(self.held_out, config.max_length, config.micro_batch_size, shuffle=False)
        for number, batch in enumerate(batches):
            if number % process.num_processes == process.process_index:
                yield batch

    def _ranks(self, batch: dict[str, Any]) -> list[torch.Tensor]:
        batch = send_to_device(batch, self.accelerator.device)
        return answer_ranks(self.target, self.drafter, batch, self.chunk_size)


def training_summary(config: MedusaTrainConfig, rows: Rows, result: TrainResult) -> dict[str, Any]:
    """What the model card tells about a run."""
    return {
        "steps": result.step,
        "stopped_by": result.stopped_by,
        "minutes": result.seconds / 60,
        "rows": len(rows.documents),
        "answer_tokens": int(sum(d.loss_mask.sum() for d in rows.documents)),
        "batch_size": config.batch_size,
        "learning_rate": config.learning_rate,
        "last_log": result.figures,
        "evaluation": result.held_out,
        "target_frozen": True,
    }


if __name__ == "__main__":
    run_script(main)
