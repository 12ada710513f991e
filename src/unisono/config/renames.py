"""Earlier names of options and of plan fields, and the one reader that turns them into the current ones.

A configuration file, variable or override with an old key, a strategy file of version 2, and the plan that an old checkpoint
holds are all read through here. The reader returns what it renamed, and ``announce`` prints it in one line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from unisono.errors import ConfigError, PlanError, Problem

if TYPE_CHECKING:
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
    "train.eval_every": "train.eval_every_steps",
    "train.gradient_stats_every": "train.gradient_stats_every_steps",
    "checkpoint.keep_every": "checkpoint.keep_every_steps",
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
_PLAN_GROUPS = frozenset(new.partition(".")[0] for new in PLAN_FIELDS.values())


@dataclass(frozen=True, kw_only=True)
class OptionRenames:
    """The renamed keys and values of one options class, such as ``OPTIONS`` and ``OPTION_VALUES``."""

    keys: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])

    @cached_property
    def paths(self) -> dict[KeyPath, str]:
        """Path of each earlier key → current key; empty for an option that is gone."""
        return {tuple(old.split(".")): new or "" for old, new in self.keys.items()}

    def current_value(self, key: str, raw: Any, renamed: list[str]) -> Any:
        """``raw``, or the current spelling of a value that was renamed; adds to ``renamed``."""
        values = self.values.get(key, {})
        if not isinstance(raw, str) or raw not in values:
            return raw
        renamed.append(f"{key} {raw!r} → {values[raw]!r}")
        return values[raw]

    @contextmanager
    def keywords(self, sections: Mapping[str, type], renamed: list[str]) -> Generator[None]:
        """Inside, the options classes of ``sections`` also take keyword arguments by their earlier names."""
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
                raise ConfigError(given_twice(f"{type(self).__name__}({name}={value!r})", old, new))
            keywords[new.rpartition(".")[2]] = value
        original(self, *args, **keywords)

    return init


def given_twice(given: str, old: str, new: str) -> Problem:
    """The problem of a source that gives an option by its earlier and its current name."""
    from unisono.config.toml_file import config_problem  # imports tomllib, which declaring options does not need

    rule = f"{old} is the earlier name of {new}, and one source gives an option once"
    return config_problem(given, rule, f"leave {old} out")


# ---------------------------------------------------------------------------------------------- plans


class MigratedPlan(NamedTuple):
    """Plan fields under their current names, and the list of renames."""

    values: dict[str, Any]
    renamed: tuple[str, ...]


def migrate_plan(data: Mapping[str, Any]) -> MigratedPlan:
    """Convert a plan of version 2 to version 3, by dotted name; any other version is unchanged.

    Raises PlanError with all fields of a plan of version 2 that have their names of version 3.
    """
    if data.get("version") != _PLAN_VERSION:
        return MigratedPlan(dict(data), ())
    if problems := list(_newer_names(data)):
        raise PlanError(*problems)
    values: dict[str, Any] = {}
    renamed: list[str] = []
    for name, value in data.items():
        new = PLAN_FIELDS.get(name, name)
        values[new] = [_migrated_rule(rule) for rule in value] if name == "rules" and isinstance(value, list) else value
        if new != name:
            renamed.append(f"{name} → {new}")
    return MigratedPlan(values | {"version": _PLAN_VERSION + 1}, tuple(renamed))


def _newer_names(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Fields of a plan of version 2 that version 3 has introduced: next to the earlier one, one of the two would be lost."""
    earlier = {new: old for old, new in PLAN_FIELDS.items()}
    for name in data.keys() - PLAN_FIELDS.keys():
        if "." in name or name in _PLAN_GROUPS:
            yield _newer(f"the field {name!r}", earlier.get(name, "version 3, with all fields in groups"))
    rules: Any = data.get("rules")
    for rule in cast("list[Any]", rules) if isinstance(rules, list) else []:
        if isinstance(rule, Mapping) and cast("Mapping[str, Any]", rule).get("rule") == "pair":
            for old, new in RULE_FIELDS.items():
                if new in rule:
                    yield _newer(f"a rule 'pair' with {new!r}", old)


def _newer(given: str, nearest: str) -> Problem:
    rule = f"a strategy file of version {_PLAN_VERSION} has the names of version {_PLAN_VERSION} only"
    return Problem(
        given=f"{given} of version {_PLAN_VERSION + 1}",
        rule=rule,
        consequence="the plan was not loaded",
        nearest=nearest,
    )


def _migrated_rule(rule: Any) -> Any:
    if not isinstance(rule, Mapping) or cast("Mapping[str, Any]", rule).get("rule") != "pair":
        return rule
    fields = {RULE_FIELDS.get(name, name): value for name, value in cast("Mapping[str, Any]", rule).items()}
    return fields | {"rule": "colwise_rowwise"}
