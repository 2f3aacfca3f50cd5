"""The one visible training loop: accumulate, normalise, clip, log, evaluate, checkpoint.

A method plugs in an `Objective`; launchers (one process, DDP) plug in through Accelerate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, send_to_device, set_seed
from torch import nn
from tqdm import tqdm

from train.config import LoopConfig
from train.objective import Batch, BatchLoss, Objective, TrainingModel
from train.order import StepOrder
from train.resume import RunState, has_checkpoints, load_newest, save_checkpoint
from train.tracking import Tracking


class NonFiniteLoss(ArithmeticError):
    """The loss or its gradient became NaN or infinite; the message names step, rows and part."""


@dataclass
class TrainResult:
    """How a run ended.

    Attributes:
        stopped_by: "steps" (all done) or "max_minutes".
        seconds: training time over all sittings, evaluations included.
        figures: of the last log of the training loss.
        held_out: what `evaluate` gave after the last step.
    """

    step: int
    total_steps: int
    stopped_by: str
    seconds: float
    run_id: str
    figures: dict[str, float]
    held_out: dict[str, float]


def make_accelerator(config: LoopConfig) -> Accelerator:
    """Accelerate as the launcher set it up: device, processes and precision are none of ours."""
    folder = Path(config.run_folder)
    set_seed(config.seed)
    return Accelerator(
        log_with=None if config.tracker == "none" else config.tracker,
        project_config=ProjectConfiguration(str(folder), logging_dir=str(folder / "tracking")),
    )


def run_training(
    accelerator: Accelerator,
    model: TrainingModel,
    order: StepOrder,
    config: LoopConfig,
    settings: dict[str, Any],
    evaluate: Callable[[], dict[str, float]] | None = None,
) -> TrainResult:
    """Trains `model.drafter` in place, from the newest checkpoint of the run if there is one.

    The loss of a global step is the sum over all its micro-batches and processes divided by all its
    supervised labels, which are counted before the first backward: the same rows train the same
    however they are laid out.

    Args:
        order: which rows each step, process and micro-batch sees; its batches carry `row_ids`, the
            names of each row's documents.
        settings: what decides the weights; a checkpoint made with others is refused.
        evaluate: figures of the held-out rows; called every `config.eval_every` steps, and at the
            end in any case.
    Raises:
        NonFiniteLoss: before the weights are touched and before anything is saved.
        ValueError: a global step without a supervised label; a checkpoint of another run.
    """
    plain, objective = model, model.objective
    trained = model.trained_parameters()
    optimizer = torch.optim.AdamW(
        trained,
        lr=config.learning_rate,
        betas=(0.9, config.adam_beta2),
        weight_decay=config.weight_decay,
    )
    accelerator.gradient_accumulation_steps = order.accumulation
    model, optimizer = accelerator.prepare(model, optimizer)

    checkpoints = Path(config.run_folder) / "checkpoints"
    state = _start_or_resume(accelerator, model, optimizer, config, settings, checkpoints)
    tracking = Tracking(
        accelerator, config.tracker, Path(config.run_folder) / "tracking", config.project,
        settings=vars(config), run_id=state.run_id or None,
    )  # fmt: skip
    state.run_id = tracking.run_id
    total = config.steps or max(1, math.ceil(config.epochs * order.num_rows / config.batch_size))
    bar = tqdm(
        total=total, initial=state.step, desc="training", unit="step",
        disable=not accelerator.is_main_process,
    )  # fmt: skip

    window = LogWindow(accelerator)
    started, seconds_before = time.monotonic(), state.seconds
    stopped_by = "steps"
    held_out: dict[str, float] = {}
    while state.step < total and stopped_by == "steps":
        model.train()
        step_started = time.monotonic()
        micro_batches = [send_to_device(b, accelerator.device) for b in order.of_step(state.step)]
        sizes = torch.stack([_sizes(objective, batch) for batch in micro_batches]).sum(0)
        count, tokens = accelerator.reduce(sizes).tolist()
        if count == 0:
            raise ValueError(f"step {state.step + 1}: not one supervised token in the whole step")
        rate = learning_rate(state.step, total, config.learning_rate, config.warmup_ratio)
        for group in optimizer.param_groups:
            group["lr"] = rate  # set, not stepped: no launcher can step it more than once

        losses = []
        for batch in micro_batches:
            with accelerator.accumulate(model):
                losses.append(model(batch))
                # Accelerate divides by the accumulation steps, and DDP averages over processes.
                scale = order.accumulation * accelerator.num_processes / count
                accelerator.backward(losses[-1].loss_sum * scale)
                if accelerator.sync_gradients:
                    limit = config.max_grad_norm or math.inf
                    norm = accelerator.clip_grad_norm_(trained, limit)
                    _stop_if_not_finite(accelerator, plain, losses, norm, state.step, micro_batches)
                optimizer.step()
                optimizer.zero_grad()
        window.add(losses, count, tokens, time.monotonic() - step_started)
        state.step += 1
        state.seconds = seconds_before + time.monotonic() - started
        bar.update()

        if state.step % config.log_every == 0 or state.step == total:
            figures = window.close(objective) | {"learning_rate": rate, "grad_norm": float(norm)}
            state.figures = figures
            bar.set_postfix({k: f"{figures[k]:.3g}" for k in ("loss", "tokens_per_s")})
            tracking.log({f"train/{k}": v for k, v in figures.items()}, state.step)
        if _out_of_time(accelerator, config.max_minutes, started) and state.step < total:
            stopped_by = "max_minutes"
        last = state.step == total or stopped_by != "steps"
        if _due(state.step, config.checkpoint_every) or last:
            save_checkpoint(checkpoints, accelerator, model, optimizer, state, config.keep_last)
        if evaluate and (_due(state.step, config.eval_every) or last):
            held_out = evaluate()
            tracking.log({f"heldout/{k}": v for k, v in held_out.items()}, state.step)

    if evaluate and not held_out:  # all steps were done in an earlier sitting
        held_out = evaluate()
    bar.close()
    tracking.finish()
    return TrainResult(
        state.step, total, stopped_by, state.seconds, state.run_id, state.figures, held_out
    )


def learning_rate(step: int, total: int, peak: float, warmup_ratio: float) -> float:
    """Linear rise over the first share of the steps, then half a cosine towards 0.

    A function of the global step alone: the same for any number of processes, and nothing to save.
    """
    warmup = math.ceil(total * warmup_ratio)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


class LogWindow:
    """Adds up the figures of the steps between two logs."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._reset()

    def _reset(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._count = self._tokens = 0
        self._seconds = 0.0  # of the steps alone: no evaluation, no saving

    def add(self, losses: Sequence[BatchLoss], count: int, tokens: int, seconds: float) -> None:
        self._count += count
        self._tokens += tokens
        self._seconds += seconds
        for loss in losses:
            for name, value in loss.sums.items():
                self._sums[name] = self._sums[name] + value if name in self._sums else value

    def close(self, objective: Objective) -> dict[str, float]:
        sums = {name: self._accelerator.reduce(value) for name, value in self._sums.items()}
        figures = objective.report(sums, self._count)
        figures["tokens_per_s"] = self._tokens / max(self._seconds, 1e-9)
        self._reset()
        return figures


def _start_or_resume(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: LoopConfig,
    settings: dict[str, Any],
    checkpoints: Path,
) -> RunState:
    if config.resume == "none" and has_checkpoints(checkpoints):
        raise ValueError(
            f"resume is 'none', but {checkpoints} holds checkpoints of an earlier run; "
            "set resume to 'auto', or choose another run_folder"
        )
    state = load_newest(checkpoints, accelerator, model, optimizer, settings)
    if state is None:
        return RunState(0, "", settings, 0.0, accelerator.num_processes, {})
    accelerator.print(f"going on from step {state.step} of {checkpoints}")
    return state


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _sizes(objective: Objective, batch: Batch) -> torch.Tensor:
    """int64 [2]: labels to divide by, and tokens that are not padding."""
    return torch.stack([objective.count(batch), (batch["document_ids"] >= 0).sum()])


def _stop_if_not_finite(
    accelerator: Accelerator,
    model: TrainingModel,
    losses: Sequence[BatchLoss],
    grad_norm: torch.Tensor,
    step: int,
    micro_batches: Sequence[Batch],
) -> None:
    total = accelerator.reduce(torch.stack([loss.loss_sum.detach() for loss in losses]).sum())
    # A loss scaler (fp16) meets infinite gradients as a matter of course and skips such steps.
    gradient_counts = accelerator.scaler is None
    if torch.isfinite(total) and (torch.isfinite(grad_norm) or not gradient_counts):
        return
    what = "loss" if not torch.isfinite(total) else "gradient"
    blamed = [found for batch in micro_batches for found in _blame(model, batch)]
    where = "; ".join(blamed) or "no single row to blame in this process"
    raise NonFiniteLoss(
        f"step {step + 1}: the {what} is not finite: {where}. Nothing of this step was applied or "
        "saved; look at these rows, lower learning_rate, or use dtype bfloat16 or float32"
    )


@torch.no_grad()
def _blame(model: TrainingModel, batch: Batch) -> list[str]:
    """Runs a micro-batch again, row by row, and says which rows and parts are not finite."""
    found = []
    for row, names in enumerate(batch["row_ids"]):
        alone = {key: value[row : row + 1] for key, value in batch.items()}
        sums = model.objective.loss(model.target, model.drafter, alone).sums
        if part := model.objective.blame(sums):
            found.append(f"{part} on rows {', '.join(names)}")
    return found


def _out_of_time(accelerator: Accelerator, max_minutes: float, started: float) -> bool:
    """Whether the first process to notice says so: all must stop at the same step."""
    if not max_minutes:
        return False
    late = time.monotonic() - started > max_minutes * 60
    return bool(accelerator.reduce(torch.tensor(int(late), device=accelerator.device)).item())
