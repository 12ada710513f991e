"""The settings of a run that change its mathematics, as recorded in its checkpoints and compared when it resumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from typing import Any, cast

import numpy as np
from torch import nn

from unisono.data.dataset import Dataset, read_samples
from unisono.optim import ScheduleOptions
from unisono.train.options import TrainOptions

# kinds of schedules whose rates depend on the number of steps
STRETCHED_SCHEDULES = ("linear", "cosine", "polynomial", "wsd")
_Flat = dict[str, Any]


def run_settings(
    *,
    optimizer: Mapping[str, Any],
    schedule: Any,
    options: TrainOptions,
    functions: Mapping[str, Any],
    model: Mapping[str, int],
    data: Dataset | None,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that changes the mathematics of a step, apart from plan and data, as JSON by dotted name.

    Args:
        optimizer: Kind, groups and clipping.
        schedule: The schedule, as it was given.
        options: Options of the step loop.
        functions: The objective and the transforms of samples and batches, by name; None is left out.
        model: ``count_modules`` of the model before it is sharded.
        data: Training data whose fingerprint does not tell its content, of which some samples are read; None for other data.
        config: Settings of the configuration that are not their defaults (see ``compared_settings``); empty from Python.
    """
    settings: dict[str, Any] = {"optimizer": dict(optimizer)}
    if isinstance(schedule, ScheduleOptions):
        settings["schedule"] = asdict(schedule)
        if schedule.kind in STRETCHED_SCHEDULES:
            settings["train.steps"] = options.steps
    else:
        settings["schedule"] = function_name(schedule)
    names = ["ema_decay", "spike_sigmas", "early_stop_patience", "loss_scale"]
    # a torch scheduler may be one that reads the evaluations
    if options.early_stop_patience or not isinstance(schedule, ScheduleOptions):
        names += ["eval_every_steps", "num_eval_samples"]
    settings |= {f"train.{name}": getattr(options, name) for name in names}
    settings |= {name: function_name(function) for name, function in functions.items() if function is not None}
    settings["data.samples"] = sample_digest(data) if data is not None and len(data) else ""
    return {**_flatten(settings, ""), "model": dict(model), "config": dict(config)}


def count_modules(model: nn.Module) -> dict[str, int]:
    """How many modules of each class and arguments the model has, such as ``Dropout(p=0.1, inplace=False)``."""
    return dict(sorted(Counter(f"{type(m).__name__}({m.extra_repr()})" for m in model.modules()).items()))


def sample_digest(data: Dataset) -> str:
    """A digest of the first, middle and last sample; empty if they cannot be read, or are not the same twice."""
    ids = np.unique(np.asarray([0, len(data) // 2, len(data) - 1]))

    def digest() -> str:
        hasher = blake2b(digest_size=16)
        for sample in read_samples(data, ids):
            for name, value in sorted(sample.items()):
                array = np.ascontiguousarray(value)
                hasher.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
        return hasher.hexdigest()

    try:
        first = digest()
        return first if first == digest() else ""
    except Exception:  # whatever a sample raises, the loader treats it as its options say
        return ""


def setting_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One text for each setting of which a run had another value than now."""
    texts = [
        f"{name} {saved.get(name)!r} then, {current.get(name)!r} now"
        for name in sorted(saved.keys() | current.keys())
        if name not in ("model", "config") and saved.get(name, _before(name, current)) != current.get(name)
    ]
    if "config" in saved:
        earlier, later = saved["config"], current["config"]
        texts += [
            f"{name} {earlier.get(name, 'default')!r} then, {later.get(name, 'default')!r} now"
            for name in sorted(earlier.keys() | later.keys())
            if earlier.get(name) != later.get(name)
        ]
    then, now = Counter(saved["model"]), Counter(current["model"])
    if then != now:
        texts.append(f"model {_modules(then - now)} then, {_modules(now - then)} now")
    return texts


def _before(name: str, current: Mapping[str, Any]) -> Any:
    """The value where a checkpoint has none: today's, for settings that earlier versions did not record."""
    return current.get(name) if name == "train.loss_scale" else None


def function_name(function: Callable[..., Any] | None) -> str:
    """Qualified name of a function or class; of a partial, with its arguments."""
    if isinstance(function, partial):
        arguments = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in function.keywords.items())]
        return f"{function_name(cast('Callable[..., Any]', function.func))}({', '.join(arguments)})"
    target = function if hasattr(function, "__qualname__") else type(function)
    return str(getattr(target, "__qualname__", target))


def _modules(counts: Counter[str]) -> str:
    shown = [f"{count} x {text}" for text, count in list(counts.items())[:3]]
    return ", ".join(shown) + (", …" if len(counts) > 3 else "") if shown else "nothing more"


def _flatten(value: Any, name: str) -> _Flat:
    if isinstance(value, Mapping):
        pairs = list(cast("Mapping[str, Any]", value).items())
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in cast("list[Any]", value)):
        pairs = [(str(n), item) for n, item in enumerate(cast("list[Any]", value))]
    else:
        return {name: list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value}
    flat: _Flat = {}
    for key, item in pairs:
        flat |= _flatten(item, f"{name}.{key}" if name else key)
    return flat
