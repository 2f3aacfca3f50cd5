"""Fixtures of the exactness tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.exactness.cases import POLICIES
from tests.exactness.recorder import Recorder
from tests.exactness.toy_drafters import DRAFTERS


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tensors here are small; threads that wait for each other cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def recorder() -> Iterator[Recorder]:
    """Writes the results when the run has computed all of them; a part of the tests writes none."""
    recorder = Recorder()
    yield recorder
    laws = ("greedy", "rejection", "block", "coupled", "typical")
    expected = {(law, name, policy) for law in laws for name in DRAFTERS for policy in POLICIES}
    if recorder.entries.keys() == expected:
        recorder.write()
