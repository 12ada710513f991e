"""A configuration tried rung by rung: the first rung that fails or is slow names what is wrong with it.

    a small model on made-up text → own data → the whole model → all ranks, data-parallel → the plan as it is

Each rung is a short training in a process of its own, and adds one thing to the rung before. A rung that would be the same
training as an earlier one is left out. What saves cost is told from the last of them.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from unisono.config.values import CALLABLE, NONE
from unisono.doctor.check import Check, judged
from unisono.doctor.child import TrainOutcome, train_child
from unisono.doctor.short_run import QUIET, SMALL_GPT, made_up_text, set_arguments
from unisono.doctor.storage import nearest_folder
from unisono.launch.resources import count_accelerators
from unisono.tasks.options import LANGUAGE_MODELS

STEPS: Final = 12  # a diagnosis needs eight readings after the first ones
TIMEOUT_S: Final = 900.0
SLOW: Final = 1.6  # times as long as the rung before lets expect
_SLOW_DATA: Final = 3.0  # own data against made-up text, for a model that computes next to nothing
_NOISE_S: Final = 0.05  # of a step; less is the host's, not the rung's
_COSTLY: Final = 0.2  # share of a step that a finding of the diagnosis costs
_SAVING: Final = 0.05  # share of the time between two checkpoints that training may stand still for one
_SPARE: Final = 1.2  # times the room that the checkpoints of a run need

# fields of the plan that do not spread the model or the samples; all others are at their default below the last rung
_PLAN_KEPT: Final = frozenset(
    f"plan.{name}"
    for name in ("device", "global_batch", "micro_batch", "precision", "recompute", "compile", "tf32", "channels_last")
)
_SHARDING: Final = ("plan.dp_shard", "plan.tp", "plan.cp", "plan.pp", "plan.ep")
_WHOLE_MODEL: Final = ("RUNG03", "RUNG04", "RUNG05")
_OUT_OF_MEMORY: Final = ("out of memory", "OutOfMemory", "SIGKILL", "Cannot allocate memory", "can't allocate memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class CostlyFinding:
    """A finding of the diagnosis of a run: its ``id`` and title, its share of the time of a step, and the advice."""

    id: str
    title: str
    cost_frac: float
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One rung.

    Attributes:
        code: Code of its check.
        title: What it tries.
        changes: Settings over the configuration, or over the defaults; without the folder of the run.
        on_config: Whether it is over the configuration.
        ranks: Number of processes.
        skipped: Why it is left out; empty if it is not.
        stands_for: Codes of later rungs that are left out because they are the same training.
    """

    code: str
    title: str
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    on_config: bool = True
    ranks: int = 1
    skipped: str = ""
    stands_for: tuple[str, ...] = ()

    def is_one_of(self, *codes: str) -> bool:
        """Whether it is one of the rungs with these codes, or stands for one."""
        return not {self.code, *self.stands_for}.isdisjoint(codes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RungReport:
    """What a rung said: its check, whether it was tried, and whether it failed, was slow, or passed."""

    check: Check
    verdict: Literal["ok", "slow", "failed", "left out"]


def climb(
    config: Sequence[str],
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    diagnose: Callable[[Path], Sequence[CostlyFinding]],
    arguments: Sequence[str] = (),
    steps: int = STEPS,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[RungReport]:
    """Try a configuration rung by rung until one fails; each is reported as soon as it is known.

    The trainings are in a temporary folder beside ``run.dir``, which goes away. Prepared data is kept where runs keep it.

    Args:
        config: Its files, as ``unisono train`` takes them.
        settings: All options by dotted name, encoded as in TOML.
        defaults: The same of no configuration at all.
        diagnose: Findings about the run in a folder.
        arguments: More arguments of ``unisono train``.
        steps: Steps of each rung.
        timeout_s: Seconds for each rung.
    """
    folder = nearest_folder(Path(str(settings["run.dir"])))
    with tempfile.TemporaryDirectory(prefix=".unisono-doctor-", dir=folder, ignore_cleanup_errors=True) as name:
        temporary = Path(name)
        before: tuple[Rung, float] | None = None  # the last rung, and its seconds of a step for each sample
        saving: RungReport | None = None
        is_too_large = ""
        for rung in rungs(settings, defaults, made_up_text(temporary), steps=steps):
            if rung.skipped or (is_too_large and rung.code == "RUNG04"):
                check = judged(rung.code, rung.title, f"left out: {rung.skipped or is_too_large}")
                yield RungReport(check=check, verdict="left out")
                continue
            run_dir = temporary / rung.code.lower()
            files = config if rung.on_config else ()
            changes = {**rung.changes, "run.dir": str(run_dir), "launch.num_processes": rung.ranks}
            outcome = train_child(run_dir, [*files, *arguments, *set_arguments(changes)], timeout_s=timeout_s)
            if outcome.code != 0:
                is_too_large = _too_large(rung, outcome, settings)
                if is_too_large:
                    check = judged(rung.code, rung.title, f"left out: {is_too_large}")
                    yield RungReport(check=check, verdict="left out")
                    continue
                yield RungReport(check=_failed(rung, outcome), verdict="failed")
                return
            # a strategy file may have another batch than the settings
            samples = outcome.samples() or int(rung.changes.get("plan.global_batch", settings["plan.global_batch"]))
            step_s = outcome.step_s()
            check, is_slow = _judged(rung, outcome, step_s, samples, before, diagnose)
            yield RungReport(check=check, verdict="slow" if is_slow else "ok")
            before = (rung, step_s / samples) if step_s is not None else None
            if rung.is_one_of(*_WHOLE_MODEL):
                saving = _saving(outcome, step_s, settings, shutil.disk_usage(folder).free)
            shutil.rmtree(run_dir, ignore_errors=True)  # the checkpoints of the whole model are large
        if saving is not None:
            yield saving


def rungs(settings: Mapping[str, Any], defaults: Mapping[str, Any], corpus: Path, *, steps: int = STEPS) -> list[Rung]:
    """The five rungs of a configuration; ``corpus`` is made-up text."""
    ranks = int(settings["launch.num_processes"]) or max(1, count_accelerators())
    quiet = {name: value for name, value in QUIET.items() if name in settings} | {"train.steps": steps}
    quiet |= _defaults(settings, defaults, "schedule.") | {"checkpoint.every_steps": 0}
    small = _small_model(settings)
    one, many = _plan_of(settings, defaults, 1, ranks), _plan_of(settings, defaults, ranks, ranks)
    made_up, on_config = _made_up(settings, defaults, corpus)
    found = [
        Rung(
            code="RUNG01",
            title="a small model on made-up text, in one process",
            changes={**quiet, **one, **(small if on_config else SMALL_GPT), **made_up},
            on_config=on_config,
        ),
        Rung(code="RUNG02", title="own data", changes={**quiet, **one, **small}),
        Rung(code="RUNG03", title="the whole model", changes={**quiet, **one}),
        Rung(code="RUNG04", title=f"{ranks} ranks, data-parallel", changes={**quiet, **many}, ranks=ranks),
        Rung(code="RUNG05", title="the plan as it is", changes=quiet, ranks=ranks),
    ]
    if not on_config:  # what the defaults do not have
        changes = {name: value for name, value in found[0].changes.items() if value != defaults.get(name)}
        found[0] = Rung(code=found[0].code, title=found[0].title, changes=changes, on_config=False)
    return _without_repeats(found, settings)


def _without_repeats(found: Sequence[Rung], settings: Mapping[str, Any]) -> list[Rung]:
    """The rungs; one that is the same training as an earlier one is left out, and the earlier one stands for it."""
    seen: dict[str, int] = {}  # places of the rungs that are tried
    result: list[Rung] = []
    for place, rung in enumerate(found):
        whole = {**(settings if rung.on_config else {}), **rung.changes, "launch.num_processes": rung.ranks}
        text = repr((rung.on_config, sorted(whole.items(), key=lambda item: item[0])))
        first = seen.setdefault(text, place)
        if first != place:
            same = result[first]
            result[first] = replace(same, stands_for=(*same.stands_for, rung.code))
            rung = Rung(code=rung.code, title=rung.title, skipped=f"the same training as {same.code}")
        result.append(rung)
    return result


def _defaults(settings: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The defaults of the options of a section that have another value."""
    return {
        name: defaults[name]
        for name, value in settings.items()
        if name.startswith(prefix) and name in defaults and value != defaults[name]
    }


def _plan_of(settings: Mapping[str, Any], defaults: Mapping[str, Any], ranks: int, most: int) -> dict[str, Any]:
    """Data-parallel over ``ranks`` ranks, each with as many samples as one of ``most`` ranks has."""
    share = max(1, -(-int(settings["plan.global_batch"]) // most))
    micro_batch = int(settings["plan.micro_batch"])
    changed = {name: value for name, value in _defaults(settings, defaults, "plan.").items() if name not in _PLAN_KEPT}
    return {
        **changed,
        "plan.global_batch": share * ranks,
        "plan.micro_batch": micro_batch if micro_batch and share % micro_batch == 0 else 0,
    }


def _small_model(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that shrink a built-in model; none where it is pretrained or one's own."""
    model = str(settings["components.model"])
    if not _is_built_in(settings):
        return {"components.model": "resnet14"} if model.startswith("resnet") and model[6:].isdigit() else {}
    kind = settings["task.kind"]
    has_heads = model in ("gpt", "moe", "bert") or (
        model == "auto" and kind in (*LANGUAGE_MODELS, "text", "sequence_labelling")
    )
    has_kv_heads = model in ("gpt", "moe") or (model == "auto" and kind == "language_model")
    if model == "auto" and kind == "image":
        return {}
    names = ["model.num_layers", "model.dim", *(["model.num_heads"] if has_heads else [])]
    small = {name: SMALL_GPT[name] for name in [*names, *(["model.num_kv_heads"] if has_kv_heads else [])]}
    small |= {"model.ffn_dim": 0} if has_heads else {}
    if settings["model.num_experts"]:
        small["model.num_experts"] = max(4, int(settings["model.num_experts_per_token"]))
    return {name: value for name, value in small.items() if value != settings[name]}


def _is_built_in(settings: Mapping[str, Any]) -> bool:
    """Whether the model is a built-in one that can be made small by its sizes."""
    model = str(settings["components.model"])
    return model in ("auto", "gpt", "moe", "bert", "mlp") and not settings["model.pretrained"]


def _made_up(settings: Mapping[str, Any], defaults: Mapping[str, Any], corpus: Path) -> tuple[dict[str, Any], bool]:
    """Settings of made-up text, and whether they go over the configuration: not where it has another task, or code."""
    text = {"data.corpus": str(corpus), "data.cache_dir": str(corpus.parent / "cache")}
    has_code = any(
        str(settings[name]).startswith(CALLABLE) or settings[name] not in ("", "auto", "none", [], {}, NONE)
        for name in settings
        if name.startswith("components.") and name not in ("components.model", "components.init")
    )
    is_own = has_code or not _is_built_in(settings)
    if settings["task.kind"] != "language_model" or is_own:
        return {**text, "data.seq_len": 64}, False
    changed = _defaults(settings, defaults, "data.") | _defaults(settings, defaults, "task.inputs")
    kept = ("data.seq_len", "data.boundaries", "data.packing")
    seq_len = min(int(settings["data.seq_len"]), 512)
    return {
        **{name: value for name, value in changed.items() if name not in kept},
        **text,
        "data.seq_len": seq_len,
    }, True


def _too_large(rung: Rung, outcome: TrainOutcome, settings: Mapping[str, Any]) -> str:
    """Why a rung whose model does not fit into one process is no failure of a plan that shards it; empty otherwise."""
    shards = any(settings[name] != 1 for name in _SHARDING)
    if not rung.is_one_of("RUNG03") or not shards or not any(word in outcome.said for word in _OUT_OF_MEMORY):
        return ""
    return "one process has not enough memory for the whole model, which the plan shards"


# --- verdicts --------------------------------------------------------------------------------------------------------


def _failed(rung: Rung, outcome: TrainOutcome) -> Check:
    trouble, cure = outcome.trouble, ""
    if not trouble.startswith("attempt "):  # what the survivors of a lost rank advise is for a run that goes on
        tries = [line.removeprefix("  try:").strip() for line in trouble.splitlines() if line.startswith("  try:")]
        cure = next(iter(tries), "")
    return judged(rung.code, rung.title, trouble, failure=cure or "see the error; all earlier rungs passed")


def _judged(
    rung: Rung,
    outcome: TrainOutcome,
    step_s: float | None,
    samples: int,
    before: tuple[Rung, float] | None,
    diagnose: Callable[[Path], Sequence[CostlyFinding]],
) -> tuple[Check, bool]:
    """The check of a rung whose training has finished, and whether it is slow.

    ``step_s`` is the time of a step of ``samples`` samples, ``before`` the rung before this one and its seconds for a sample.
    """
    if step_s is None:
        return judged(rung.code, rung.title, f"passed in {outcome.took_s:.0f} s"), False
    evidence = f"{_time(step_s)} a step of {samples} samples"
    slow: list[str] = []
    cures: list[str] = []
    if before is not None and (factor := _most(rung, before[0])):
        expected_s = samples * before[1] / _speedup(rung, before[0])
        evidence += f", {_time(expected_s)} expected from {before[0].code}"
        if step_s > factor * expected_s and step_s - expected_s > _NOISE_S:
            slow.append(f"{step_s / expected_s:.2g} times as long as expected, the limit is {factor:g}")
            cures.append(_CURES[rung.code])
    # of a model that computes next to nothing all else is a large share
    if rung.is_one_of(*_WHOLE_MODEL):
        for finding in diagnose(outcome.run_dir):
            if finding.cost_frac >= _COSTLY and finding.cost_frac * step_s > _NOISE_S:
                slow.append(f"{finding.id}: {finding.title}, costs {finding.cost_frac:.0%} of the time")
                cures.append(finding.advice)
    check = judged(rung.code, rung.title, "; ".join([evidence, *slow]), warning="; ".join(cures))
    return check, bool(slow)


_CURES: Final = {
    "RUNG02": "the data: unisono data bench, more loader.num_workers, or data packed before the run (unisono data pack)",
    "RUNG04": "what ranks share: links and cores (unisono doctor --bench), or fewer exchanges (a larger plan.global_batch)",
    "RUNG05": "the axes of the plan: unisono diagnose names the one that waits; compare with plain data-parallel",
}


def _saving(
    outcome: TrainOutcome, step_s: float | None, settings: Mapping[str, Any], free_bytes: int
) -> RungReport | None:
    """SAVE01: what the checkpoints of the run will cost, by the one that a rung has written; None if it has written none."""
    save = outcome.last_save()
    if save is None:
        return None
    (size, took_s), every = save, int(settings["checkpoint.every_steps"])
    evidence = [f"one of {_size(size)} takes {_time(took_s)} to be written"]
    cures: list[str] = []
    if every and step_s:
        interval_s = every * step_s
        evidence[0] += f", and comes every {every} steps: {_time(interval_s)}"
        if settings["checkpoint.asynchronous"]:
            if took_s > interval_s:
                evidence.append("each waits until the one before is written, and training waits with it")
        elif took_s > _SAVING * interval_s:
            evidence.append(f"training stands still for {took_s / (interval_s + took_s):.0%} of the time")
            cures.append("checkpoint.asynchronous=true")
        if len(evidence) > 1:
            cures.append(
                f"checkpoint.every_steps={math.ceil(took_s / (_SAVING * step_s))}, or a faster disk for run.dir"
            )
    # those that stay for good (checkpoint.keep_every_steps) come on top
    kept = 1 + int(settings["checkpoint.keep_last"]) + int(settings["checkpoint.keep_best"])
    evidence.append(f"{kept} of them need {_size(kept * size)} of the {_size(free_bytes)} that are free")
    if _SPARE * kept * size > free_bytes:
        cures.append("room on that disk, another run.dir, or fewer that stay (checkpoint.keep_last)")
    check = judged("SAVE01", "checkpoints", "; ".join(evidence), warning="; ".join(cures))
    return RungReport(check=check, verdict="slow" if cures else "ok")


def _most(rung: Rung, before: Rung) -> float:
    """How many times as long as expected a rung may take; 0 where nothing is expected."""
    if rung.code == "RUNG02":
        return _SLOW_DATA if before.on_config else 0.0  # else RUNG01 is another model
    return SLOW if rung.code in ("RUNG04", "RUNG05") and before.is_one_of("RUNG03", "RUNG04") else 0.0


def _speedup(rung: Rung, before: Rung) -> float:
    """How many times as many samples per second more ranks should compute: one device each, or shares of the same cores."""
    return rung.ranks / before.ranks if count_accelerators() >= rung.ranks else 1.0


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.3g} MiB"
