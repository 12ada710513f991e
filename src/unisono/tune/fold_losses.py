"""Losses of all samples of a cross-validation: each from the training that held it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from unisono.data.sample_losses import LOSSES_FILE, SampleLosses, merge_losses, read_losses
from unisono.dist.interpreter import module_command
from unisono.errors import DataError, UnisonoError
from unisono.launch.child import error_paragraph, run_child
from unisono.storage.directory import make_folder
from unisono.tune.folds import FOLD
from unisono.tune.study import TrialRecord

_FOLDS_FOLDER: Final = "losses"


def write_fold_losses(
    folder: Path, records: Sequence[TrialRecord], trust: Sequence[str], on_fold: Callable[[int], None]
) -> SampleLosses:
    """Evaluate each training that ended on the samples that it held out, and write their losses into one file of ``folder``.

    Each evaluation is a process of its own. One whose file is there already is not made again.

    Args:
        folder: Of the cross-validation.
        records: Its trainings. The samples that failed ones held out have no loss.
        trust: Arguments by which ``unisono eval`` runs the Python file of a configuration.
        on_fold: Called with the number of each fold whose evaluation begins.

    Returns:
        The losses.

    Raises:
        UnisonoError: An evaluation failed, such as that of a task whose samples are no rows.
        DataError: No training ended; or the data are not those of the other folds.
    """
    make_folder(folder / _FOLDS_FOLDER)
    folds: list[SampleLosses] = []
    for record in records:
        if record.outcome != "done":
            continue
        fold = int(record.settings[FOLD])
        path = folder / _FOLDS_FOLDER / f"fold-{fold:04}.safetensors"
        if not path.exists():
            on_fold(fold)
            _evaluate(record.run_dir, path, trust)
        folds.append(read_losses(path))
    if not folds:
        raise DataError(
            given=f"a cross-validation in {folder} without a training that ended",
            rule="the loss of a sample is that of the training that held it out",
            consequence="no losses were written",
            nearest="the same command again; what the trainings said is in its trials/",
        )
    losses = merge_losses(folds)
    losses.write(folder / LOSSES_FILE)
    return losses


def _evaluate(run_dir: Path, path: Path, trust: Sequence[str]) -> None:
    command = module_command("unisono", "eval", str(run_dir), "--sample-losses", str(path), *trust)
    code, said = run_child(command)
    if code:
        words = error_paragraph(said).replace("\n", "\n    ")
        raise UnisonoError(
            given=f"the evaluation of {run_dir}: {words or f'it ended with exit code {code}'}",
            rule="each training that ended is evaluated on the samples that it held out",
            consequence="the losses were not put together; those of other folds are kept",
            nearest="the same command again, once its cause is removed",
        )
