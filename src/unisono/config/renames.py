"""Old names of options and of plan fields, and the one reader that turns them into today's.

A configuration file, variable or override with an old key, a strategy file of version 2, and the plan that an old checkpoint
holds are all read through here. The reader returns what it renamed, and ``announce`` prints it in one line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from unisono.errors import ConfigError, Problem

if TYPE_CHECKING:
    from unisono.config.sources import SourceEntry
    from unisono.config.toml_file import KeyPath

# old dotted key of an option or a section → new one; None: the option is gone, and a value given for it is ignored
OPTIONS: Mapping[str, str | None] = {
    "parts": "components",
    "model.layers": "model.num_layers",
    "model.heads": "model.num_heads",
    "model.kv_heads": "model.num_kv_heads",
    "model.experts": "model.num_experts",
    "model.experts_per_token": "model.num_experts_per_token",
    "loader.workers": "loader.num_workers",
    "loader.max_bad_frac": "loader.max_bad_sample_frac",
    "plan.damping": "plan.staleness_lr_decay",
    "plan.fragments": "plan.num_fragments",
    "plan.overlap_steps": "plan.outer_delay_steps",
    "train.eval_samples": "train.num_eval_samples",
    "launch.processes": "launch.num_processes",
    "launch.threads": "launch.num_threads",
    "launch.servers": "launch.num_servers",
    "launch.replicas": "launch.num_replicas",
    "launch.numa": None,
    "sample": None,
}
# new dotted key → old value → new value
OPTION_VALUES: Mapping[str, Mapping[str, str]] = {"data.packing": {"offsets": "sliding"}}

# field of a plan of version 2 → dotted name in version 3
PLAN_FIELDS: Mapping[str, str] = {
    **{name: f"mesh.{name}" for name in ("device", "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
    **{name: f"batch.{name}" for name in ("global_batch", "micro_batch", "accumulation")},
    **{name: f"fsdp.{name}" for name in ("zero", "shard_threshold_numel", "prefetch_blocks")},
    **{name: f"sync.{name}" for name in ("bucket_bytes", "compression", "staleness", "local_steps")},
    **{name: f"sync.{name}" for name in ("outer_lr", "outer_momentum")},
    **{name: f"tensor_parallel.{name}" for name in ("sequence_parallel", "rules", "placements")},
    **{name: f"backend.{name}" for name in ("compile", "tf32", "autotune", "channels_last")},
    "schedule": "pipeline.schedule",
    "splits": "pipeline.layers_per_stage",
    "weights": "pipeline.block_costs",
    "unsharded": "fsdp.ignored_modules",
    "precision": "precision.compute",
    "dtypes": "precision.dtype_rules",
    "recompute": "recompute.mode",
    "recompute_modules": "recompute.modules",
    "recompute_blocks": "recompute.blocks_per_stage",
    "recompute_keep": "recompute.saved_ops",
    "offload": "recompute.offload",
    "sync": "sync.kind",
    "gradients": "sync.reduction",
    "damping": "sync.staleness_lr_decay",
    "fragments": "sync.num_fragments",
    "overlap_steps": "sync.outer_delay_steps",
}
# field of the rule "pair" in version 2 → field of the rule "colwise_rowwise" in version 3
RULE_FIELDS: Mapping[str, str] = {
    "column": "colwise",
    "row": "rowwise",
    "shared": "kv_colwise",
    "fused": "fused_colwise",
    "units": "num_heads_attr",
    "shared_units": "num_kv_heads_attr",
    "divided": "size_attrs",
    "ratio": "kv_group_size_attr",
    "enter": "input_module",
}
_PLAN_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionRenames:
    """What ``OPTIONS`` and ``OPTION_VALUES`` hold, for one options class."""

    keys: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])

    def apply(self, entries: Sequence[SourceEntry], renamed: list[str]) -> list[SourceEntry]:
        """The entries of one source under today's names; adds to ``renamed``. Raises ConfigError where a key is given in both
        forms."""
        problems: list[Problem] = []
        result = list(entries)
        for old, new in self.keys.items():
            result = _rename(result, old, new, renamed, problems)
        for key, values in self.values.items():
            result = [_translate(entry, key, values, renamed) for entry in result]
        if problems:
            raise ConfigError(*problems)
        return result

    @contextmanager
    def keywords(self, sections: Mapping[str, type], renamed: list[str]) -> Generator[None]:
        """Inside, the options classes of ``sections`` take old keyword arguments too."""
        originals: dict[type, Any] = {}
        for section, cls in sections.items():
            inside = {
                key.rpartition(".")[2]: new for key, new in self.keys.items() if key.rpartition(".")[0] == section
            }
            if inside and cls not in originals:
                originals[cls] = cls.__init__
                cast(Any, cls).__init__ = _renaming(cls.__init__, section, inside, renamed)
        try:
            yield
        finally:
            for cls, original in originals.items():
                cast(Any, cls).__init__ = original


def announce(where: str, renamed: Iterable[str]) -> None:
    """Print the migration line, if anything was renamed: once in a run, by rank 0 or by the launcher that started it."""
    text = ", ".join(dict.fromkeys(renamed))
    numbered = any(os.environ.get(name, "0") != "0" for name in _RANK_VARIABLES)
    if not text or numbered or "UNISONO_RANK" in os.environ or (where, text) in _announced:
        return
    _announced.add((where, text))
    logging.getLogger("unisono").warning("%s uses names of an earlier version, which were read as: %s", where, text)


_announced: set[tuple[str, str]] = set()
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "DMLC_WORKER_ID")


def _rename(
    entries: list[SourceEntry], old: str, new: str | None, renamed: list[str], problems: list[Problem]
) -> list[SourceEntry]:
    """The entries with what stands under ``old`` moved to ``new``."""
    source, target = tuple(old.split(".")), tuple(new.split(".")) if new else ()
    if not any(_at(entry, source) for entry in entries):
        return entries
    renamed.append(f"{old} → {new or 'nothing (this option is gone)'}")
    present = next((entry for entry in entries if new and _at(entry, target)), None)
    result: list[SourceEntry] = []
    for entry in entries:
        value = _at(entry, source)
        if value is None:
            result.append(entry)
            continue
        if present is not None:
            problems.append(_both(entry, present, old, new or "", value[0]))
        if len(entry.path) < len(source):
            result.append(replace(entry, raw=_without(entry.raw, source[len(entry.path) :])))
        if new:
            result.append(_moved(entry, source, target, value[0]))
    return result


def _moved(entry: SourceEntry, source: KeyPath, target: KeyPath, raw: Any) -> SourceEntry:
    below = entry.path[len(source) :]

    def origin(path: KeyPath) -> str:
        return entry.origin((*source, *path[len(target) :]))

    return replace(entry, path=(*target, *below), raw=raw, origin=origin)


def _at(entry: SourceEntry, path: KeyPath) -> tuple[Any] | None:
    """The value that ``entry`` gives at or below ``path``, in a tuple; None where it gives none."""
    if entry.path[: len(path)] == path:
        return (entry.raw,)
    if path[: len(entry.path)] != entry.path:
        return None
    raw = entry.raw
    for name in path[len(entry.path) :]:
        if not isinstance(raw, Mapping) or name not in raw:
            return None
        raw = cast("Mapping[str, Any]", raw)[name]
    return (raw,)


def _without(raw: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
    first, *rest = path
    return {
        name: _without(item, tuple(rest)) if name == first else item
        for name, item in raw.items()
        if name != first or rest
    }


def _translate(entry: SourceEntry, key: str, values: Mapping[str, str], renamed: list[str]) -> SourceEntry:
    path = tuple(key.split("."))
    value = _at(entry, path)
    if value is None or not isinstance(value[0], str) or value[0] not in values:
        return entry
    new = values[value[0]]
    renamed.append(f"{key} {value[0]!r} → {new!r}")
    raw: Any = new
    for depth in range(len(path), len(entry.path), -1):
        around: Any = entry.raw
        for name in path[len(entry.path) : depth - 1]:
            around = around[name]
        raw = {**around, path[depth - 1]: raw}
    return replace(entry, raw=raw)


def _renaming(
    original: Callable[..., None], section: str, names: Mapping[str, str | None], renamed: list[str]
) -> Callable[..., None]:
    """``original``, the initialiser of an options class, taking keywords by their old names too."""

    @wraps(original)
    def init(self: object, *args: Any, **keywords: Any) -> None:
        for name in keywords.keys() & names.keys():
            old, new = (f"{section}.{name}" if section else name), names[name]
            value = keywords.pop(name)
            renamed.append(f"{old} → {new or 'nothing (this option is gone)'}")
            if new is None:
                continue
            if new.rpartition(".")[2] in keywords:
                raise ConfigError(_given_twice(f"{type(self).__name__}({name}={value!r})", old, new))
            keywords[new.rpartition(".")[2]] = value
        original(self, *args, **keywords)

    return init


def _both(entry: SourceEntry, present: SourceEntry, old: str, new: str, raw: Any) -> Problem:
    from unisono.config.values import shown

    here, there = entry.origin(tuple(old.split("."))), present.origin(tuple(new.split(".")))
    return _given_twice(f"{here}: {old} = {shown(raw)} beside {new} ({there})", old, new)


def _given_twice(given: str, old: str, new: str) -> Problem:
    from unisono.config.toml_file import NOTHING_STARTED

    rule = f"{old} is the earlier name of {new}, and one source gives an option once"
    return Problem(given=given, rule=rule, consequence=NOTHING_STARTED, nearest=f"leave {old} out")


# ---------------------------------------------------------------------------------------------- plans


class MigratedPlan(NamedTuple):
    """Plan fields under today's names, and what was renamed."""

    values: dict[str, Any]
    renamed: tuple[str, ...]


def migrate_plan(data: Mapping[str, Any]) -> MigratedPlan:
    """A plan of version 2 as one of version 3, by dotted name; any other as it is."""
    if data.get("version") != _PLAN_VERSION:
        return MigratedPlan(dict(data), ())
    values: dict[str, Any] = {}
    renamed: list[str] = []
    for name, value in data.items():
        new = PLAN_FIELDS.get(name, name)
        values[new] = [_migrated_rule(rule) for rule in value] if name == "rules" and isinstance(value, list) else value
        if new != name:
            renamed.append(f"{name} → {new}")
    return MigratedPlan(values | {"version": _PLAN_VERSION + 1}, tuple(renamed))


def _migrated_rule(rule: Any) -> Any:
    if not isinstance(rule, Mapping) or cast("Mapping[str, Any]", rule).get("rule") != "pair":
        return rule
    fields = {RULE_FIELDS.get(name, name): value for name, value in cast("Mapping[str, Any]", rule).items()}
    return fields | {"rule": "colwise_rowwise"}
