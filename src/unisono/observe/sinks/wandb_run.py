"""The tracker ``wandb``: an offline run of Weights & Biases in the run folder."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from unisono.observe.events import Event
from unisono.observe.tracked import TRACKED, FirstValues, event_metrics, event_text, histogram_bins, run_settings
from unisono.storage.directory import make_folder
from unisono.storage.files import create_file

_MAX_BYTES: Final = 1 << 24  # of the file with the last steps
_MAX_BINS: Final = 512  # of one histogram, wandb's own limit


class WandbSink:
    """Writes to ``<run folder>/wandb`` for ``wandb sync``; the run id stays the same over restarts.

    Offline unless the environment variable ``WANDB_MODE`` is set. Collects nothing about the machine, the command line or the
    code. W&B takes no value back: where steps are made again, the first value of each stays. ``wandb/last_steps.json`` has the
    last step of each name, so that no attempt writes what an earlier one has written.
    """

    name = "wandb"

    def __init__(self, run_dir: Path, run_id: str, tracker_id: str) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        settings = self._wandb.Settings(
            console="off",
            quiet=True,
            silent=True,
            save_code=False,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        # what wandb makes in it has the permissions that the umask leaves, others' write too
        make_folder(run_dir / "wandb", mode=0o700)
        self._run_dir = run_dir
        self._has_settings = False
        # wandb takes steps in rising order only, and steps are read some time after what a loop logs at them
        self._held: list[tuple[int, dict[str, Any]]] = []
        self._read_step = -1
        path = run_dir / "wandb" / "last_steps.json"
        if not path.exists():
            create_file(path, b"{}")
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._kept = FirstValues(_last_steps(os.pread(self._fd, _MAX_BYTES, 0)))
        self._run: Any = self._wandb.init(
            project="unisono",
            id=tracker_id,
            name=run_id,
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=str(run_dir),
            settings=settings,
        )

    def write(self, event: Event) -> None:
        values, step = self._values(event), event.get("step")
        if not values or not isinstance(step, int):
            return
        if event["kind"] == "step":
            self._read_step = step
            held, self._held = self._held, []
            for event_step, earlier in [*held, (step, values)]:
                if event_step <= step:
                    self._log(event_step, earlier)
                else:
                    self._held.append((event_step, earlier))
        elif step <= self._read_step:
            self._log(step, values)
        else:
            self._held.append((step, values))

    def close(self) -> None:
        for step, values in self._held:
            self._log(step, values)
        os.close(self._fd)
        self._run.finish()

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        new = {name: value for name, value in values.items() if self._kept.is_new(name, step)}
        if not new:
            return
        if not self._has_settings:
            self._has_settings = True
            self._run.config.update(run_settings(self._run_dir), allow_val_change=True)
        self._run.log(new, step=step)
        data = json.dumps(self._kept.last_steps, separators=(",", ":")).encode()
        os.pwrite(self._fd, data, 0)  # one call: a kill leaves it whole; names are only added, so it never gets shorter

    def _values(self, event: Event) -> dict[str, Any]:
        kind = event["kind"]
        if kind in TRACKED:
            return event_metrics(event)
        if kind == "histograms":
            found: dict[str, Any] = {}
            for group in ("gradients", "parameters"):
                for name, histogram in event[group].items():
                    edges, counts = histogram_bins(histogram)
                    if 0 < len(counts) <= _MAX_BINS:
                        found[f"{group}/{name}"] = self._wandb.Histogram(np_histogram=(counts, edges))
            return found
        if kind == "log_image":
            if importlib.util.find_spec("PIL") is None:  # wandb reads pictures with it
                return {}
            return {event["name"]: self._wandb.Image(str(self._run_dir / event["path"]))}
        if (text := event_text(event, self._run_dir)) is not None:
            return {text[0]: self._wandb.Table(columns=["step", "text"], data=[[int(event["step"]), text[1]]])}
        return {}


def _last_steps(data: bytes) -> dict[str, int]:
    """The content of ``last_steps.json``; empty where it is none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return {name: step for name, step in found.items() if isinstance(step, int)} if isinstance(found, dict) else {}
