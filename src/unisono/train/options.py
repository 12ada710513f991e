"""Settings of the step loop."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unisono.config import option
from unisono.config.fields import options_repr
from unisono.errors import Problem, inert_problem
from unisono.storage.files import os_reason
from unisono.storage.run_folder import RUN_FILE

DEFAULT_STEPS = 300


def is_due(every: int, step: int) -> bool:
    """Whether an action every ``every`` steps (0: never) is due after finished step ``step``."""
    return bool(every) and step % every == 0


def two_lengths(steps: int, epochs: float) -> Problem:
    """The problem of a run whose length is given in steps and in epochs."""
    return Problem(
        given=f"train.steps {steps} with train.epochs {epochs:g}",
        rule="one of them is the length of the run",
        consequence="it is unclear where the run ends",
        nearest=f"train.epochs={epochs:g} without train.steps, or train.steps={steps} without train.epochs",
    )


def resume_problem(resume: str, setting: str) -> Problem | None:
    """The problem of a ``resume`` that is none of three words and does not look like a path; ``setting`` is its name."""
    if resume in ("auto", "strict", "never") or "/" in resume:
        return None
    path = f"./{resume}"
    return other_folder(path) or Problem(
        given=f"resume {resume!r}",
        rule="auto, strict, never, or a path (with a '/')",
        consequence="it is unclear what to resume from",
        nearest=f"{setting}='{path}'" + ("" if os.path.isdir(path) else " if it is a folder"),
    )


def folder_problem(folder: str | Path, name: str) -> Problem | None:
    """Why ``folder``, given as ``name``, cannot be the folder of a run, or None. Nothing is created."""
    text, fault = os.fspath(folder), ""
    if not text:
        fault = "an empty name, which is the current folder"
    elif "\0" in text:
        fault = "a name with a NUL character"
    else:
        fault = _obstacle(Path(text))
    return (
        Problem(
            given=f"{name} {text!r}: {fault}",
            rule="a run keeps its configuration, events and checkpoints in a folder it can write to",
            consequence="nothing was started",
            nearest=f"{name} in a folder of your own, such as runs/first; '.' is the current folder",
        )
        if fault
        else None
    )


def _obstacle(path: Path) -> str:
    """What keeps ``path`` from being a folder; empty if it is one, or can be made as far as is seen."""
    for place in (path, *path.parents):
        try:
            if not stat.S_ISDIR(place.stat().st_mode):
                return f"{place} is not a folder"
        except FileNotFoundError:
            if place.is_symlink():
                return f"{place} is a link to nothing"
        except OSError as error:
            return os_reason(error)
        else:
            return ""
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Where a run lives and how it starts."""

    __repr__ = options_repr

    dir: str = option("runs/first", "Folder of this run; a run found there is resumed.")
    seed: int = option(0, "Seed of initialisation, data order, augmentation and dropout.", ge=0)
    resume: str = option(
        "auto", "auto = newest good checkpoint or a new run; strict = refuse any difference; never; or a path."
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "dir", os.path.expanduser(self.dir))

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """``resume`` is one of three words or looks like a path."""
        if problem := resume_problem(self.resume, "run.resume"):
            yield "resume", problem
        if not self.dir or "\0" in self.dir:
            problem = folder_problem(self.dir, "run.dir")
            yield from [("dir", problem)] if problem is not None else []
        if "://" in self.dir:
            yield (
                "dir",
                Problem(
                    given=f"dir {self.dir!r}",
                    rule="a run writes its files to a local or mounted folder",
                    consequence="a folder of that name would be made here",
                    nearest=f"checkpoint.upload_to={self.dir!r}, which copies each checkpoint there and resumes from there",
                ),
            )


def other_folder(path: str) -> Problem | None:
    """Why no run resumes from a folder that is a model's or a run's, and no checkpoint; None for any other."""
    folder = Path(path)
    if os.path.isfile(folder / "config.json") and any(folder.glob("*.safetensors")):
        return Problem(
            given=f"resume from {path}, a Hugging Face model folder",
            rule="a run resumes from a checkpoint: weights, optimizer state, schedule and position in the data",
            consequence="nothing was loaded",
            nearest=f"a folder checkpoints/step-… of a run; to fine-tune these weights, a new run with model.pretrained={path}",
        )
    if os.path.isfile(folder / RUN_FILE):
        return Problem(
            given=f"resume from {path}, the folder of a run",
            rule="a run resumes from a checkpoint: one folder step-… in the folder checkpoints of a run",
            consequence="nothing was loaded",
            nearest=f"run.dir={path}, which continues that run; or one of ls -d {path}/checkpoints/step-*",
        )
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """Length of the run, evaluations, and the numerical guard. ``steps`` counts as set where it is not its default."""

    __repr__ = options_repr

    steps: int = option(DEFAULT_STEPS, "Optimizer updates in the whole run, unless train.epochs is set.", ge=1)
    epochs: float = option(
        0.0,
        "Passes over the training data instead of train.steps, rounded up to whole steps; 0 = off.",
        instead_of="steps",
        ge=0.0,
        lt=1e9,
    )
    eval_every_steps: int = option(100, "Steps between evaluations; 0 = only at the end.", ge=0)
    num_eval_samples: int = option(256, "Samples per evaluation; 0 = all.", ge=0)
    early_stop_patience: int = option(
        0,
        "Evaluations without a better loss before the run ends; 0 = never.",
        applies_with="train.eval_every_steps above 0",
        ge=0,
    )
    ema_decay: float = option(
        0.0, "Decay of the moving average of weights used in evaluation and export; 0 = off.", ge=0.0, lt=1.0
    )
    spike_sigmas: float = option(
        0.0, "Skip a step whose loss or gradient norm is this far above the recent mean; 0 = off.", ge=0.0
    )
    max_skips: int = option(20, "Skipped steps in a row that end the run.", ge=1)
    loss_scale: float = option(
        4096.0,
        "First loss scale under fp16; multiplies the loss summed over a step / global_batch.",
        applies_with="plan.precision = fp16",
        gt=0.0,
    )
    gc_every_steps: int = option(
        0,
        "Steps between garbage collections, which all ranks make after the same step; 0 = whenever Python decides.",
        ge=0,
    )
    gradient_stats_every_steps: int = option(0, "Steps between per-layer gradient statistics; 0 = never.", ge=0)

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Two lengths of the run, and patience without evaluations to count, by field name."""
        if self.epochs and self.steps != DEFAULT_STEPS:
            yield "steps", two_lengths(self.steps, self.epochs)
        if self.early_stop_patience and not self.eval_every_steps:
            yield (
                "early_stop_patience",
                inert_problem(
                    f"early_stop_patience {self.early_stop_patience} with eval_every_steps 0",
                    "it counts evaluations, and the only one is at the end",
                    "train.eval_every_steps=100, or leave train.early_stop_patience out",
                ),
            )
