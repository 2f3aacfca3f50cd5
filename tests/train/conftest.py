"""Tiny answered rows and a tiny Medusa run, built in memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from data_recipes.answered import Document
from drafters.medusa import MedusaConfig, MedusaDrafter
from drafters.target import Target
from tests.tiny_models import VOCAB, tiny_target
from train.config import LoopConfig
from train.loop import TrainResult, make_accelerator, run_training
from train.medusa_objective import MedusaObjective
from train.objective import TrainingModel
from train.order import StepOrder
from train.rows import collate_named


def document(name: str, prompt: int, answer: int, seed: int = 0) -> Document:
    """`prompt` tokens, then `answer` supervised ones that count upwards: easy to learn."""
    generator = np.random.default_rng(seed)
    start = int(generator.integers(3, VOCAB))
    body = (np.arange(answer) + start) % (VOCAB - 3) + 3
    ids = np.concatenate([generator.integers(3, VOCAB, prompt), body]).astype(np.int32)
    return Document(name, "test", ids, np.arange(prompt + answer) >= prompt)


def documents(count: int, seed: int = 0) -> list[Document]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, 12, (count, 2))
    return [document(f"row-{i}", int(a), int(b), seed + i) for i, (a, b) in enumerate(lengths)]


@dataclass
class Run:
    """A training run on a tiny target, and what it left behind."""

    config: LoopConfig
    accelerator: Accelerator
    model: TrainingModel
    order: StepOrder

    @property
    def target(self) -> Target:
        return self.model.target

    @property
    def drafter(self) -> MedusaDrafter:
        return self.model.drafter

    def train(self, **kwargs: Any) -> TrainResult:
        settings = self.config.decisive()
        return run_training(
            self.accelerator, self.model, self.order, self.config, settings, **kwargs
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.drafter.state_dict().items()}


def make_run(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Run:
    """Two heads, 12 packed rows of two documents, 4 rows a step."""
    settings = {"data": "-", "output": str(folder / "drafter"), "steps": 6, "batch_size": 4}
    settings |= {"micro_batch_size": 4, "warmup_ratio": 0.0, "log_every": 2, "checkpoint_every": 2}
    config = LoopConfig(**(settings | changes))
    target = tiny_target("llama", dtype)
    drafter = MedusaDrafter.from_target(
        target, MedusaConfig(num_heads=2, hidden_size=32, vocab_size=VOCAB)
    )
    model = TrainingModel(target, drafter, MedusaObjective(2, 0.8))
    flat = documents(24)
    rows = [flat[i : i + 2] for i in range(0, 24, 2)]
    order = StepOrder(rows, collate_named, config.batch_size, config.micro_batch_size, config.seed)
    return Run(config, make_accelerator(config), model, order)


@pytest.fixture
def new_run(tmp_path):
    """Makes runs that all share one run folder, as sittings of one training do."""
    return lambda **changes: make_run(tmp_path, **changes)
