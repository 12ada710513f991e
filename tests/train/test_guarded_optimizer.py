"""The parts of a loop of one's own: steps as a plain torch loop makes them, skipped on all ranks together, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from unisono import GuardedOptimizer, LoopCheckpoints, LossScaler, StepGuard, autocast
from unisono.checkpoint import CheckpointOptions
from unisono.dist import World, job_from_environ, join_world
from unisono.errors import CheckpointError, ConfigError, PlanError
from unisono.kvstore import create_kvstore
from unisono.optim import global_norm, make_skippable

CPU = torch.device("cpu")


def alone() -> World:
    return join_world(job_from_environ({}), device_type="cpu", timeout_s=10)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def rows_of(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def losses(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows[:, :3])[:, 0] - rows[:, 3]).square()


def made(model: nn.Module, world: World, **options: Any) -> GuardedOptimizer:
    return GuardedOptimizer(model, torch.optim.Adam(model.parameters(), lr=0.05), world, **options)


def leaves(state: Any) -> list[Any]:
    """Copies of the leaves of a state."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple):
        return [leaf for value in state for leaf in leaves(value)]
    return [state.clone() if isinstance(state, Tensor) else state]


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def plain_loop(steps: int, clip_norm: float) -> list[tuple[float, float]]:
    """(loss, norm) of each step of torch alone."""
    model, seen = net(), []
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(steps):
        loss = losses(model, rows_of(step)).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm or 1e9)
        adam.step()
        adam.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def our_loop(world: World, steps: int, **options: Any) -> list[tuple[float, float]]:
    """The same in micro-batches of two, the ranks sharing unevenly; each rank begins with other weights."""
    model, seen = net(), []
    if world.rank:
        nn.init.zeros_(model[0].weight)
    update = made(model, world, **options)
    cut = 8 if world.world_size == 1 else 6
    for step in range(steps):
        rows = rows_of(step)[:cut] if world.rank == 0 else rows_of(step)[cut:]
        parts = rows.split(2)
        for part in parts:
            values = losses(model, part)
            update.backward(values.sum(), len(values), last=part is parts[-1] and step % 2 == 0)
        done = update.step()
        assert not done.skipped
        seen.append((done.loss, done.grad_norm))
    update.close()
    return seen


@pytest.mark.parametrize("clip_norm", [0.0, 0.3])
def test_steps_are_those_of_a_plain_loop(clip_norm: float) -> None:
    expected = torch.tensor(plain_loop(5, clip_norm))
    torch.testing.assert_close(torch.tensor(our_loop(alone(), 5, clip_norm=clip_norm)), expected)


def scaled(world: World) -> list[tuple[float, float]]:
    scaler = LossScaler(CPU, init_scale=1024.0, growth_interval=2)
    return our_loop(world, 5, clip_norm=0.3, scaler=scaler, expected_weight=8.0)


def test_neither_ranks_nor_a_loss_scale_change_them(pool: Pool) -> None:
    first, second = pool.run(scaled, ranks=2)
    assert first == second
    torch.testing.assert_close(torch.tensor(first), torch.tensor(plain_loop(5, 0.3)))


def by_hand(world: World) -> list[tuple[float, bool]]:
    """(loss, whether the step counted) of a loop that puts the parts together itself, in fp16; step 2 overflows on rank 0."""
    model, seen = net(), []
    parameters = dict(model.named_parameters())
    optimizer = make_skippable(torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.9))
    sync = create_kvstore("dist_sync", world).gradients(parameters)
    scaler, guard = LossScaler(CPU, init_scale=256.0), StepGuard(CPU)
    for step in range(6):
        rows = rows_of(step).chunk(world.world_size)[world.rank]
        with autocast("fp16", "cpu"):
            loss = losses(model, rows).float().sum() / 8
        sync.prepare_last_backward()
        scaler.scale(loss * (1e6 if step == 2 and world.rank == 0 else 1)).backward()
        totals = loss.detach().reshape(1).clone()
        sync.wait(totals)
        norm = global_norm(sync.gradients()) / scaler.value
        good = guard.accept(totals[0], norm)
        optimizer.grad_scale, optimizer.found_inf = scaler.value, (~good).float()
        optimizer.step()
        scaler.update(~norm.isfinite())
        sync.zero_grad()
        seen.append((float(totals[0]), bool(good)))
    sync.close()
    return [*seen, (float(scaler.value), True)]


def test_parts_by_hand() -> None:
    *steps, (scale, _) = by_hand(alone())
    assert [good for _, good in steps] == [True, True, False, True, True, True]
    assert scale == 128


@pytest.mark.full
def test_parts_by_hand_on_two_ranks(pool: Pool) -> None:
    first, second = pool.run(by_hand, ranks=2)
    assert first == second
    assert [good for _, good in first] == [good for _, good in by_hand(alone())]
    torch.testing.assert_close(torch.tensor(first), torch.tensor(by_hand(alone())), rtol=2e-3, atol=0)


def overflowed(world: World) -> tuple[bool, bool, float, int]:
    """Rank 1's gradients overflow: whether the step was skipped, whether nothing changed, the scale, and skipped steps."""
    model, scaler = net(), LossScaler(CPU, init_scale=1024.0)
    update = made(model, world, scaler=scaler)
    update.backward(losses(model, rows_of(world.rank)).sum(), 8)
    update.step()
    before = leaves([update.state_dict()["model"], update.state_dict()["optimizer"]])
    loss = losses(model, rows_of(2)).sum()
    if world.rank == world.world_size - 1:
        loss = loss + (model[0].bias.sum() - model[0].bias.sum().detach()) * 3e38  # a finite loss
    update.backward(loss, 8)
    done = update.step()
    unchanged = same(before, leaves([update.state_dict()["model"], update.state_dict()["optimizer"]]))
    update.close()
    return done.skipped, unchanged, float(scaler.value), int(update.guard.skipped)


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    assert overflowed(alone()) == (True, True, 512.0, 1)


@pytest.mark.full
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: Pool) -> None:
    assert pool.run(overflowed, ranks=2) == [(True, True, 512.0, 1)] * 2


def test_a_backward_pass_through_another_model_leaves_it_alone() -> None:
    judge, maker = nn.Linear(2, 1), nn.Linear(2, 2)
    world = alone()
    updates = [made(model, world) for model in (judge, maker)]
    before = leaves(judge.state_dict())
    updates[1].backward(judge(maker(torch.ones(4, 2))).sum(), 4)
    assert all(parameter.grad is None for parameter in judge.parameters())
    assert updates[1].step().grad_norm > 0
    assert same(before, leaves(judge.state_dict()))


def buffers_of(world: World) -> list[float]:
    model = nn.BatchNorm1d(2)
    update = made(model, world)
    update.backward(model(torch.arange(8.0).view(4, 2) + world.rank).sum(), 4)
    update.step()
    update.close()
    return [*model.running_mean.tolist(), *model.running_var.tolist()]


def of_shards(world: World) -> str:
    layer = nn.Linear(4, 2)
    mesh = init_device_mesh("cpu", (world.world_size,))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ConfigError) as error:
        made(layer, world)
    return str(error.value)


@pytest.mark.full
def test_a_sharded_model_is_refused(pool: Pool) -> None:
    assert set(pool.run(of_shards, ranks=2)) == {
        "parameter 'weight', which is a DTensor\n"
        "  rule: a guarded optimizer sums gradients of whole parameters over all ranks\n"
        "  so:   the gradients of shards would be summed twice or not at all\n"
        "  try:  a Trainer with plan.dp_shard or plan.tp, or a model that is not sharded"
    }


@pytest.mark.full
def test_buffers_are_those_of_rank_0(pool: Pool) -> None:
    first, second = pool.run(buffers_of, ranks=2)
    assert first == second == buffers_of(alone())


def test_autocast() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    seen = {}
    for precision in ("fp32", "bf16", "fp16"):
        with autocast(precision, "cpu"):
            seen[precision] = layer(x).dtype
    assert seen == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    with pytest.raises(PlanError) as error:
        autocast("bfloat16", "cpu")
    assert str(error.value) == (
        "precision 'bfloat16'\n"
        "  rule: a forward pass computes in fp32, bf16, fp16, fp8\n"
        "  so:   nothing was computed\n"
        "  try:  did you mean 'bf16'?"
    )


def test_texts_of_errors() -> None:
    model = net()
    with pytest.raises(ConfigError) as error:
        GuardedOptimizer(model, torch.optim.SGD(model[2].parameters()), alone())
    assert str(error.value.problems[0]) == (
        "parameter '0.weight', which SGD does not have\n"
        "  rule: a guarded optimizer has all parameters of its model that require gradients\n"
        "  so:   it would never change\n"
        "  try:  requires_grad_(False) on it, or an optimizer that was made of it too"
    )
    with pytest.raises(ConfigError, match="SGD with 2 parameters that the model does not have"):
        GuardedOptimizer(model[0], torch.optim.SGD(model.parameters()), alone())
    with pytest.raises(ConfigError, match="Adam for a model without parameters that require gradients"):
        GuardedOptimizer(nn.Tanh(), torch.optim.Adam([{"params": []}]), alone())
    with pytest.raises(ConfigError, match=r"optimizer LBFGS: its step .*(\n.*)*by step\(\) without a closure"):
        GuardedOptimizer(model, torch.optim.LBFGS(model.parameters()), alone())
    update = made(model, alone())
    update.backward(losses(model, rows_of(0)).sum(), 8, last=True)
    with pytest.raises(ConfigError) as error:
        update.backward(losses(model, rows_of(0)).sum(), 8)
    assert str(error.value) == (
        "backward after backward(last=True) of the same step\n"
        "  rule: gradients are sent during the last backward pass of a step\n"
        "  so:   some would be summed over the ranks without the new part, so nothing was added\n"
        "  try:  step() before, or last=True in the last call only"
    )


# --- checkpoints ---------------------------------------------------------------------------------------------------------


class Parts:
    """A loop with dropout, a scheduler of torch, and a loss scale."""

    def __init__(self, world: World, folder: Path, **options: Any) -> None:
        torch.manual_seed(1 + world.rank)
        self.model = nn.Sequential(net(), nn.Dropout(0.5))
        adam = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.update = GuardedOptimizer(
            self.model, adam, world, scaler=LossScaler(CPU, init_scale=8.0, growth_interval=2)
        )
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0)
        parts = {"update": self.update, "scheduler": self.scheduler}
        self.checkpoints = LoopCheckpoints(folder, parts, world, options=CheckpointOptions(every_steps=2, **options))

    def run(self, stop: int) -> list[float]:
        seen = []
        with self.checkpoints:
            for step in range(self.checkpoints.resume(), stop):
                values = losses(self.model, rows_of(step))
                self.update.backward(values.sum(), len(values))
                seen.append(self.update.step().loss)
                self.scheduler.step(seen[-1])
                self.checkpoints.after_step(step + 1)
        self.update.close()
        return [*seen, self.scheduler.get_last_lr()[0], float(self.update.scaler.value)]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_loop_continues_bit_for_bit(tmp_path: Path, asynchronous: bool) -> None:
    whole = Parts(alone(), tmp_path / "whole", asynchronous=asynchronous).run(7)
    Parts(alone(), tmp_path / "cut", asynchronous=asynchronous).run(5)  # steps 4 and 5 are made again
    assert Parts(alone(), tmp_path / "cut", asynchronous=asynchronous).run(7) == whole[4:]


def continued(world: World, folder: str) -> list[list[float]]:
    root = Path(folder)
    whole = Parts(world, root / "whole").run(7)
    Parts(world, root / "cut").run(5)
    return [whole[4:], Parts(world, root / "cut").run(7)]


@pytest.mark.full
def test_every_rank_continues_with_its_own_generators(pool: Pool, tmp_path: Path) -> None:
    for expected, found in pool.run(continued, str(tmp_path), ranks=2):
        assert expected == found


class Given:
    """A part whose state is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_states_of_all_kinds(tmp_path: Path) -> None:
    state = {
        "numbers": [1, 2.5, True, None, float("inf"), "x"],
        3: {"deep": torch.arange(4, dtype=torch.int16), "empty": {}, "none": []},
    }
    with LoopCheckpoints(tmp_path, {"part": Given(state)}, alone()) as checkpoints:
        assert checkpoints.resume() == 0
        checkpoints.save(3)
    part = Given({})
    with LoopCheckpoints(tmp_path, {"part": part}, alone()) as checkpoints:
        assert checkpoints.resume() == 3
    assert part.state.keys() == state.keys()
    assert part.state["numbers"] == state["numbers"]
    assert same(leaves(part.state[3]), leaves(state[3]))
    assert part.state[3]["deep"].dtype == torch.int16
    with (
        LoopCheckpoints(tmp_path, {"another": part}, alone()) as checkpoints,
        pytest.raises(CheckpointError, match="a checkpoint of part for another"),
    ):
        checkpoints.resume()
    with (
        LoopCheckpoints(tmp_path / "other", {"part": Given({"of": {"names": {1, 2}}})}, alone()) as checkpoints,
        pytest.raises(CheckpointError) as error,
    ):
        checkpoints.save(1)
    assert str(error.value) == (
        "the state part/of/names is of type set\n"
        "  rule: a state is made of dicts with strings or ints as keys, lists, tensors, numbers, strings and None\n"
        "  so:   nothing was saved\n"
        "  try:  leave it out of state_dict, or turn it into one of these"
    )


def test_a_save_that_fails_is_told_and_ends_the_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Given({"x": torch.zeros(2)})
    checkpoints = LoopCheckpoints(tmp_path, {"part": part}, alone())
    checkpoints.save(1)
    checkpoints.wait()
    (tmp_path / "step-00000002").write_text("in the way")
    checkpoints.save(2)
    with pytest.raises(CheckpointError, match="the checkpoint of the last step, 2, could not be written"), checkpoints:
        pass
    assert "checkpoint_failed step=2" in capsys.readouterr().err


def test_a_step_without_a_backward_pass_of_ours_is_an_error() -> None:
    model = net()
    update = made(model, alone())
    before = leaves(update.state_dict())
    losses(model, rows_of(0)).mean().backward()  # torch's own habit
    with pytest.raises(ConfigError) as caught:
        update.step()
    (problem,) = caught.value.problems
    assert problem.given == "step() without a backward pass of this step"
    assert problem.nearest == "optimizer.backward(losses.sum(), len(losses)) in place of loss.backward()"
    assert same(before, leaves(update.state_dict()))
    for weight in (8, 0):  # a batch of samples that all weigh nothing is skipped as before
        update.backward(losses(model, rows_of(1)).sum(), weight)
        assert update.step().skipped == (weight == 0)
    with pytest.raises(ConfigError, match="without a backward pass of this step"):
        update.step()


def without_backward(world: World) -> tuple[float, list[str]]:
    model = net()
    update = made(model, world)
    if world.rank == 0:
        update.backward(losses(model, rows_of(0)).sum(), 8)
    loss, said = update.step().loss, []
    done = update.step()
    assert done.skipped
    assert "nan" in repr(done)
    try:
        said.append(str(done.loss))
    except ConfigError as error:
        said.append(error.problems[0].given)
    return loss, said


def test_a_rank_may_have_no_samples_but_not_all_of_them(pool: Pool) -> None:
    first, second = pool.run(without_backward, ranks=2)
    assert first == second
    assert first[0] == pytest.approx(float(losses(net(), rows_of(0)).mean().detach()))
    assert first[1] == ["step() without a backward pass of any rank"]


def test_parts_that_cannot_be_saved_are_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        LoopCheckpoints(tmp_path / "loop", {"net": net(), "best": 3.5, "kind": nn.Linear}, alone())  # pyright: ignore
    assert [problem.given for problem in caught.value.problems] == [
        "part 'best' is float, which has no state_dict and no load_state_dict",
        "part 'kind' is the class Linear, not an object of it",
    ]
    assert not (tmp_path / "loop").exists()


def test_another_model_is_refused_with_the_path_of_the_checkpoint(tmp_path: Path) -> None:
    world = alone()
    with LoopCheckpoints(tmp_path, {"net": net()}, world) as checkpoints:
        checkpoints.save(4)
    with (
        pytest.raises(CheckpointError) as caught,
        LoopCheckpoints(tmp_path, {"net": nn.Linear(3, 8)}, world) as checkpoints,
    ):
        checkpoints.resume()
    (problem,) = caught.value.problems
    assert problem.given.startswith(
        f"the state of 'net' in {tmp_path}/step-00000004 does not fit Linear: Error(s) in loading"
    )
    assert problem.rule.startswith("a loop continues with parts like those that it saved")
