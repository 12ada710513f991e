"""Where training ends under every way of synchronising workers, compared with plain synchronous sums. Prints JSON.

    python -m benchmarks.kvstore.convergence [--models gpt,resnet] [--ways int8,DiLoCo] [--seeds 3] [--steps 256]

Real runs of the Trainer in processes of one thread each, two workers for ``dist_sync`` and ``dist_local``, four and a server for
``dist_async``. Equal everywhere: samples of a step and of the run, their order, initial values by seed, schedule, optimizer.
What a way does differently it does here too: an asynchronous run makes four updates for each step of the others, each from a
quarter of its samples, and of local steps each worker makes its own from its half.

Learning rates are those of the plain sums, found once for each optimizer, but where updates are four times as many: they are
divided by 4 for SGD and by 2 for AdamW (linear and square root of the batch: Goyal et al. 2017, Malladi et al. 2022). Two lines
show what happens where nothing is divided, and whether staleness_lr_decay, which divides by 1 + staleness, makes up for it.
1 and 2 bits do not go with AdamW (docs/compression.md): on the GPT they are compared with sums under SGD. They and ``topk`` have
two lines, with the rate of the plain sums and a quarter of it, both compared with the same sums: what a codec holds back is late,
and late gradients may want small steps.

Losses are held-out, after half the steps and all, a number for each seed. The band of an optimizer is two standard deviations
between seeds of plain sums above their mean. ``over_plain`` is the mean difference to plain sums of the same seed; a way is
within the band where that is at most two standard deviations. Synchronous runs repeat bit for bit, asynchronous ones do not.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import secrets
import socket
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.dist import JobSpec

MODELS = ("gpt", "resnet")
ASYNC_WORKERS, H = 4, 16
BAND_SIGMAS = 2.0
_TIMEOUT_S = 600.0
# of the steps asked for; the ResNet's are the cheaper ones
_LENGTHS = {"gpt": 1, "resnet": 2}
# what a run imports, once for all of them; the compiler comes with the first optimizer
_WARM = ("benchmarks.kvstore.learners", "unisono.kvstore.server.__main__", "torch._dynamo")
_LR = {("gpt", "adamw"): 1e-2, ("gpt", "sgd"): 0.5, ("resnet", "sgd"): 0.1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One line: what the plan says, with how many workers. ``coarse``: not with AdamW. ``rescaled``: with the learning rate of
    its smaller updates. ``slower``: with that part of the rate."""

    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    workers: int = 2
    coarse: bool = False
    rescaled: bool = False
    slower: float = 1.0

    def optimizer(self, model: str) -> str:
        """The best one that it goes with."""
        return "sgd" if model == "resnet" or self.coarse else "adamw"

    def lr(self, model: str) -> float:
        """By the rule above."""
        optimizer = self.optimizer(model)
        fewer = ASYNC_WORKERS if optimizer == "sgd" else math.sqrt(ASYNC_WORKERS)
        return _LR[model, optimizer] / self.slower / (fewer if self.rescaled else 1.0)


def _compressed(codec: str, *, coarse: bool = False, slower: float = 1.0) -> Way:
    return Way(plan={"compression": codec}, coarse=coarse, slower=slower)


def _asynchronous(*, rescaled: bool = True, **more: Any) -> Way:
    return Way(plan={"sync": "dist_async", **more}, workers=ASYNC_WORKERS, rescaled=rescaled)


_COARSE = ("2bit:rms*1.5", "1bit")
PLAIN, PLAIN_SGD = "dist_sync", "dist_sync with SGD"
WAYS: Mapping[str, Way] = {
    PLAIN: Way(),
    PLAIN_SGD: Way(coarse=True),
    **{f"dist_sync, {codec}": _compressed(codec) for codec in ("fp16", "bf16", "int8", "topk:0.01", "powersgd:4")},
    **{f"dist_sync, {codec}": _compressed(codec, coarse=True) for codec in _COARSE},
    **{
        f"dist_sync, {codec}, learning rate / 4": _compressed(codec, coarse=codec in _COARSE, slower=4.0)
        for codec in ("topk:0.01", *_COARSE)
    },
    "dist_async": _asynchronous(),
    "dist_async, learning rate not divided": _asynchronous(rescaled=False),
    "dist_async, staleness 2": _asynchronous(staleness=2),
    "dist_async, staleness 2, staleness_lr_decay": _asynchronous(staleness=2, staleness_lr_decay=True),
    "dist_async, staleness 2, staleness_lr_decay, learning rate not divided": _asynchronous(
        rescaled=False, staleness=2, staleness_lr_decay=True
    ),
    "dist_async, int8": _asynchronous(compression="int8"),
    f"dist_local, LocalSGD H={H}": Way(
        plan={"sync": "dist_local", "local_steps": H, "outer_lr": 1.0, "outer_momentum": 0.0}
    ),
    f"dist_local, DiLoCo H={H}": Way(plan={"sync": "dist_local", "local_steps": H}),
}


def ways_of(model: str) -> dict[str, Way]:
    """Those that say something about this model: one whose own optimizer is SGD has one line of plain sums."""
    return {name: way for name, way in WAYS.items() if name != PLAIN_SGD or model == "gpt"}


@contextmanager
def _server(context: Any, folder: Path) -> Iterator[dict[str, str]]:
    """A parameter server, killed at the end; what its workers find in their environment."""
    secret = folder / "secret"
    with open(os.open(secret, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        common = {"UNISONO_SECRET_FILE": str(secret), "UNISONO_SERVER_ADDRESSES": address, "UNISONO_SERVERS": "1"}
        process = context.Process(target=serve, args=(listener, folder / "server.log", common))
        process.start()
    try:
        yield common
    finally:
        process.kill()
        process.join()


def serve(listener: socket.socket, log: Path, environ: Mapping[str, str]) -> None:
    """Be the server."""
    from unisono.kvstore.server.__main__ import main as serve_until_killed

    end_with_starter()
    sys.stderr = log.open("w")
    own = {"UNISONO_SERVER": "0", "UNISONO_RESTART_COUNT": "0", "UNISONO_LISTEN_FD": str(listener.detach())}
    os.environ.update({**environ, **own})
    sys.exit(serve_until_killed())


def end_with_starter() -> None:
    """However the benchmark ends, this process does not stay."""
    starter = multiprocessing.parent_process()
    assert starter is not None

    def watch() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _job(rank: int, workers: int, port: int) -> JobSpec:
    return JobSpec(
        run_id="convergence",
        rank=rank,
        local_rank=rank,
        world_size=workers,
        local_world=workers,
        master_port=port,
        source="unisono",
    )


class Runs:
    """Starts runs in processes that have torch already."""

    def __init__(self, steps: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self._steps, self._context = steps, multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_WARM))
        self._workers = ProcessPoolExecutor(ASYNC_WORKERS, self._context, end_with_starter)

    def losses(self, model: str, way: Way, seed: int) -> tuple[float, float]:
        """Held-out loss after half the steps and all. Raises RuntimeError where a run has no such losses."""
        from benchmarks.kvstore.learners import Learning, learn

        from unisono.observe.events import events_path, read_events

        steps = self._steps * _LENGTHS[model]
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as path:
            folder = Path(path)
            learning = Learning(
                model=model,
                optimizer=way.optimizer(model),
                lr=way.lr(model),
                plan=way.plan,
                seed=seed,
                steps=steps,
                run_dir=str(folder / "run"),
            )
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            asynchronous = way.plan.get("sync") == "dist_async"
            with _server(self._context, folder) if asynchronous else nullcontext({}) as servers:
                ranks = [
                    self._workers.submit(learn, learning, _job(rank, way.workers, port).environ() | servers)
                    for rank in range(way.workers)
                ]
                for rank in ranks:
                    rank.result(_TIMEOUT_S)
            found = {
                event["step"]: float(event["eval/loss"])
                for rank in range(way.workers)
                for event in read_events(events_path(folder / "run", rank)).events
                if event["kind"] == "eval"
            }
        if set(found) != {steps // 2, steps}:
            raise RuntimeError(f"{model}, {way}: evaluated at {sorted(found)}")
        return found[steps // 2], found[steps]

    def close(self) -> None:
        """End the processes."""
        self._workers.shutdown()


def compared(
    model: str, losses: Mapping[str, list[tuple[float, float]]], ways: Mapping[str, Way]
) -> dict[str, dict[str, Any]]:
    """Each way's losses and those of plain sums under the same optimizer."""
    rows: dict[str, dict[str, Any]] = {}
    for name, found in losses.items():
        way = ways[name]
        optimizer = way.optimizer(model)
        plain = losses[PLAIN_SGD if optimizer == "sgd" and model == "gpt" else PLAIN]
        half, final = zip(*found, strict=True)
        sigma = statistics.stdev(end for _, end in plain)
        over = statistics.mean(end - other for (_, end), (_, other) in zip(found, plain, strict=False))
        like = statistics.mean(other for _, (_, other) in zip(found, plain, strict=False))
        rows[name] = {
            "optimizer": optimizer,
            "workers": way.workers,
            "lr": way.lr(model),
            "losses": [round(loss, 4) for loss in final],
            "half_losses": [round(loss, 4) for loss in half],
            "mean": round(statistics.mean(final), 4),
            "half_mean": round(statistics.mean(half), 4),
            "spread": round(statistics.stdev(final), 4) if len(final) > 1 else None,
            "over_plain": round(over, 4),
            "ratio": round(1 + over / like, 4),
            "band": round(BAND_SIGMAS * sigma, 4),
            "within_band": over <= BAND_SIGMAS * sigma,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda given: given.split(","), default=list(MODELS))
    parser.add_argument("--ways", default="", help="parts of names, with commas between; plain sums always run")
    parser.add_argument("--seeds", type=int, default=3, help="of a way; plain sums have twice as many")
    parser.add_argument("--steps", type=int, default=256, help="of the GPT; the ResNet makes twice as many")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.steps < 2 * H or arguments.steps % (2 * H):
        parser.error(f"seeds are 1 or more, and steps a multiple of {2 * H}, so that rounds end where losses are taken")
    from benchmarks.kvstore import learners

    asked = [part.strip() for part in arguments.ways.split(",") if part.strip()]
    runs = Runs(arguments.steps)
    models: dict[str, Any] = {}
    try:
        for model in arguments.models:
            ways = {
                name: way
                for name, way in ways_of(model).items()
                if name in (PLAIN, PLAIN_SGD) or not asked or any(part in name for part in asked)
            }
            losses: dict[str, list[tuple[float, float]]] = {}
            for name, way in ways.items():
                seeds = range(arguments.seeds * (2 if name in (PLAIN, PLAIN_SGD) else 1))
                losses[name] = [runs.losses(model, way, seed) for seed in seeds]
                print(f"{model}: {name}: {[round(end, 3) for _, end in losses[name]]}", file=sys.stderr, flush=True)
            models[model] = {
                "parameters": sum(p.numel() for p in learners.build(model).parameters()),
                "steps": arguments.steps * _LENGTHS[model],
                "batch": learners.BATCH[model],
                "knowing_nothing": math.log(learners.SYMBOLS if model == "gpt" else learners.CLASSES),
                "knowing_all": learners.least_loss(model),
                "ways": compared(model, losses, ways),
            }
    finally:
        runs.close()
    print(json.dumps({"models": models}, indent=1))


if __name__ == "__main__":
    main()
