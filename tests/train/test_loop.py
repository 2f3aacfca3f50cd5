"""The training loop: what it changes, what it divides by, what stops it."""

import copy
import math
from pathlib import Path

import pytest
import torch

from drafters.medusa import MedusaConfig, MedusaDrafter
from tests.tiny_models import VOCAB
from tests.train.conftest import documents
from train.loop import NonFiniteLoss, learning_rate
from train.medusa_objective import MedusaObjective
from train.order import StepOrder
from train.rows import collate_named


def test_heads_learn_and_the_target_stays_bitwise_the_same(new_run):
    run = new_run(steps=40, learning_rate=0.02, log_every=1)
    frozen = copy.deepcopy(run.target.model.state_dict())
    first = new_run(steps=1, run_folder=run.config.run_folder + "-first").train()
    result = run.train()
    assert result.figures["loss"] < 0.6 * first.figures["loss"]
    assert result.figures["head1_top1"] > first.figures["head1_top1"] + 0.2
    assert frozen.keys() == run.target.model.state_dict().keys()
    for name, tensor in run.target.model.state_dict().items():
        assert torch.equal(tensor, frozen[name]), name
    assert all(not p.requires_grad and p.grad is None for p in run.target.model.parameters())


def test_target_is_in_no_state_dict_and_in_no_optimizer(new_run):
    run = new_run()
    assert set(run.model.state_dict()) == {"drafter.w1", "drafter.b1", "drafter.w2"}
    nested = torch.nn.ModuleDict({"module": run.model}).state_dict()
    assert set(nested) == {"module.drafter.w1", "module.drafter.b1", "module.drafter.w2"}
    assert run.model.load_state_dict(run.model.state_dict()).missing_keys == []
    own = {id(parameter) for parameter in run.drafter.parameters()}
    assert {id(parameter) for parameter in run.model.trained_parameters()} == own
    run.model.train()
    assert not run.target.model.training and run.drafter.training


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_accumulation_trains_as_one_large_batch(new_run, micro_batch_size):
    """Rows of unequal length, fp64: only the order of additions differs."""
    whole = new_run(dtype=torch.float64, checkpoint_every=0)
    whole.train()
    parts = new_run(
        dtype=torch.float64, checkpoint_every=0, micro_batch_size=micro_batch_size,
        run_folder=whole.config.run_folder + "-parts",
    )  # fmt: skip
    parts.train()
    for name, tensor in whole.weights().items():
        distance = (tensor - parts.weights()[name]).norm() / tensor.norm()
        assert distance <= 1e-9, name


def test_one_step_is_the_gradient_of_the_summed_loss_over_the_steps_tokens(new_run):
    run = new_run(steps=1, micro_batch_size=1, max_grad_norm=0, dtype=torch.float64)
    config = MedusaConfig(num_heads=2, hidden_size=32, vocab_size=VOCAB)
    reference = MedusaDrafter.from_target(run.target, config)
    batch = collate_named([run.order._rows[i] for i in run.order.indices(0)])
    objective = MedusaObjective(2, 0.8)
    loss = objective.loss(run.target, reference, batch).loss_sum / objective.count(batch)
    loss.backward()
    torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.0).step()
    run.train()
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(run.weights()[name], tensor, rtol=1e-9, atol=1e-12)


def test_gradients_are_scaled_to_the_given_norm(new_run, monkeypatch):
    norms = []
    step = torch.optim.AdamW.step

    def watched(self, *args, **kwargs):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(float(torch.stack([g.norm() for g in grads]).norm()))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    result = new_run(steps=2, max_grad_norm=0.01).train()
    assert norms == pytest.approx([0.01, 0.01], rel=1e-3)
    assert result.figures["grad_norm"] > 0.02  # the log shows what it was before


def test_learning_rate_rises_then_falls_by_a_cosine():
    rates = [learning_rate(step, 100, 2.0, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == 2.0 and rates[55] == pytest.approx(1.0) and 0 < rates[99] < 0.01
    assert learning_rate(0, 1, 2.0, 0.0) == 2.0
    assert rates[30] == pytest.approx(1 + math.cos(math.pi * 20 / 90))


def test_learning_rate_does_not_depend_on_accumulation(new_run, monkeypatch):
    seen = {}
    for size in (1, 4):
        rates = seen.setdefault(size, [])
        step = torch.optim.AdamW.step

        def watched(self, *args, into=rates, plain=step, **kwargs):
            into.append(self.param_groups[0]["lr"])
            return plain(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", watched)
            new_run(
                micro_batch_size=size, warmup_ratio=0.5, checkpoint_every=0,
                run_folder=f"{new_run().config.run_folder}-{size}",
            ).train()  # fmt: skip
    assert seen[1] == seen[4] == [learning_rate(s, 6, 1e-3, 0.5) for s in range(6)]


def test_a_batch_without_supervision_is_skipped_but_a_whole_step_is_an_error(new_run):
    run = new_run(micro_batch_size=1, steps=3)
    for index in run.order.indices(1)[:3]:
        for doc in run.order._rows[index]:
            doc.loss_mask[:] = False
    run.train()
    assert all(torch.isfinite(tensor).all() for tensor in run.weights().values())
    for index in run.order.indices(1):
        for doc in run.order._rows[index]:
            doc.loss_mask[:] = False
    again = new_run(steps=3, run_folder=run.config.run_folder + "-again", micro_batch_size=1)
    again.order._rows = run.order._rows
    with pytest.raises(ValueError, match="step [123]: not one supervised token"):
        again.train()


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_a_non_finite_loss_names_step_head_and_rows_and_saves_nothing(new_run, micro_batch_size):
    run = new_run(micro_batch_size=micro_batch_size, checkpoint_every=2, keep_last=5)
    named = run.order._rows[run.order.indices(2)[1]]  # seen in step 3 for the first time
    objective_loss = MedusaObjective.loss

    def poisoned_loss(self, target, drafter, batch):
        """Head 2 overflows on the rows of `named`, wherever they stand."""
        loss = objective_loss(self, target, drafter, batch)
        if any(names == [doc.id for doc in named] for names in batch["row_ids"]):
            factor = torch.tensor([1.0, float("nan")])
            loss.sums["nats"] = loss.sums["nats"] * factor
            loss.loss_sum = loss.loss_sum * float("nan")
        return loss

    run.model.objective.__class__ = type("Poisoned", (MedusaObjective,), {"loss": poisoned_loss})
    with pytest.raises(NonFiniteLoss) as raised:
        run.train()
    message = str(raised.value)
    assert message.startswith("step 3: the loss is not finite: head 2 on rows ")
    assert f"rows {named[0].id}, {named[1].id}." in message
    saved = sorted(Path(run.config.run_folder).glob("checkpoints/*"))
    assert [path.name for path in saved] == ["step-00000002"]
    healthy = new_run(micro_batch_size=micro_batch_size)
    assert healthy.train().step == 6  # the checkpoint before is whole, and a run goes on from it
    assert all(torch.isfinite(tensor).all() for tensor in healthy.weights().values())


def test_a_non_finite_weight_stops_the_run(new_run):
    run = new_run()
    with torch.no_grad():
        run.drafter.w2[0, 5, 3] = float("inf")
    with pytest.raises(NonFiniteLoss, match="step 1: the loss is not finite: head 1 on rows row-"):
        run.train()
    assert not list(Path(run.config.run_folder).glob("checkpoints/step-*"))


def test_evaluation_comes_every_so_many_steps_and_at_the_end_and_is_logged(new_run, monkeypatch):
    logged = []
    monkeypatch.setattr("train.loop.Tracking.log", lambda self, v, step: logged.append((step, v)))
    calls = []

    def evaluate():
        calls.append(1)
        return {"tree_tau": 1.5}

    result = new_run(steps=7, eval_every=3, log_every=2).train(evaluate=evaluate)
    assert len(calls) == 3 and result.held_out == {"tree_tau": 1.5}
    held_out = [(step, v) for step, v in logged if "heldout/tree_tau" in v]
    assert held_out == [(step, {"heldout/tree_tau": 1.5}) for step in (3, 6, 7)]
    assert [step for step, v in logged if "train/loss" in v] == [2, 4, 6, 7]
    (last,) = [v for step, v in logged if step == 7 and "train/loss" in v]
    wanted = {"loss", "head1_top1", "head1_top5", "head2_top1", "learning_rate", "tokens_per_s"}
    assert {f"train/{name}" for name in wanted} <= last.keys()


def test_max_minutes_stops_saves_and_goes_on(new_run):
    run = new_run(max_minutes=1e-9, checkpoint_every=0)
    result = run.train()
    assert (result.step, result.stopped_by) == (1, "max_minutes")
    rest = new_run(checkpoint_every=0)
    assert rest.train().stopped_by == "steps"
    whole = new_run(checkpoint_every=0, run_folder=run.config.run_folder + "-whole")
    whole.train()
    for name, tensor in whole.weights().items():
        assert torch.equal(tensor, rest.weights()[name]), name


def test_a_finished_run_is_evaluated_again_but_not_trained(new_run):
    new_run().train()
    result = new_run().train(evaluate=lambda: {"tree_tau": 1.25})
    assert (result.step, result.held_out) == (6, {"tree_tau": 1.25})


def test_steps_follow_from_epochs(new_run):
    assert new_run(steps=0, epochs=1.5, checkpoint_every=0).train().total_steps == 5  # 18 rows / 4


def test_every_layout_of_a_global_batch_sees_the_same_rows():
    rows = [[doc] for doc in documents(10)]
    seen = {}
    for processes, micro in ((1, 8), (2, 4), (2, 2), (4, 1)):
        dealt = []
        for step in range(4):
            parts = [
                StepOrder(rows, collate_named, 8, micro, 3, process, processes).of_step(step)
                for process in range(processes)
            ]
            assert {len(part) for part in parts} == {8 // micro // processes}
            ids = [names[0] for part in parts for batch in part for names in batch["row_ids"]]
            dealt.append(sorted(ids))
        seen[processes, micro] = dealt
    assert all(dealt == seen[1, 8] for dealt in seen.values())


def test_every_epoch_takes_each_row_once_in_another_order():
    rows = [[doc] for doc in documents(12)]
    order = StepOrder(rows, collate_named, 4, 4, seed=1)
    epochs = [[i for step in range(3 * e, 3 * e + 3) for i in order.indices(step)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
    assert order.indices(0) == epochs[0][:4]  # looking back gives the same again
    other = StepOrder(rows, collate_named, 4, 4, seed=2)
    assert other.indices(0) != order.indices(0)


def test_an_epoch_that_ends_inside_a_step_goes_on_with_the_next():
    rows = [[doc] for doc in documents(3)]
    order = StepOrder(rows, collate_named, 8, 8, seed=0)
    stream = order.indices(0) + order.indices(1)
    for epoch in range(5):
        assert sorted(stream[3 * epoch : 3 * epoch + 3]) == [0, 1, 2]


def test_a_batch_that_cannot_be_dealt_out_is_refused():
    with pytest.raises(ValueError, match="8 is no multiple of micro_batch_size 2 × 3 processes"):
        StepOrder([1], collate_named, 8, 2, 0, num_processes=3)
    with pytest.raises(ValueError, match="not one row"):
        StepOrder([], collate_named, 8, 2, 0)
