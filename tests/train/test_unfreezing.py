"""Parameters that are frozen in the first steps of a run, against a plain loop that flips ``requires_grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

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
from unisono.config import load_config
from unisono.dist import World
from unisono.errors import CheckpointError, ConfigError
from unisono.observe.events import read_events
from unisono.train import RunConfig, mean_squared_error

SAMPLES = [(torch.randn(6, generator=torch.Generator().manual_seed(n)), torch.ones(2) * (n % 3)) for n in range(24)]
STEPS, UNFROZEN_AT = 6, 3
ENCODER_LATER = ({"match": "encoder.*", "frozen_until_step": UNFROZEN_AT},)
OURS = OptimOptions(lr=0.02, weight_decay=0.1, clip_norm=0.5, groups=ENCODER_LATER)


class Net(nn.Module):
    """An encoder that is frozen at first, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)
        self.frozen_calls: list[bool] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.frozen_calls.append(not self.encoder[0].weight.requires_grad)
        return self.head(torch.tanh(self.encoder(inputs)))


def two_groups(optimizer: Callable[..., torch.optim.Optimizer], model: Net, **encoder: Any) -> torch.optim.Optimizer:
    return optimizer(
        [{"params": list(model.encoder.parameters()), **encoder}, {"params": list(model.head.parameters())}]
    )


def trainer(folder: Path, optimizer: Any, **changes: Any) -> Trainer:
    plan = {"global_batch": 8, "micro_batch": changes.pop("micro_batch", 8)} | changes.pop("plan", {})
    options = {"steps": STEPS, "eval_every_steps": 0} | changes.pop("train", {})
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
    with run:
        losses = [step.loss for step in run]
        return losses, {path: tensor.clone() for path, tensor in run.state.global_state().items()}


def plain_loop(
    order: list[list[int]],
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    unfrozen_at: int = UNFROZEN_AT,
    decay: float = 0.0,
    clip_norm: float = 0.0,
) -> tuple[list[float], Net, list[Tensor]]:
    """Losses, model and averaged weights of a loop that trains the encoder from the step ``unfrozen_at`` on."""
    model = Net()
    made = two_groups(optimizer, model)
    average = [p.detach().clone() for p in model.parameters()]
    losses: list[float] = []
    for step, ids in enumerate(order):
        model.encoder.requires_grad_(step >= unfrozen_at)
        inputs, targets = (torch.stack(column) for column in zip(*(SAMPLES[n] for n in ids), strict=True))
        loss = nn.functional.mse_loss(model(inputs), targets)
        made.zero_grad()
        loss.backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        made.step()
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.lerp_(p.detach(), 1 - decay)
        losses.append(loss.item())
    return losses, model, average


def order_of(folder: Path) -> list[list[int]]:
    with trainer(folder, torch.optim.SGD) as run:
        return [step.sample_ids.tolist() for step in run]


ADAMW = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def ours(optimizer: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    """The arguments of a trainer with an optimizer of the model's own parameters."""
    model = Net()
    return {"model": model, "optimizer": two_groups(optimizer, model, frozen_until_step=UNFROZEN_AT)}


@pytest.mark.parametrize("micro_batch", [8, 2])
@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["AdamW", "SGD"])
def test_it_trains_like_a_plain_loop_that_flips_requires_grad(
    tmp_path: Path, optimizer: Callable[..., torch.optim.Optimizer], micro_batch: int
) -> None:
    order = order_of(tmp_path / "order")
    losses, model, average = plain_loop(order, optimizer, decay=0.9, clip_norm=0.5)
    run = trainer(tmp_path / "run", micro_batch=micro_batch, clip_norm=0.5, train={"ema_decay": 0.9}, **ours(optimizer))
    found, state = trained(run)
    torch.testing.assert_close(found, losses, rtol=2e-5, atol=1e-6)
    for (name, parameter), mean in zip(model.named_parameters(), average, strict=True):
        torch.testing.assert_close(state[f"model/{name}"], parameter.detach(), rtol=2e-5, atol=1e-6)
        torch.testing.assert_close(state[f"ema/{name}"], mean, rtol=2e-5, atol=1e-6)
    frozen = run.model.frozen_calls[:: 8 // micro_batch]
    assert frozen == [True] * UNFROZEN_AT + [False] * (STEPS - UNFROZEN_AT)  # no backward pass is made for it


def test_a_table_of_optim_groups_says_when(tmp_path: Path) -> None:
    """The same losses from the configuration file; only the head is clipped and updated before the step."""
    file = tmp_path / "config.toml"
    file.write_text(
        'optim.lr = 0.02\noptim.clip_norm = 0.5\n[[optim.groups]]\nmatch = "encoder.*"\nfrozen_until_step = 3\n'
    )
    options = load_config(RunConfig, [file]).value.optim
    with trainer(tmp_path / "run", options, schedule=lambda step: 0.02) as run:
        start = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        for step in run:
            moved = {name.partition(".")[0] for name, p in run.model.named_parameters() if not p.equal(start[name])}
            assert moved == ({"head"} if step.index <= 3 else {"head", "encoder"})
        steps = {name: int(t) for name, t in run.state.local_state().items() if name.startswith("optim/step/")}
    assert steps["optim/step/encoder.0.weight"] == STEPS - 3
    assert steps["optim/step/head.weight"] == STEPS


@pytest.mark.parametrize("cut", [2, 3, 4])
@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, kind: str, cut: int) -> None:
    ema = {"ema_decay": 0.9}

    def start(name: str) -> Trainer:
        given = {"optimizer": OURS} if kind == "ours" else ours(ADAMW)
        return trainer(tmp_path / name, train=ema, micro_batch=4, resume="strict" if name == "cut" else "auto", **given)

    losses, straight = trained(start("straight"))
    with start("cut") as run:
        steps = iter(run)
        for _ in range(cut):
            next(steps)
    rest, resumed = trained(start("cut"))
    assert rest == losses[cut:]
    assert straight.keys() == resumed.keys()
    assert all(straight[path].equal(resumed[path]) for path in straight)


def test_another_step_is_a_difference(tmp_path: Path) -> None:
    with trainer(tmp_path, OURS) as run:
        next(iter(run))
    later = OptimOptions(
        lr=0.02, weight_decay=0.1, clip_norm=0.5, groups=({"match": "encoder.*", "frozen_until_step": 5},)
    )
    with trainer(tmp_path, later) as run:
        list(run)
    (resumed,) = [e for e in read_events(run.events.path).events if e["kind"] == "resumed"]
    assert "optimizer.groups.2.frozen_until_step 3 then, 5 now" in resumed["differences"]


def losses_of(world: World, folder: str, layout: dict[str, Any], kind: str) -> tuple[list[float], float]:
    optimizer: Any = OURS if kind == "ours" else {"encoder.*": later_adamw, "*": ADAMW}
    with trainer(Path(folder), optimizer, world=world, model=Net, micro_batch=4, plan=layout) as run:
        losses = [step.loss for step in run]
        return losses, float(next(run.model.parameters()).requires_grad)


def later_adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return ADAMW([{"params": list(params), "frozen_until_step": UNFROZEN_AT}])


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ({}, "ours"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [({}, "torch"), ({"dp_shard": 2}, "ours"), ({"dp_shard": 2}, "torch"), ({"tp": 2}, "ours")]
        ),
    ],
)
def test_ranks_train_like_one(pool: Pool, tmp_path: Path, layout: dict[str, Any], kind: str) -> None:
    optimizer: Any = OURS if kind == "ours" else {"encoder.*": later_adamw, "*": ADAMW}
    one, _ = trained(trainer(tmp_path / "one", optimizer))
    for losses, trains in pool.run(losses_of, str(tmp_path / "two"), layout, kind, ranks=2):
        torch.testing.assert_close(losses, one, rtol=2e-5, atol=1e-6)
        assert trains


@pytest.mark.parametrize("value", [-1, 2.5, "soon"])
def test_a_step_is_a_whole_number(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, OptimOptions(groups=({"match": "encoder.*", "frozen_until_step": value},)))
    assert f"table 1 of optim.groups has frozen_until_step = {value!r}" in str(caught.value)
    model = Net()
    run = trainer(tmp_path, two_groups(SGD, model, frozen_until_step=value), model=model)
    with pytest.raises(ConfigError) as caught, run:
        pass
    assert str(caught.value) == (
        f"a parameter group has frozen_until_step = {value!r}\n"
        "  rule: it is the number of steps, a whole number from 0 on, in which the group is not trained\n"
        "  so:   nothing was started\n"
        "  try:  frozen_until_step=1000"
    )


def test_something_is_trained_in_the_first_step(tmp_path: Path) -> None:
    everything = OptimOptions(groups=({"match": "*", "frozen_until_step": 2},))
    with pytest.raises(ConfigError) as caught, trainer(tmp_path, everything):
        pass
    assert str(caught.value) == (
        "every parameter group has frozen_until_step, the lowest is 2\n"
        "  rule: at least one parameter is trained in every step\n"
        "  so:   the first 2 steps would change nothing\n"
        "  try:  a group without frozen_until_step"
    )


def test_a_group_that_is_never_trained_is_noticed(tmp_path: Path) -> None:
    groups = ({"match": "encoder.*", "frozen_until_step": 10},)
    with trainer(tmp_path, OptimOptions(groups=groups)) as run:
        list(run)
    (notice,) = [e for e in read_events(run.events.path).events if e["kind"] == "notice"]
    assert notice["what"] == "a parameter group has frozen_until_step=10, and the run has 6 steps"
    assert notice["fix"] == "optim.freeze, or more steps"


@pytest.mark.parametrize("trains", [True, False])
def test_requires_grad_is_not_changed_by_hand(tmp_path: Path, trains: bool) -> None:
    model = Net()
    model.encoder.requires_grad_(not trains)
    with pytest.raises(ConfigError) as caught, trainer(tmp_path, SGD, model=model) as run:
        [run.model.encoder.requires_grad_(trains) for _ in run]
    assert str(caught.value) == (
        f"requires_grad of 'encoder.0.weight' was set to {trains} after the run was entered\n"
        "  rule: optimizer, gradients and checkpoints are made of the parameters that are trained when the run is entered\n"
        "  so:   the step was not made\n"
        "  try:  frozen_until_step in a group of the optimizer"
    )


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (("encoder.*",), (), "frozen then and trained now: 4, the first 'encoder.0.bias'"),
        ((), ("encoder.*",), "trained then and frozen now: 4, the first 'encoder.0.bias'"),
        (
            ("encoder.*",),
            ("head.weight",),
            "frozen then and trained now: 4, the first 'encoder.0.bias'; trained then and frozen now: 1, "
            "the first 'head.weight'",
        ),
    ],
    ids=str,
)
def test_other_frozen_parameters_do_not_resume(
    tmp_path: Path, then: tuple[str, ...], now: tuple[str, ...], said: str
) -> None:
    average = {"ema_decay": 0.5}
    trained(trainer(tmp_path, OptimOptions(freeze=then), train=average))
    with pytest.raises(CheckpointError) as caught:
        trained(trainer(tmp_path, OptimOptions(freeze=now), train=average | {"steps": 8}))
    assert str(caught.value) == (
        f"the checkpoint {tmp_path}/checkpoints/step-00000006 for this run: parameters {said}\n"
        "  rule: a run trains the same parameters to its end (optim.freeze, lora, requires_grad)\n"
        "  so:   optimizer state would be missing or without use; nothing was loaded and nothing was changed\n"
        "  try:  the optim.freeze of the saved run; frozen_until_step in optim.groups from the start of a run, for parameters "
        f"that are trained later; or another run.dir with model.pretrained={tmp_path}/export"
    )
    # with another optimizer, or an average more, it is not the only difference
    for changes in ({"kind": "sgd", "momentum": 0.9}, {}):
        train = {"steps": 8} | (average if changes else {})
        with pytest.raises(CheckpointError, match="is only in"):
            trained(trainer(tmp_path, OptimOptions(freeze=now, **changes), train=train))
