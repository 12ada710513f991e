"""What the trainer promises holds for every optimizer of torch.optim, or the optimizer is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.optim import lr_scheduler

from unisono import (
    CheckpointOptions,
    LoaderOptions,
    ObserveOptions,
    OptimOptions,
    PlanOptions,
    Trainer,
    TrainOptions,
    from_map_style,
)
from unisono.dist import World
from unisono.errors import CheckpointError, ConfigError, UnisonoError
from unisono.observe.events import read_events
from unisono.train import mean_squared_error

REFUSED = {"LBFGS": "without a closure", "SparseAdam": "dense gradient"}
WHOLE_TENSORS = ["Adafactor", "Muon"]
CLASSES = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
USABLE = sorted(CLASSES.keys() - REFUSED.keys())
ELEMENTWISE = ["AdamW", *(name for name in USABLE if name not in (*WHOLE_TENSORS, "AdamW"))]
SAMPLES = [(torch.randn(6, generator=torch.Generator().manual_seed(n)), torch.ones(2) * (n % 3)) for n in range(24)]


class Net(nn.Module):
    """Two matrices, which is all that Muon takes; ``frozen`` has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8, bias=False)
        self.head = nn.Linear(8, 2, bias=False)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(inputs))) * self.frozen


class WithDropout(Net):
    """The same parameters, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.dropout(inputs))


def factory(name: str) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """The class with a momentum where it has none by default, so that there is state."""
    return partial(CLASSES[name], lr=0.02, **({"momentum": 0.9} if name in ("SGD", "RMSprop") else {}))


def trainer(folder: Path, optimizer: Any, **changes: Any) -> Trainer:
    plan = {"global_batch": 8, "micro_batch": changes.pop("micro_batch", 8)} | changes.pop("plan", {})
    options = {"steps": 6, "eval_every_steps": 0} | changes.pop("train", {})
    given: dict[str, Any] = {
        "model": Net(),
        "data": from_map_style(SAMPLES),
        "plan": PlanOptions(device="cpu", precision="fp32", **plan),
        "objective": mean_squared_error,
        "optimizer": optimizer,
        "options": TrainOptions(**options),
        "loader": LoaderOptions(num_workers=0),
        "checkpoint": CheckpointOptions(every_steps=0),
        "run_dir": folder,
        "observe": ObserveOptions(console="off", trackers=(), report=False),
    }
    return Trainer(**(given | changes))


def trained(run: Trainer) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the remaining steps, and everything that changed."""
    with run:
        losses = [step.loss for step in run]
        return losses, {path: tensor.clone() for path, tensor in run.state.global_state().items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for path in one:
        assert torch.equal(one[path], other[path]), path


def batches(folder: Path, steps: int) -> list[list[int]]:
    """Samples of each step, as the trainer drew them."""
    with trainer(folder, torch.optim.SGD, train={"steps": steps}) as run:
        return [step.sample_ids.tolist() for step in run]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_optimizer_that_needs_more_than_gradients_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught, trainer(tmp_path, factory(name)):
        pass
    problem = caught.value.problems[0]
    assert problem.given.startswith(f"optimizer {name}: its step on a tensor with a dense gradient fails")
    assert REFUSED[name] in str(caught.value)
    assert "torch.optim.AdamW" in problem.nearest


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("as_instance", [False, True])
def test_it_trains_like_a_plain_loop(tmp_path: Path, name: str, as_instance: bool) -> None:
    order, model = batches(tmp_path / "order", 6), Net()
    optimizer = factory(name)([p for p in model.parameters() if p.requires_grad])
    plain: list[float] = []
    for ids in order:
        inputs, targets = (torch.stack(column) for column in zip(*(SAMPLES[n] for n in ids), strict=True))
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plain.append(loss.item())
    ours = Net()
    given = factory(name)([p for p in ours.parameters() if p.requires_grad]) if as_instance else factory(name)
    for micro_batch in (8, 4):
        model_given = ours if as_instance and micro_batch == 8 else Net()
        if as_instance and micro_batch == 4:
            given = factory(name)([p for p in model_given.parameters() if p.requires_grad])
        folder = tmp_path / f"run{micro_batch}"
        losses, _ = trained(trainer(folder, given, model=model_given, micro_batch=micro_batch))
        torch.testing.assert_close(losses, plain, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", USABLE)
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, name: str) -> None:
    ema = {"steps": 6, "ema_decay": 0.9}
    _, straight = trained(trainer(tmp_path / "straight", factory(name), train=ema))
    with trainer(tmp_path / "cut", factory(name), train=ema) as run:
        steps = iter(run)
        for _ in range(3):
            next(steps)
    losses, resumed = trained(trainer(tmp_path / "cut", factory(name), train=ema, resume="strict"))
    assert len(losses) == 3
    assert any(path.startswith("optim/") for path in resumed)
    assert_equal(straight, resumed)


@pytest.mark.parametrize("name", USABLE)
def test_a_bad_step_changes_nothing(tmp_path: Path, name: str) -> None:
    """The first and the fourth batch have a NaN; the state after them is that before them, and training goes on."""
    order = batches(tmp_path / "order", 6)
    bad = {order[0][0], order[3][0]} - {n for ids in (*order[1:3], *order[4:]) for n in ids}
    order_bad = [bool(bad & set(ids)) for ids in order]
    data = [(x * float("nan"), y) if n in bad else (x, y) for n, (x, y) in enumerate(SAMPLES)]
    with trainer(tmp_path / "run", factory(name), data=from_map_style(data)) as run:
        before = {path: t.clone() for path, t in run.state.local_state().items()}
        skipped: list[bool] = []
        for step in run:
            after = {path: t.clone() for path, t in run.state.local_state().items()}
            skipped.append(step.skipped)
            if step.skipped:
                assert_equal(before, after)
            else:
                assert not torch.equal(before["model/first.weight"], after["model/first.weight"])
            before = after
    assert skipped == order_bad


def sharded_losses(world: World, folder: str, name: str, layout: dict[str, Any]) -> Any:
    try:
        with trainer(Path(folder), factory(name), world=world, model=Net, micro_batch=4, plan=layout) as run:
            return [step.loss for step in run]
    except UnisonoError as error:
        return str(error)


@pytest.mark.parametrize(
    "name", [*WHOLE_TENSORS, "AdamW", *(pytest.param(n, marks=pytest.mark.full) for n in ELEMENTWISE[1:])]
)
def test_shards_are_trained_like_the_whole_or_it_is_refused(pool: Pool, tmp_path: Path, name: str) -> None:
    if name in WHOLE_TENSORS:
        found = pool.run(sharded_losses, str(tmp_path / "two"), name, {"dp_shard": 2}, ranks=2)
        assert all(f"optimizer {name} with dp_shard" in text for text in found)
        assert "an update of an element may not depend on other elements" in found[0]
        found = pool.run(sharded_losses, str(tmp_path / "whole"), name, {}, ranks=2)
    else:
        found = pool.run(sharded_losses, str(tmp_path / "two"), name, {"dp_shard": 2}, ranks=2)
    one, _ = trained(trainer(tmp_path / "one", factory(name)))
    for losses in found:
        torch.testing.assert_close(losses, one, rtol=2e-5, atol=1e-6)


def resumed_on_two(world: World, folder: str, name: str) -> list[float]:
    with trainer(Path(folder), factory(name), world=world, model=Net, micro_batch=4, plan={"dp_shard": 2}) as run:
        return [step.loss for step in run]


@pytest.mark.parametrize("name", ["NAdam", pytest.param("ASGD", marks=pytest.mark.full)])
def test_a_run_of_one_process_resumes_with_shards(pool: Pool, tmp_path: Path, name: str) -> None:
    straight, _ = trained(trainer(tmp_path / "straight", factory(name)))
    with trainer(tmp_path / "cut", factory(name)) as run:
        steps = iter(run)
        for _ in range(3):
            next(steps)
    for losses in pool.run(resumed_on_two, str(tmp_path / "cut"), name, ranks=2):
        torch.testing.assert_close(losses, straight[3:], rtol=2e-5, atol=1e-6)


def test_several_optimizers_by_pattern(tmp_path: Path) -> None:
    given = {"head.*": partial(torch.optim.SGD, lr=0.1), "*": partial(torch.optim.AdamW, lr=1e-3)}
    with trainer(tmp_path, given) as run:
        list(run)
        state = run.state.local_state()
    assert {p for p in state if p.startswith("optim/")} == {
        f"optim/{n}/first.weight" for n in ("exp_avg", "exp_avg_sq", "step")
    }
    with pytest.raises(ConfigError) as caught, trainer(tmp_path / "b", {"head.*": torch.optim.SGD}):
        pass
    assert "parameter 'first.weight': no pattern of optimizer (head.*) matches" in str(caught.value)
    wrong = {"*": torch.optim.SGD, "head.*": torch.optim.SGD}
    with pytest.raises(ConfigError) as caught, trainer(tmp_path / "c", wrong):
        pass
    assert "whose parameters '*' takes before it" in str(caught.value)


def test_groups_of_our_options_have_their_own_rate_and_decay(tmp_path: Path) -> None:
    groups = ({"match": "head.*", "lr_scale": 10.0, "weight_decay": 0.0},)
    with trainer(tmp_path, OptimOptions(lr=1e-3, groups=groups), schedule=lambda step: 1e-3 * (step + 1)) as run:
        for step in run:
            rates = {group["name"]: group["lr"] for group in run.state.optimizer.param_groups}
            assert step.lr == 1e-3 * step.index
            assert rates == {"decay": step.lr, "decay head.*": pytest.approx(10 * step.lr)}
        decays = {group["name"]: group["weight_decay"] for group in run.state.optimizer.param_groups}
        assert decays == {"decay": 0.1, "decay head.*": 0.0}
    with pytest.raises(ConfigError) as caught:
        trained(trainer(tmp_path / "b", OptimOptions(groups=({"match": "haed.*", "lr_scale": 2.0},))))
    assert "optim.groups has the pattern 'haed.*', which matches no parameter" in str(caught.value)


def test_frozen_parameters_do_not_change(tmp_path: Path) -> None:
    start = Net().first.weight
    with trainer(tmp_path, OptimOptions(freeze=("first.*",))) as run:
        list(run)
        assert torch.equal(run.model.first.weight, start)
        assert not torch.equal(run.model.head.weight, Net().head.weight)
    [start_event] = [event for event in read_events(run.events.path).events if event["kind"] == "run_start"]
    head = sum(parameter.numel() for parameter in Net().head.parameters())
    assert start_event["parameters_trained"] == head < start_event["parameters"]
    with pytest.raises(ConfigError) as caught, trainer(tmp_path / "b", OptimOptions(freeze=("primus.*",))):
        pass
    assert "optim.freeze has 'primus.*'" in str(caught.value)
    assert "first.weight" in str(caught.value)


SCHEDULES: dict[str, Any] = {
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 4]),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.8)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("as_instance", [False, True])
def test_torch_schedulers_give_the_rates_of_a_plain_loop_and_resume(
    tmp_path: Path, name: str, as_instance: bool
) -> None:
    net, plain = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = SCHEDULES[name](optimizer)
    for _ in range(6):
        plain.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step()

    def start(folder: Path) -> Trainer:
        model = Net()
        sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        return trainer(folder, sgd(model.parameters()) if as_instance else sgd, model=model, schedule=SCHEDULES[name])

    rates: list[tuple[float, float]] = []
    for _ in range(2):
        with start(tmp_path) as run:
            steps = iter(run)
            for _ in range(3):
                momentum = run.state.optimizer.param_groups[0]["momentum"]
                rates.append((next(steps).lr, momentum))
    assert rates == plain


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (
            (0.1, partial(lr_scheduler.StepLR, step_size=2, gamma=0.5)),
            (0.01, partial(lr_scheduler.StepLR, step_size=2, gamma=0.5)),
        ),
        (
            (0.1, partial(lr_scheduler.StepLR, step_size=2, gamma=0.5)),
            (0.1, partial(lr_scheduler.StepLR, step_size=2, gamma=0.9)),
        ),
        (
            (0.1, partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=3)),
            (0.1, partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=6)),
        ),
        (
            (0.1, partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=3)),
            (0.1, partial(lr_scheduler.StepLR, step_size=4)),
        ),
    ],
    ids=["rate", "gamma", "longer", "kind"],
)
@pytest.mark.filterwarnings("error")
def test_a_resumed_run_has_the_rates_of_its_own_schedule(tmp_path: Path, then: Any, now: Any) -> None:
    """As if the new settings had been there from the first step, and again when that run resumes."""
    optimizer = torch.optim.SGD(Net().parameters(), lr=now[0], momentum=0.9)
    scheduler, plain = now[1](optimizer), []
    for _ in range(6):
        plain.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step()

    def rates(given: Any, steps: int) -> list[tuple[float, float]]:
        sgd = partial(torch.optim.SGD, lr=given[0], momentum=0.9)
        with trainer(tmp_path, sgd, schedule=given[1], train={"steps": steps}) as run:
            groups = run.state.optimizer.param_groups
            taken, momentum = [], groups[0]["momentum"]
            for step in run:
                taken.append((step.lr, momentum))
                momentum = groups[0]["momentum"]
            return taken

    assert len(rates(then, 3)) == 3
    if now[1].func is lr_scheduler.OneCycleLR:
        assert rates(now, 6) == plain[3:]
    else:
        assert rates(now, 4) + rates(now, 6) == plain[3:]


def test_reduce_on_plateau_keeps_its_reductions_under_another_rate(tmp_path: Path) -> None:
    # a threshold that no loss passes: each evaluation reduces
    plateau = partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0, threshold=10.0)

    def rates(lr: float, steps: int, **changes: Any) -> list[float]:
        given = partial(plateau, **changes)
        data = from_map_style(SAMPLES[:4])
        run = trainer(tmp_path, partial(torch.optim.SGD, lr=lr), schedule=given, eval_data=data, train={"steps": steps})
        taken: list[float] = []
        with run:
            for step in run:
                taken.append(step.lr)
                run.evaluate()
        return taken

    assert rates(0.1, 3) == pytest.approx([0.1, 0.05, 0.025])
    assert rates(0.2, 5) == pytest.approx([0.025, 0.0125])
    assert rates(0.2, 7, factor=0.1) == pytest.approx([0.00625, 0.000625])


def test_reduce_on_plateau_reads_the_held_out_loss_and_is_saved(tmp_path: Path) -> None:
    plateau = partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=1, threshold=0.05)
    rates: list[float] = []
    losses: list[float] = []
    for steps in (3, 9):
        run = trainer(
            tmp_path, factory("SGD"), schedule=plateau, eval_data=from_map_style(SAMPLES[:4]), train={"steps": steps}
        )
        with run:
            for step in run:
                rates.append(step.lr)
                losses.append(run.evaluate()["loss"])
    optimizer = factory("SGD")(Net().parameters())
    plain, scheduler = [], plateau(optimizer)
    for loss in losses:
        plain.append(optimizer.param_groups[0]["lr"])
        scheduler.step(loss)
    assert rates == plain
    assert len(set(rates)) > 2


def test_reduce_on_plateau_needs_evaluations(tmp_path: Path) -> None:
    plateau = partial(lr_scheduler.ReduceLROnPlateau, patience=1)
    with pytest.raises(ConfigError) as caught, trainer(tmp_path, torch.optim.SGD, schedule=plateau):
        pass
    assert str(caught.value) == (
        "schedule ReduceLROnPlateau without held-out data\n"
        "  rule: it reads the held-out loss of each evaluation\n"
        "  so:   the learning rate would never change\n"
        "  try:  eval_data=…, or another schedule"
    )


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught, trainer(tmp_path, torch.optim.SGD(Net().parameters(), lr=0.1)):
        pass
    assert "has 3 parameters that the model has not" in str(caught.value)
    captured = list(Net().parameters())
    with pytest.raises(ConfigError) as caught, trainer(tmp_path / "b", lambda params: torch.optim.SGD(captured)):
        pass
    assert "it has exactly the parameters it is given" in str(caught.value)


def test_parameters_the_optimizer_has_not_are_not_trained(tmp_path: Path) -> None:
    model = Net()
    with trainer(tmp_path, torch.optim.SGD(model.head.parameters(), lr=0.1), model=model) as run:
        list(run)
        assert torch.equal(model.first.weight, Net().first.weight)
        assert not torch.equal(model.head.weight, Net().head.weight)


def test_another_optimizer_does_not_resume(tmp_path: Path) -> None:
    trained(trainer(tmp_path, factory("AdamW")))
    with pytest.raises(CheckpointError, match="only in the checkpoint"):
        trained(trainer(tmp_path, factory("Rprop"), train={"steps": 8}))


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ({"optimizer": "AdamW"}, {"optimizer": "AdamW", "lr": 0.5}, "optimizer.groups.0.lr 0.02 then, 0.5 now"),
        (
            {"optimizer": OptimOptions()},
            {"optimizer": OptimOptions(beta2=0.99)},
            "optimizer.groups.0.betas [0.9, 0.95] then",
        ),
        (
            {"optimizer": OptimOptions()},
            {"optimizer": OptimOptions(clip_norm=0.5)},
            "optimizer.clip_norm 1.0 then, 0.5 now",
        ),
        (
            {"optimizer": OptimOptions()},
            {"optimizer": OptimOptions(weight_decay=0.0)},
            "weight_decay 0.1 then, 0.0 now",
        ),
        (
            {"optimizer": OptimOptions()},
            {"optimizer": OptimOptions(), "train": {"steps": 12}},
            "train.steps 6 then, 12 now",
        ),
        ({"train": {"ema_decay": 0.9}}, {"train": {"ema_decay": 0.5}}, "train.ema_decay 0.9 then, 0.5 now"),
        ({"schedule": lambda step: 0.1}, {}, "schedule"),
        (
            {},
            {"objective": lambda outputs, batch: mean_squared_error(outputs, batch)},
            "objective 'mean_squared_error' then",
        ),
        ({}, {"model": "dropout"}, "model 1 x Net() then, 1 x Dropout(p=0.1, inplace=False), 1 x WithDropout() now"),
    ],
)
def test_every_setting_that_changes_the_mathematics_is_compared(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], said: str
) -> None:
    def build(changes: dict[str, Any], **more: Any) -> Trainer:
        changes = {"optimizer": "SGD"} | changes
        optimizer, lr = changes.pop("optimizer"), changes.pop("lr", 0.02)
        if isinstance(optimizer, str):
            optimizer = partial(CLASSES[optimizer], lr=lr)
        if changes.get("model"):
            changes["model"] = WithDropout()
        return trainer(tmp_path, optimizer, **(changes | more))

    with build(first) as run:
        next(iter(run))
    with pytest.raises(CheckpointError) as caught, build(then, resume="strict"):
        pass
    assert said in str(caught.value)
    with build(first, resume="strict") as run:
        next(iter(run))
    with build(then) as run:
        resumed = [e for e in read_events(run.events.path).events if e["kind"] == "resumed"][-1]
    assert any(said in text for text in resumed["differences"])


def test_a_finished_run_says_that_there_is_nothing_to_do(tmp_path: Path) -> None:
    trained(trainer(tmp_path, factory("SGD")))
    other = from_map_style([(x + 1, y) for x, y in SAMPLES])
    with trainer(tmp_path, partial(torch.optim.SGD, lr=0.5, momentum=0.9), data=other) as run:
        assert run.fit().step == 6
        events = read_events(run.events.path).events
    resumed = [e for e in events if e["kind"] == "resumed"][-1]
    assert "optimizer.groups.0.lr 0.02 then, 0.5 now" in resumed["differences"]
    assert "data.samples: sample 0 and 23 more of the 24 that are compared changed" in resumed["differences"]
    notice = [e for e in events if e["kind"] == "notice"][-1]
    assert notice["what"] == "this run has made 6 of 6 steps: no step is made"


def test_fewer_steps_than_were_made_change_nothing(tmp_path: Path) -> None:
    _, made = trained(trainer(tmp_path, factory("SGD")))
    with trainer(tmp_path, factory("SGD"), train={"steps": 4}) as run:
        result = run.fit()
        events = read_events(run.events.path).events
    assert (result.step, result.reason) == (6, "finished")
    notice = [e for e in events if e["kind"] == "notice"][-1]
    assert notice["what"] == "this run has made 6 steps, more than train.steps=4: no step is made or undone"
    assert notice["fix"] == "train.steps above 6 to continue, or another run.dir for a new run"
    losses, same = trained(trainer(tmp_path, factory("SGD")))
    assert losses == []
    assert_equal(made, same)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (OptimOptions(), "adamw, lr 0.002 falling to 0.0002 at step 6 (cosine), weight decay 0.1"),
        (partial(torch.optim.RMSprop, lr=0.1), "RMSprop, lr 0.1 constant"),
        ({"head.*": torch.optim.SGD, "*": torch.optim.Adam}, "head.*: SGD, *: Adam, lr 0.001 constant"),
    ],
)
def test_the_header_names_optimizer_and_rate(tmp_path: Path, optimizer: Any, text: str) -> None:
    with trainer(tmp_path, optimizer) as run:
        assert read_events(run.events.path).events[0]["optimization"] == text


def test_clipping_is_named_for_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="OptimOptions has clip_norm"):
        trainer(tmp_path, OptimOptions(), clip_norm=0.5)
    _, state = trained(trainer(tmp_path / "small", partial(torch.optim.SGD, lr=1.0), clip_norm=1e-3))
    moved = (state["model/first.weight"] - Net().first.weight).norm() + (
        state["model/head.weight"] - Net().head.weight
    ).norm()
    assert 1e-4 < moved < 6 * 2**0.5 * 1e-3  # six steps of a gradient of norm 0.001


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": lambda params: "SGD"}, "returned str"),
        ({"schedule": lambda optimizer: 0.1}, "schedule returned float for an optimizer"),
        ({"plan": {"sync": "dist_async"}}, "with plan.sync 'dist_async'"),
    ],
)
def test_what_is_no_optimizer_or_schedule_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    given = {"optimizer": factory("SGD")} | changes
    with pytest.raises(ConfigError) as caught, trainer(tmp_path, given.pop("optimizer"), **given):
        pass
    assert said in str(caught.value)
