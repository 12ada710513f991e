"""A run small enough to repeat many times: a two-layer GPT on random tokens with ragged weights, and a digest of its state."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flips import Flip, Injector
from plan_edit import changed, is_plan_field

from unisono import (
    CheckpointOptions,
    ModelOptions,
    ObserveOptions,
    OptimOptions,
    PlanOptions,
    ScheduleOptions,
    Trainer,
    TrainOptions,
)
from unisono.data.options import LoaderOptions
from unisono.data.order.permutation import Permutation
from unisono.dist import World
from unisono.models.gpt import GPT
from unisono.models.quantize_options import QuantizeOptions
from unisono.models.quantized_model import make_aware
from unisono.observe.events import events_path, read_events
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan
from unisono.train.objectives import next_token

# the console, trackers and report have tests of their own
QUIET = ObserveOptions(console="off", trackers=(), report=False)
VOCAB, SEQ_LEN, SAMPLES = 48, 12, 37


class RaggedTokens:
    """Random sequences whose weights end at a random length: token counts differ from sample to sample."""

    fingerprint = "ragged-1"

    def __init__(self, samples: int = SAMPLES, poison: int | None = None) -> None:
        rng = np.random.default_rng(3)
        self._tokens = rng.integers(0, VOCAB, (samples, SEQ_LEN + 1))
        self._lengths = rng.integers(3, SEQ_LEN + 1, samples)
        self._poison = poison

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        tokens = self._tokens[indices]
        weights = (np.arange(SEQ_LEN) < self._lengths[indices, None]).astype(np.float32)
        if self._poison is not None:
            weights[indices == self._poison] = np.nan
        return {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": weights,
            "target_bytes": weights.copy(),
        }


def model(*, aware: str = "", **changes: Any) -> GPT:
    """The tiny GPT; ``aware`` is a scheme with whose rounding it is trained."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "vocab_size": VOCAB}
    network = GPT(ModelOptions(**{**sizes, **changes}))
    if aware:
        group = {"group_size": 8} if aware == "int4" else {}
        make_aware(network, QuantizeOptions(scheme=aware, **group), convolutions=True)
    return network


def trainer(run_dir: Path | str, *, steps: int = 8, world: World | None = None, **changes: Any) -> Trainer:
    """A trainer of the tiny run; ``changes`` go to the options that have a field of that name."""
    data = changes.pop("data", None) or RaggedTokens()
    extra = {
        name: changes.pop(name)
        for name in ("resume", "eval_data", "metrics", "transform", "flops_per_token", "distill")
        if name in changes
    }

    def take(cls: Any, **defaults: Any) -> Any:
        names = set(cls.__dataclass_fields__)
        chosen = {name: changes.pop(name) for name in list(changes) if name in names}
        return cls(**{**defaults, **chosen})

    network = changes.pop("network", None) or model(dropout=changes.pop("dropout", 0.0), **changes.pop("sizes", {}))
    asked: PlanOptions | Plan = take(PlanOptions, device="cpu", global_batch=8, precision="fp32")
    of_plan = {name: changes.pop(name) for name in list(changes) if is_plan_field(name)}
    if of_plan:  # fields that only strategy files have
        ranks = world.world_size if world else 1
        asked = changed(derive_plan(asked, world_size=ranks, device="cpu", native_bf16=False), **of_plan)
    made = Trainer(
        network,
        data,
        asked,
        objective=changes.pop("objective", next_token),
        observe=changes.pop("observe", QUIET),
        optimizer=take(OptimOptions, lr=1e-2),
        schedule=ScheduleOptions(kind="cosine", warmup_steps=min(2, steps)),
        options=take(TrainOptions, steps=steps, eval_every_steps=0),
        checkpoint=take(CheckpointOptions, every_steps=0),
        loader=take(LoaderOptions),
        run_dir=run_dir,
        world=world,
        **extra,
    )
    assert not changes, f"no option takes {sorted(changes)}"
    return made


def digest(run: Trainer) -> str:
    """Over every bit of the state but the generators; of what is spread over ranks, this rank's part."""
    state = hashlib.sha256()
    for name, tensor in sorted(run.state.global_state().items()):
        state.update(
            name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            if tensor.dim()
            else name.encode() + tensor.detach().cpu().reshape(1).view(torch.uint8).numpy().tobytes()
        )
    return state.hexdigest()


def complete(run_dir: Path | str, *, stop_after: int | None = None, **changes: Any) -> dict[str, Any]:
    """Run to the end, or leave the loop after ``stop_after``; the state's digest, losses and this rank's samples."""
    losses: list[float] = []
    samples: list[list[int]] = []
    with trainer(run_dir, **changes) as run:
        for step in run:
            losses.append(step.loss)
            samples.append(step.sample_ids.tolist())
            if step.index == stop_after:
                break
        return {"digest": digest(run), "losses": losses, "samples": samples, "step": run.state.step}


def events(run_dir: Path | str, rank: int = 0) -> list[dict[str, Any]]:
    return list(read_events(events_path(Path(run_dir), rank)).events)


def main(arguments: str) -> int:
    """For drills in processes of their own: prints the outcome as one line of JSON; the exit code is the run's."""
    given = json.loads(arguments)
    first_bad = given.pop("poison_from", None)
    hoard_from, group = given.pop("hoard_from", (None, ""))
    flip, flips_again = given.pop("flip", None), given.pop("flips_again", False)
    if "verify_every_steps" in given:
        given["observe"] = replace(QUIET, verify_every_steps=given.pop("verify_every_steps"))
    slow_disk(given.pop("fsync_s", 0.0))
    losses: list[float] = []
    samples: list[list[int]] = []
    if first_bad is not None:
        given["data"] = PoisonedFrom(first_bad)
    with trainer(given.pop("run_dir"), **given) as run:
        if flip is not None and (flips_again or os.environ["UNISONO_RESTART_COUNT"] == "0"):
            Injector(run, Flip(**flip))
        for step in run:
            losses.append(step.loss)
            samples.append(step.sample_ids.tolist())
            if step.index == hoard_from and run.world.rank and os.environ["UNISONO_RESTART_COUNT"] == "0":
                hoard(Path(group))
        rank = run.world.rank
        outcome = {"digest": digest(run), "losses": losses, "samples": samples, "step": run.state.step}
    if rank == 0:
        print(json.dumps(outcome), flush=True)
    return 75 if run.preempted else 0


def hoard(group: Path) -> None:
    """Take more memory than that control group has."""
    group.write_text(str(os.getpid()))
    taken = [bytearray(b"x") * 2**20 for _ in range(400)]
    raise AssertionError(f"{len(taken)} MiB could be had")


def slow_disk(fsync_s: float) -> None:
    """From now on each file takes that much longer to be written through."""
    fsync = os.fsync

    def slowly(fd: int) -> None:
        time.sleep(fsync_s)
        fsync(fd)

    os.fsync = slowly


class PoisonedFrom(RaggedTokens):
    """Every sample read from the ``first``-th step on has no usable loss."""

    def __init__(self, first: int) -> None:
        super().__init__()
        order = Permutation(SAMPLES, seed=0)
        self._bad = set(order(np.arange(8 * first, 8 * first + 8)).tolist())

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch = super().read(indices)
        batch["weights"][[int(i) in self._bad for i in indices]] = np.nan
        return batch


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1]))
