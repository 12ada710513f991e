"""Settings of the short trainings that examinations start, and the text they learn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from unisono.config.values import toml_value
from unisono.storage.directory import make_folder
from unisono.storage.files import write_atomically

_FILES: Final = 24  # enough that the hash of the paths holds some of them out
_LINES: Final = 60

# nothing but the training itself: no trackers, no report, no restarts, no other starts
QUIET: Final[Mapping[str, Any]] = {
    "observe.console": "off",
    "observe.trackers": [],
    "observe.report": False,
    "observe.monitor_every_s": 0.0,
    "launch.max_restarts": 0,
    "checkpoint.upload_to": "",
    "run.resume": "auto",
    "train.eval_every_steps": 0,
    "train.early_stop_patience": 0,
    "train.num_eval_samples": 4,
}
SMALL_GPT: Final[Mapping[str, Any]] = {
    "model.num_layers": 2,
    "model.dim": 32,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
}


def made_up_text(folder: Path) -> Path:
    """Write a small corpus, the same every time, into a new folder ``corpus`` in ``folder``; returns it."""
    corpus = folder / "corpus"
    make_folder(corpus)
    for number in range(_FILES):
        lines = [
            f"def f{number}_{line}(x):\n    return x + {(number * 37 + line * 11) % 100}\n" for line in range(_LINES)
        ]
        write_atomically(corpus / f"m{number}.py", "\n".join(lines).encode())
    return corpus


def set_arguments(settings: Mapping[str, Any]) -> list[str]:
    """``--set`` for each setting."""
    return [f"--set={name}={toml_value(value)}" for name, value in settings.items()]
