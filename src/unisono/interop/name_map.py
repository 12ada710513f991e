"""Weights of other frameworks' models as weights of a class of transformers: names, layouts and ``config.json``.

A ``NameMap`` is one model of one library, as its public code names the parameters. Each tensor of a file has one place in the
class, and each place its tensors: a file in which that is otherwise is refused. Where the two compute differently, the map
changes the values so that outputs are the same, or its ``config`` refuses the file. Values are read when the result's are.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from unisono.errors import CheckpointError, ConfigError, Problem, nearest_name
from unisono.interop.stored_tensor import StoredTensor, to_bytes
from unisono.sanitize import listed, quoted, shorten

Dim = int | str
Files = Mapping[str, StoredTensor]
_SHOWN: Final = 300  # characters of names in an error
_MOST: Final = 1 << 53  # of a setting: JSON keeps whole numbers below it in any program
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OWN_NAMES: Final = "the file under its own names, without --as"
# settings of a run, without their section → what they are called in config.json
_RUN_SETTINGS: Final = {
    "num_heads": "num_attention_heads",
    "seq_len": "max_position_embeddings",
    "size": "image_size",
}
# prefixes of MindSpore's optimizers, which save their state beside the weights
_OPTIMIZER_STATE: Final = re.compile(
    r"accum(_update)?|adam_[mv]|ax_|exp_avg|lamb_[mv]|linear|mean_grad|mean_square|moment[12s]?|prev|stat|step_size|vhat"
)


def same(values: Tensor) -> Tensor:
    """The values of a tensor whose layout both frameworks share."""
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A tensor of the class of transformers.

    Attributes:
        name: Its name there.
        shape: Shape of each source. A text is a number that the file decides, and the same wherever the text is.
        sources: Names of the tensors that it is made of.
        make: Their values → its values. Also called with tensors on the meta device.
    """

    name: str
    shape: tuple[Dim, ...]
    sources: tuple[str, ...]
    make: Callable[..., Tensor] = same


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A value of ``config.json`` that weights do not tell.

    Attributes:
        name: Its name.
        kind: Type of its value.
        rule: Why it must be given, or what depends on it; for errors.
        default: None: it must be given.
        choices: If any, no other value is taken.
    """

    name: str
    kind: type[int] | type[float] | type[str]
    rule: str
    default: int | float | str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A file whose tensors all have a place.

    Attributes:
        sizes: The number for each text in the shapes.
        places: Names of the places that have tensors.
        settings: Values of the map's settings.
    """

    sizes: Mapping[str, int]
    places: frozenset[str]
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class NameMap:
    """A model of a library, and the class of transformers that computes the same.

    Attributes:
        family: The name of the class's kind of model, such as "resnet".
        label: The library and its model, for people.
        find: The map's names of a file's tensors → their names in the file; None for a file of another model.
        places: The class's tensors, for the tensors of a file by the map's names.
        config: Content of ``config.json``; raises ConfigError for a model that computes something else.
        ties: Pairs of names: if a file has the first, its values must be the second's, and it has no place of its own.
        settings: What ``config`` needs beside the weights.
    """

    family: str
    label: str
    find: Callable[[Files], Mapping[str, str] | None]
    places: Callable[[Files], Sequence[Place]]
    config: Callable[[Found], dict[str, Any]]
    ties: tuple[tuple[str, str], ...] = ()
    settings: tuple[Setting, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Renamed:
    """Weights of a class of transformers.

    Attributes:
        label: The model that they are of.
        config: Content of ``config.json``.
        tensors: The tensors by name.
        left_out: Names in the file of an optimizer's state and of counters, which no model has.
    """

    label: str
    config: dict[str, Any]
    tensors: Files
    left_out: tuple[str, ...] = field(default=())


def under_own_names(tensors: Files) -> dict[str, str]:
    """The names of a file that has the map's names."""
    return {name: name for name in tensors}


def refused(label: str, given: str, *, rule: str, nearest: str) -> ConfigError:
    """The error of a model that no class of transformers computes, or whose settings are missing or wrong."""
    return ConfigError(given=f"{label}: {given}", rule=rule, consequence="nothing was written", nearest=nearest)


def rename(name_map: NameMap, source: Path, tensors: Files, given: Mapping[str, str]) -> Renamed:
    """The weights of a file as those of the map's class.

    Args:
        name_map: The map.
        source: The file, for errors.
        tensors: Its tensors by name.
        given: Values of settings, as text.

    Raises:
        CheckpointError: A tensor has no place, a place no tensor, or one has another shape or other values than it must have.
        ConfigError: A setting is missing or wrong, or the class computes something else than this model.
    """
    names = name_map.find(tensors)
    if names is None:
        raise _no_such_model(name_map.label, source, tensors, _OWN_NAMES)
    stored = {name: tensors[original] for name, original in names.items()}
    places = name_map.places(stored)
    ties = [(name, other) for name, other in name_map.ties if name in stored]
    used = {name for place in places for name in place.sources} | {name for name, _ in ties}
    left_out = [n for n in stored if n not in used and _is_no_weight(names[n], stored[n], tensors)]
    sizes: dict[str, int] = {}
    problems = [f"no place for {quoted(names[name])}" for name in stored.keys() - used - set(left_out)]
    problems += [f"no tensor {quoted(name)}" for name in used - stored.keys()]
    problems = sorted(problems)
    problems += [text for place in places for text in _wrong_shapes(place, stored, names, sizes)]
    problems += [text for name, other in ties if other in stored for text in _wrong_tie(name, other, stored, names)]
    if problems:
        raise CheckpointError(
            given=f"{source} as {name_map.label}: {listed(problems, _SHOWN)}",
            rule="each tensor has its place in the class of transformers, and each place its tensor",
            consequence="nothing was written",
            nearest=_OWN_NAMES,
        )
    _require_floats(name_map.label, source, {names[name]: stored[name] for name in stored if name in used})
    settings = _settings(name_map, given)
    found = Found(sizes=sizes, places=frozenset(place.name for place in places), settings=settings)
    return Renamed(
        label=name_map.label,
        config=name_map.config(found),
        tensors={place.name: _made(place, stored) for place in places},
        left_out=tuple(names[name] for name in left_out),
    )


def _require_floats(label: str, source: Path, tensors: Files) -> None:
    wrong = [
        f"{quoted(name)} is {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in tensors.items()
        if tensor.dtype not in _DTYPES
    ]
    if wrong:
        raise CheckpointError(
            given=f"{source} as {label}: {listed(wrong, _SHOWN)}",
            rule="weights of a model are floating-point numbers of 16, 32 or 64 bits; what scales others is not in the file",
            consequence="nothing was written",
            nearest=_OWN_NAMES,
        )


def _no_such_model(label: str, source: Path, tensors: Files, nearest: str) -> CheckpointError:
    return CheckpointError(
        given=f"{source} with {listed(map(quoted, tensors), _SHOWN)}",
        rule=f"names say which model the weights are of: {label}",
        consequence="nothing was written",
        nearest=nearest,
    )


def find_name_map(name_maps: Sequence[NameMap], family: str, source: Path, tensors: Files) -> NameMap:
    """The one map of a family whose names a file has; raises CheckpointError if there is none.

    Args:
        name_maps: The maps of all families.
        family: The family; "auto" for any.
        source: The file, for errors.
        tensors: Its tensors by name.
    """
    known = next((name_map for name_map in name_maps if name_map.find(tensors) is not None), None)
    if known is not None and family in ("auto", known.family):
        return known
    labels = "; ".join(name_map.label for name_map in name_maps if family in ("auto", name_map.family))
    nearest = f"--as {known.family}: the names are those of {known.label}" if known is not None else _OWN_NAMES
    raise _no_such_model(labels, source, tensors, nearest)


def _is_no_weight(name: str, tensor: StoredTensor, tensors: Files) -> bool:
    """Whether a tensor is a counter, or an optimizer's state of another one."""
    prefix, _, rest = name.partition(".")
    if not rest:
        return math.prod(tensor.shape) == 1
    return bool(_OPTIMIZER_STATE.fullmatch(prefix) and rest in tensors and tensors[rest].shape == tensor.shape)


def _wrong_shapes(place: Place, stored: Files, names: Mapping[str, str], sizes: dict[str, int]) -> Iterator[str]:
    """What is wrong with the shapes of a place's tensors; fills in ``sizes``."""
    for name in place.sources:
        if name not in stored:
            continue
        shape = stored[name].shape
        wanted = place.shape
        if len(shape) == len(wanted):
            wanted = tuple(
                sizes.setdefault(dim, size) if isinstance(dim, str) else dim
                for dim, size in zip(wanted, shape, strict=True)
            )
        if shape != wanted:
            yield f"{quoted(names[name])} is {list(shape)}, not [{', '.join(map(str, wanted))}]"


def _wrong_tie(name: str, other: str, stored: Files, names: Mapping[str, str]) -> Iterator[str]:
    digests = [hashlib.sha256(to_bytes(stored[each].load())).digest() for each in (name, other)]
    if digests[0] != digests[1]:
        yield f"{quoted(names[name])} has other values than {quoted(names[other])}, which are one tensor in the class"


def _made(place: Place, stored: Files) -> StoredTensor:
    sources = [stored[name] for name in place.sources]
    result = place.make(*(torch.empty(each.shape, dtype=each.dtype, device="meta") for each in sources))
    load = partial(_load, place.make, sources)
    return StoredTensor(dtype=result.dtype, shape=tuple(result.shape), load=load)


def _load(make: Callable[..., Tensor], sources: Sequence[StoredTensor]) -> Tensor:
    return make(*(each.load() for each in sources)).contiguous()


def _settings(name_map: NameMap, given: Mapping[str, str]) -> dict[str, Any]:
    known = {setting.name: setting for setting in name_map.settings}
    problems = [_unknown_setting(name_map, name, text) for name, text in given.items() if name not in known]
    values: dict[str, Any] = {}
    for setting in name_map.settings:
        try:
            values[setting.name] = _value(setting, given.get(setting.name))
        except ValueError as error:
            problems.append(
                Problem(
                    given=f"{name_map.label}: {error}",
                    rule=setting.rule,
                    consequence="nothing was written",
                    nearest=f"--set {setting.name}=…",
                )
            )
    if problems:
        raise ConfigError(*problems)
    return values


def _unknown_setting(name_map: NameMap, name: str, text: str) -> Problem:
    known = [setting.name for setting in name_map.settings]
    last = name.rpartition(".")[2]
    meant = _RUN_SETTINGS.get(last, last)
    nearest = nearest_name(last, known) if known else "the command without it"
    if meant in known:
        nearest = f"--set {meant}={text}"
    return Problem(
        given=f"--set {name}={text}",
        rule="--set of this command gives values of config.json, no settings of a run; of "
        f"{name_map.label} there {'are ' + ', '.join(known) if known else 'is none to give'}",
        consequence="nothing was written",
        nearest=nearest,
    )


def _value(setting: Setting, text: str | None) -> int | float | str:
    if text is None:
        if setting.default is None:
            raise ValueError(f"no {setting.name}")
        return setting.default
    if setting.choices and text not in setting.choices:
        raise ValueError(f"{setting.name}={text}, where there are {', '.join(setting.choices)}")
    try:
        value = setting.kind(text)
    except ValueError:
        raise ValueError(f"{setting.name}={shorten(text)}, which is no number") from None
    if isinstance(value, str) or 0 < value < _MOST:  # also for NaN
        return value
    raise ValueError(f"{setting.name}={shorten(text)}, which is not above 0 and below {_MOST:,}")
