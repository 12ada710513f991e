"""Three short trainings of a tiny model: in one process, in several, and resumed; their losses have to be the same."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from unisono.doctor.check import Check, judged
from unisono.doctor.child import TrainOutcome, train_child
from unisono.doctor.rank_devices import default_ranks
from unisono.doctor.short_run import QUIET, SMALL_GPT, made_up_text, set_arguments
from unisono.doctor.storage import nearest_folder
from unisono.storage.directory import numbered_directories
from unisono.storage.run_folder import CHECKPOINTS_FOLDER

_STEPS: Final = 3
_TOLERANCE: Final = 1e-4  # relative: sums over ranks are made in another order
_SAMPLES_PER_RANK: Final = 2


def smoke(run_dir: Path, *, processes: int | None = None, timeout_s: float = 180.0) -> Iterator[Check]:
    """SMOKE01 to SMOKE03, each as soon as it is known. The trainings are in a temporary folder beside runs, which goes away.

    Args:
        run_dir: Folder of runs.
        processes: Number of ranks; None for ``default_ranks``. One rank is not compared with itself.
        timeout_s: Seconds for each training.
    """
    ranks = processes or default_ranks()
    with tempfile.TemporaryDirectory(
        prefix=".unisono-doctor-", dir=nearest_folder(run_dir), ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        settings: dict[str, Any] = {
            **QUIET,
            **SMALL_GPT,
            "data.corpus": str(made_up_text(folder)),
            "data.cache_dir": str(folder / "cache"),
            "data.seq_len": 64,
            "plan.global_batch": _SAMPLES_PER_RANK * ranks,
            "plan.precision": "fp32",
            "train.steps": _STEPS,
            "checkpoint.every_steps": 1,
        }

        def train(title: str, **more: Any) -> TrainOutcome:
            changed = settings | {
                "run.dir": str(folder / title),
                **{name.replace("__", "."): more[name] for name in more},
            }
            return train_child(folder / title, set_arguments(changed), timeout_s=timeout_s)

        alone = train("alone", launch__num_processes=1)
        yield _trained("SMOKE01", "training in one process", alone, losses_text(alone.losses()))
        if alone.code != 0:
            return
        if ranks == 1:
            yield judged("SMOKE02", "training on several ranks", "left out: one rank")
        else:
            several = train("several", launch__num_processes=ranks)
            yield _alike(
                "SMOKE02",
                f"training on {ranks} ranks",
                several,
                several.losses(),
                alone.losses(),
                _TOLERANCE,
                "a device or host that computes wrongly: unisono doctor --nodes, and the ranks one by one (CUDA_VISIBLE_DEVICES)",
            )
        saved = numbered_directories(folder / "alone" / CHECKPOINTS_FOLDER, "step").get(_STEPS - 1)
        if saved is None:
            yield judged("SMOKE03", "saving and resuming", f"no checkpoint of step {_STEPS - 1}", failure=_REPORT)
            return
        resumed = train("resumed", launch__num_processes=1, run__resume=str(saved))
        yield _alike(
            "SMOKE03", "saving and resuming", resumed, resumed.losses(), alone.losses()[_STEPS - 1 :], 0.0, _REPORT
        )


_REPORT: Final = "report this, with the versions above: training is not what it should be here"


def losses_text(losses: list[float]) -> str:
    """Losses as evidence."""
    return "losses " + ", ".join(f"{loss:.6g}" for loss in losses)


def _trained(code: str, title: str, outcome: TrainOutcome, evidence: str) -> Check:
    trouble = outcome.trouble
    return judged(code, title, trouble or evidence, failure="what it says" if trouble else "")


def _alike(
    code: str,
    title: str,
    outcome: TrainOutcome,
    losses: list[float],
    expected: list[float],
    tolerance: float,
    cure: str,
) -> Check:
    if outcome.code != 0:
        return _trained(code, title, outcome, "")
    same = len(losses) == len(expected) and all(
        abs(loss - other) <= tolerance * abs(other) for loss, other in zip(losses, expected, strict=True)
    )
    evidence = losses_text(losses) + (" as in one process" if same else f"; in one process {losses_text(expected)}")
    return judged(code, title, evidence, failure="" if same else cure)
