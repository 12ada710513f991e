"""Record optimizer trajectories of MXNet 1.9.1 or MindSpore 2.10 into ``tests/optim/fixtures/<package>.json``.

Runs with the peer's own interpreter, never with ours (MXNet needs numpy < 1.24):

    python3.11 -m venv mx && mx/bin/pip install mxnet==1.9.1 'numpy<1.24' opencv-python-headless==4.7.0.72
    mx/bin/python tests/peers/make_optim_fixtures.py --package mxnet
    python3.11 -m venv ms && ms/bin/pip install mindspore==2.10.0 'numpy<2'
    ms/bin/python tests/peers/make_optim_fixtures.py --package mindspore

Every case starts from the same three tensors and feeds the same gradients, whatever the weights are: the trajectory is
then a function of the update rule alone. Values are float32, written with the fewest digits that read back exactly.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

STEPS = 8
CONSTANT = [0.125] * STEPS
CHANGING = [0.0625, 0.125, 0.25, 0.125, 0.125, 0.0625, 0.03125, 0.03125]
SHAPES = {"layer_weight": (2, 3), "zero_weight": (2, 2), "layer_bias": (3,)}  # *_bias: exempt from decay by the peers

Trajectory = dict[str, list[list[float]]]
Run = Callable[[list[float]], Trajectory]


def problem() -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Initial tensors and one set of gradients per step: multiples of 1/64 from a fixed congruential sequence."""
    state = 12345

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        nonlocal state
        values = []
        for _ in range(int(np.prod(shape))):
            state = (1103515245 * state + 12345) % 2**31
            values.append(((state >> 16) % 257 - 128) / 64)
        return np.array(values, dtype=np.float32).reshape(shape)

    initial = {name: draw(shape) for name, shape in SHAPES.items()}
    initial["zero_weight"][:] = 0  # norm 0: every trust ratio has a rule for it
    return initial, [{name: draw(shape) for name, shape in SHAPES.items()} for _ in range(STEPS)]


def exact(array: np.ndarray) -> list[float]:
    return [float(str(value)) for value in np.asarray(array, dtype=np.float32).ravel()]


def mxnet_cases() -> tuple[str, dict[str, tuple[str, dict[str, object], Run]]]:
    import mxnet as mx

    initial, gradients = problem()
    names = list(SHAPES)

    def run(make: Callable[[], object], *, together: bool) -> Run:
        def play(lrs: list[float]) -> Trajectory:
            optimizer = make()
            optimizer.idx2name = dict(enumerate(names))  # type: ignore[attr-defined]
            optimizer.set_wd_mult({})  # type: ignore[attr-defined]
            weights = [mx.nd.array(initial[name]) for name in names]
            states = [optimizer.create_state_multi_precision(i, w) for i, w in enumerate(weights)]  # type: ignore[attr-defined]
            out: Trajectory = {name: [] for name in names}
            for step, lr in enumerate(lrs):
                optimizer.set_learning_rate(lr)  # type: ignore[attr-defined]
                grads = [mx.nd.array(gradients[step][name]) for name in names]
                if together:
                    optimizer.update_multi_precision([0, 1, 2], weights, grads, states)  # type: ignore[attr-defined]
                else:
                    for i in range(3):
                        optimizer.update_multi_precision(i, weights[i], grads[i], states[i])  # type: ignore[attr-defined]
                for name, weight in zip(names, weights, strict=True):
                    out[name].append(exact(weight.asnumpy()))
            return out

        return play

    cases: dict[str, tuple[str, dict[str, object], Run]] = {}

    def case(name: str, kind: str, *, together: bool = False, **settings: object) -> None:
        cases[name] = (
            kind,
            {**settings, "together": together},
            run(lambda: getattr(mx.optimizer, kind)(**settings), together=together),
        )

    case("sgd", "SGD")
    case("sgd_decay", "SGD", wd=0.125)
    case("sgd_momentum", "SGD", momentum=0.875, wd=0.125)
    case("nag", "NAG", momentum=0.875, wd=0.125)
    case("adam", "Adam", epsilon=1e-8)
    case("adam_decay", "Adam", wd=0.125, epsilon=1e-8)
    case("adam_large_epsilon", "Adam", epsilon=0.1)
    case("lars", "LARS", momentum=0.875, wd=0.125, eta=0.25)
    case("lars_together", "LARS", momentum=0.875, wd=0.125, eta=0.25, together=True)
    case("lars_uncorrected", "LARS", momentum=0.875, wd=0.125, eta=0.25, momentum_correction=False)
    case("lars_epsilon", "LARS", momentum=0.875, wd=0.125, eta=0.25, eps=0.5, momentum_correction=False)
    case("lamb", "LAMB", wd=0.125)
    case("lamb_together", "LAMB", wd=0.125, together=True)
    case("lamb_uncorrected", "LAMB", wd=0.125, bias_correction=False)
    case("lamb_bounds", "LAMB", wd=0.125, lower_bound=1.5, upper_bound=2.0)

    def adamw(lrs: list[float]) -> Trajectory:
        weights = {name: mx.nd.array(initial[name]) for name in names}
        states = {name: (mx.nd.zeros(SHAPES[name]), mx.nd.zeros(SHAPES[name])) for name in names}
        out: Trajectory = {name: [] for name in names}
        for step, lr in enumerate(lrs):
            for name in names:
                grad = mx.nd.array(gradients[step][name])
                mean, var = states[name]
                one = mx.nd.ones((1,))
                mx.nd.contrib.adamw_update(
                    weights[name], grad, mean, var, one, lr=lr, wd=0.0625, eta=0.5, epsilon=1e-6, out=weights[name]
                )
                out[name].append(exact(weights[name].asnumpy()))
        return out

    cases["adamw_operator"] = ("contrib.adamw_update", {"wd": 0.0625, "eta": 0.5, "epsilon": 1e-6}, adamw)
    return mx.__version__, cases


def mxnet_schedules() -> dict[str, list[float]]:
    """Values at ``num_update`` 0 … 11; MXNet's first update has ``num_update`` 1."""
    from mxnet import lr_scheduler as lr

    def values(make: Callable[[], Callable[[int], float]]) -> list[float]:
        scheduler = make()  # stateful: one object, asked in order, as a run does
        return [float(scheduler(update)) for update in range(12)]

    return {
        "factor": values(lambda: lr.FactorScheduler(2, 0.5, base_lr=1.0)),
        "factor_warmup": values(lambda: lr.FactorScheduler(100, 0.5, base_lr=1.0, warmup_steps=4)),
        "cosine": values(lambda: lr.CosineScheduler(10, base_lr=1.0)),
        "cosine_warmup": values(lambda: lr.CosineScheduler(10, base_lr=1.0, warmup_steps=4)),
        "poly": values(lambda: lr.PolyScheduler(10, base_lr=1.0, pwr=2, final_lr=0.25)),
    }


def mindspore_schedules() -> dict[str, list[float]]:
    """Values at ``global_step`` 0 … 11, which is where MindSpore's first update is; lists as long as they are."""
    import mindspore as ms
    from mindspore import nn

    def values(schedule: Callable[[object], object]) -> list[float]:
        return [float(str(schedule(ms.Tensor(step, ms.int32)))) for step in range(12)]

    return {
        "warmup": values(nn.WarmUpLR(1.0, 4)),
        "cosine": values(nn.CosineDecayLR(0.25, 1.0, 10)),
        "polynomial": values(nn.PolynomialDecayLR(1.0, 0.25, 10, 2.0)),
        "cosine_list": nn.cosine_decay_lr(0.01, 0.1, 10, 2, 4),
        "warmup_list": nn.warmup_lr(0.1, 8, 2, 3),
    }


def mindspore_cases() -> tuple[str, dict[str, tuple[str, dict[str, object], Run]]]:
    import mindspore as ms
    from mindspore import experimental, mint, nn

    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    initial, gradients = problem()
    names = list(SHAPES)

    def run(make: Callable[[list[object], object], object], *, set_lr: bool) -> Run:
        def play(lrs: list[float]) -> Trajectory:
            weights = [ms.Parameter(ms.Tensor(initial[name]), name=name) for name in names]
            rate: object = lrs[0] if len(set(lrs)) == 1 or set_lr else lrs
            optimizer = make(list(weights), rate)
            out: Trajectory = {name: [] for name in names}
            for step, lr in enumerate(lrs):
                if set_lr:
                    for group in optimizer.param_groups:  # type: ignore[attr-defined]
                        ms.ops.assign(group["lr"], ms.Tensor(lr, ms.float32))
                optimizer(tuple(ms.Tensor(gradients[step][name]) for name in names))  # type: ignore[operator]
                for name, weight in zip(names, weights, strict=True):
                    out[name].append(exact(weight.asnumpy()))
            return out

        return play

    def exempt(weights: list[object], decay: float) -> list[dict[str, object]]:
        """Decay for the weights, none for the bias, in the given order."""
        return [{"params": weights[:2], "weight_decay": decay}, {"params": weights[2:], "weight_decay": 0.0}]

    cases: dict[str, tuple[str, dict[str, object], Run]] = {}

    def case(name: str, kind: str, *, decay: float = 0.0, **settings: object) -> None:
        make = lambda weights, lr: getattr(nn, kind)(exempt(weights, decay), learning_rate=lr, **settings)  # noqa: E731
        cases[name] = (f"nn.{kind}", {**settings, "weight_decay": decay}, run(make, set_lr=False))

    case("sgd_momentum", "SGD", decay=0.125, momentum=0.875)
    case("sgd_nesterov", "SGD", decay=0.125, momentum=0.875, nesterov=True)
    case("momentum", "Momentum", decay=0.125, momentum=0.875)
    case("momentum_nesterov", "Momentum", decay=0.125, momentum=0.875, use_nesterov=True)
    case("adam", "Adam")
    case("adam_decay", "Adam", decay=0.125)
    case("adam_large_epsilon", "Adam", eps=0.1)
    case("adam_weight_decay", "AdamWeightDecay", decay=0.125)
    case("lamb", "Lamb", decay=0.125)

    def lars(weights: list[object], lr: object) -> object:
        inner = nn.Momentum(exempt(weights, 0.125), learning_rate=lr, momentum=0.875)
        return nn.LARS(inner, epsilon=1e-5, coefficient=0.25)

    cases["lars"] = (
        "nn.LARS(nn.Momentum)",
        {"weight_decay": 0.125, "momentum": 0.875, "epsilon": 1e-5, "coefficient": 0.25},
        run(lars, set_lr=False),
    )

    for label, module in (("mint", mint.optim), ("experimental", experimental.optim)):

        def adamw(weights: list[object], lr: object, module: object = module) -> object:
            return module.AdamW(exempt(weights, 0.125), lr=lr, betas=(0.9, 0.999), eps=1e-8)  # type: ignore[attr-defined]

        cases[f"{label}_adamw"] = (f"{label}.optim.AdamW", {"weight_decay": 0.125}, run(adamw, set_lr=True))
    return ms.__version__, cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", choices=["mxnet", "mindspore"], required=True)
    package = parser.parse_args().package
    version, cases = mxnet_cases() if package == "mxnet" else mindspore_cases()
    schedules = mxnet_schedules() if package == "mxnet" else mindspore_schedules()
    initial, gradients = problem()
    recorded: dict[str, object] = {}
    for name, (kind, settings, play) in cases.items():
        for label, lrs in (("constant_lr", CONSTANT), ("changing_lr", CHANGING)):
            try:
                recorded[f"{name}/{label}"] = {
                    "optimizer": kind,
                    "settings": settings,
                    "lr": lrs,
                    "trajectory": play(lrs),
                }
            except Exception as error:  # a peer may have no CPU kernel: that, too, is a fact worth keeping
                reason = f"{type(error).__name__}: {' '.join(str(error).replace('-', ' ').split())}"
                recorded[f"{name}/{label}"] = {
                    "optimizer": kind,
                    "settings": settings,
                    "lr": lrs,
                    "unsupported": reason[:200],
                }
                print(name, label, reason, file=sys.stderr)
    document = {
        "package": package,
        "versions": {package: version, "numpy": np.__version__, "python": platform.python_version()},
        "shapes": SHAPES,
        "initial": {name: exact(value) for name, value in initial.items()},
        "gradients": {name: [exact(step[name]) for step in gradients] for name in SHAPES},
        "cases": recorded,
        "schedules": schedules,
    }
    path = Path(__file__).parent.parent / "optim" / "fixtures" / f"{package}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = json.dumps(document, separators=(",", ":")).replace('},"', '},\n"').replace(']],"', ']],\n"')
    path.write_text(lines + "\n", encoding="utf-8")
    print(f"wrote {path} ({len(recorded)} trajectories, {path.stat().st_size} bytes)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
