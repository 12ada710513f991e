"""A killed run goes on with the samples and losses it would have had, whatever torch's data utilities it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from unisono import CheckpointOptions, ObserveOptions, PlanOptions, Trainer, TrainOptions
from unisono.train import mean_squared_error

INPUTS = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS[:, :2].abs()
STEPS, CUT = 8, 3  # an epoch has 5 steps


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """A map-style data set that counts nothing and remembers nothing."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return INPUTS[index], TARGETS[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same pairs in an order of its own."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(INPUTS[n], TARGETS[n]) for n in torch.arange(20).flip(0).tolist()])


def stacked(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {"inputs": torch.stack([x for x, _ in samples]), "targets": torch.stack([y for _, y in samples])}


DATA: dict[str, Callable[[], Any]] = {
    "map style": Pairs,
    "iterable": Stream,
    "loader": lambda: DataLoader(TensorDataset(INPUTS, TARGETS), 4, shuffle=True),
    "loader with workers": lambda: DataLoader(Pairs(), 4, shuffle=True, num_workers=1),
    "loader in order": lambda: DataLoader(Pairs(), 4),
    "loader with collate_fn": lambda: DataLoader(Pairs(), 4, shuffle=True, collate_fn=stacked),
    "sequential sampler": lambda: DataLoader(Pairs(), 4, sampler=SequentialSampler(Pairs())),
    "subset sampler": lambda: DataLoader(Pairs(), 4, sampler=SubsetRandomSampler(range(3, 19))),
    "weighted sampler": lambda: DataLoader(Pairs(), 4, sampler=WeightedRandomSampler([1.0] * 10 + [3.0] * 10, 20)),
    "loader of an iterable": lambda: DataLoader(Stream(), 4),
}


class Noisy(nn.Module):
    """Dropout, whose random numbers are a part of the state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def trainer(folder: Path, data: Any) -> Trainer:
    given: dict[str, Any] = {} if isinstance(data, DataLoader) else {"plan": PlanOptions(global_batch=4, micro_batch=4)}
    return Trainer(
        Noisy(),
        data,
        objective=mean_squared_error,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.05),
        options=TrainOptions(steps=STEPS, eval_every_steps=0),
        checkpoint=CheckpointOptions(every_steps=1),
        run_dir=folder,
        observe=ObserveOptions(console="off", trackers=(), report=False),
        **given,
    )


class Killed(BaseException):
    """Ends a run without a last save, as a signal does."""


@pytest.mark.parametrize("name", DATA)
def test_losses_after_a_kill_are_those_of_a_straight_run(tmp_path: Path, name: str) -> None:
    with trainer(tmp_path / "straight", DATA[name]()) as run:
        losses = [step.loss for step in run]
    assert len(losses) == STEPS

    def cut() -> None:
        with trainer(tmp_path / "cut", DATA[name]()) as run:
            for step in run:
                if step.index == CUT + 1:  # its checkpoint is not written
                    raise Killed

    with pytest.raises(Killed):
        cut()
    with trainer(tmp_path / "cut", DATA[name]()) as run:
        again = [step.loss for step in run]
    assert len(again) in (STEPS - CUT, STEPS - CUT + 1)  # the newest save may have been under way
    assert again == losses[STEPS - len(again) :]
