"""The settings of a run that change its mathematics, as recorded in its checkpoints and compared when it resumes.

Functions are recorded by name here, their code in ``code_record``.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from unisono.data.dataset import Dataset, read_samples
from unisono.data.nested import leaves
from unisono.data.options import LoaderOptions
from unisono.optim import ScheduleOptions
from unisono.train.code_record import code_differences, name_of_argument
from unisono.train.options import TrainOptions

# kinds of schedules whose rates depend on the number of steps
STRETCHED_SCHEDULES = ("linear", "cosine", "polynomial", "wsd")
# recorded only where another setting makes them act
CONDITIONAL = ("train.steps", "train.eval_every_steps", "train.num_eval_samples")
# recorded by later versions only
LATER = ("train.loss_scale", "loader.max_bad_sample_frac")
# earlier versions trained pretrained masked models with another name of the same objective
RENAMED = {"objective": ("cross_entropy", "masked_token")}
NOT_FLAT = ("model", "config", "code", "data.samples")
MAX_SAMPLES = 64  # compared samples of data whose fingerprint does not tell their content
SAMPLES_S, SAMPLES_BYTES = 1.0, 64 << 20  # after which no more of them is read
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
    loader: LoaderOptions | None = None,
    teacher: Mapping[str, Any] | None = None,
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
        loader: How samples are loaded; None: by the defaults.
        teacher: Digest of the teacher and options of its term; None without a teacher.
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
    settings["loader.max_bad_sample_frac"] = (loader or LoaderOptions()).max_bad_sample_frac
    if teacher is not None:
        settings["distill"] = dict(teacher)
    flat = _flatten(settings, "")
    flat["data.samples"] = sample_digests(data) if data is not None and len(data) else {}
    return {**flat, "model": dict(model), "config": dict(config)}


def count_modules(model: nn.Module) -> dict[str, int]:
    """How many modules of each class and arguments the model has, such as ``Dropout(p=0.1, inplace=False)``."""
    return dict(sorted(Counter(f"{type(m).__name__}({m.extra_repr()})" for m in model.modules()).items()))


def sample_digests(data: Dataset) -> dict[str, str]:
    """Digests by number of up to 64 samples that are spread over the data; of fewer, if they take long or are large.

    Samples that cannot be read are left out, and all of them if one is not the same twice. No random generator is changed.
    """
    began_s, size = time.monotonic(), 0
    digests: dict[str, str] = {}
    numbers = np.unique(np.linspace(0, len(data) - 1, min(len(data), MAX_SAMPLES)).astype(np.int64))
    # from coarse to fine, so that also few of them are spread: bits of the place in reverse
    with _generators_kept():
        for place in sorted(range(len(numbers)), key=lambda place: f"{place:06b}"[::-1]):
            if time.monotonic() - began_s > SAMPLES_S or size > SAMPLES_BYTES:
                break
            try:
                first, length = _sample_digest(data, numbers[place : place + 1])
                second, _ = _sample_digest(data, numbers[place : place + 1])
            except Exception:  # whatever a sample raises, the loader treats it as its options say
                continue
            if first != second:
                return {}
            size += length
            digests[str(numbers[place])] = first
    return digests


def _sample_digest(data: Dataset, number: Any) -> tuple[str, int]:
    hasher, size = blake2b(digest_size=8), 0
    for name, value in sorted(leaves(read_samples(data, number)[0], ""), key=lambda leaf: leaf[0]):
        array = np.ascontiguousarray(value)
        if array.dtype.hasobject:  # its bytes are addresses
            array = np.ascontiguousarray(type(value).__qualname__)
        hasher.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
        size += array.nbytes
    return hasher.hexdigest(), size


@contextmanager
def _generators_kept() -> Generator[None]:
    """Afterwards, the generators are as they were: how many samples are read depends on the time."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def setting_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One text for each setting of which a run had another value than now."""
    saved, current = _with_one_schedule(saved, current)
    texts: list[str] = []
    same: set[str] = {"model"}  # names of which also the code is compared
    for name in sorted(saved.keys() | current.keys()):
        if name in NOT_FLAT or (name in CONDITIONAL and (name not in saved or name not in current)):
            continue
        if name in LATER and name not in saved:
            continue
        then_now = saved.get(name), current.get(name)
        if then_now[0] != then_now[1] and then_now != RENAMED.get(name):
            texts.append(f"{name} {_shown(saved, name)} then, {_shown(current, name)} now")
        else:
            same.add(name)
    texts += _sample_differences(saved.get("data.samples"), current.get("data.samples"))
    if "config" in saved:
        earlier, later = saved["config"], current["config"]
        texts += [
            f"{name} {earlier.get(name, 'default')!r} then, {later.get(name, 'default')!r} now"
            for name in sorted(earlier.keys() | later.keys())
            if earlier.get(name) != later.get(name)
        ]
    then, now = Counter(saved["model"]), Counter(current["model"])
    if then != now:
        same.discard("model")
        texts.append(f"model {_modules(then - now)} then, {_modules(now - then)} now")
    return texts + code_differences(saved.get("code", {}), current.get("code", {}), same)


def _with_one_schedule(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[_Flat, _Flat]:
    """Both with the kind of schedule only, where one has options and the other a function."""

    def by_kind(settings: Mapping[str, Any]) -> _Flat:
        kept = {name: value for name, value in settings.items() if not name.startswith("schedule.")}
        return {"schedule": settings.get("schedule.kind"), **kept}

    if ("schedule" in saved) == ("schedule" in current):
        return dict(saved), dict(current)
    return by_kind(saved), by_kind(current)


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings[name]) if name in settings else "nothing"


def _sample_differences(saved: Any, current: Any) -> list[str]:
    """Samples that are others now, of those that both runs have read; earlier versions recorded a text."""
    if not isinstance(saved, Mapping) or not isinstance(current, Mapping):
        return []
    then, now = cast("Mapping[str, str]", saved), cast("Mapping[str, str]", current)
    both = sorted(then.keys() & now.keys(), key=int)
    changed = [number for number in both if then[number] != now[number]]
    if not changed:
        return []
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return [f"data.samples: sample {changed[0]}{more} of the {len(both)} that are compared changed"]


def function_name(function: Callable[..., Any] | None) -> str:
    """Qualified name of a function or class; of a partial, with its arguments."""
    if isinstance(function, partial):
        named = [f"{name}={name_of_argument(value)}" for name, value in function.keywords.items()]
        arguments = [*map(name_of_argument, function.args), *named]
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
