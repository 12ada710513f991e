"""The tracker ``mlflow``: a run in a database of the run folder, or on the server that ``MLFLOW_TRACKING_URI`` names."""

from __future__ import annotations

import importlib
import logging
import os
import re
from pathlib import Path
from typing import Any, Final

from unisono.observe.events import Event
from unisono.observe.tracked import TRACKED, FirstValues, event_metrics, event_text, run_settings
from unisono.storage.directory import make_folder

TRACKING_URI: Final = "MLFLOW_TRACKING_URI"
RUN_TAG: Final = "unisono_run"  # has the tracker id, by which a restart finds its run
_MAX_METRICS: Final = 900  # of one request, which takes 1000
_MAX_PARAMS: Final = 100
_MAX_PARAM_CHARACTERS: Final = 500  # what the older servers take
_STATUS: Final = {
    "finished": "FINISHED",
    "early_stop": "FINISHED",
    "left": "FINISHED",
    "failed": "FAILED",
    "preempted": "KILLED",
}


class MlflowSink:
    """Writes metrics, settings (as parameters), texts and pictures (as artifacts) of a run to MLflow.

    Without ``MLFLOW_TRACKING_URI`` into ``<run folder>/mlflow``: a SQLite database and a folder of artifacts. The experiment is
    ``MLFLOW_EXPERIMENT_NAME``, else ``unisono``. A restart continues the MLflow run that has this run's id as its tag
    ``unisono_run``. MLflow takes no value back: where steps are made again, the first value of each stays. A parameter cannot be
    changed either: a setting that a restart has changed is a tag ``changed.<setting>``.

    Nothing is opened before the first step, on the thread that calls ``write``. MLflow's telemetry is off, unless
    ``MLFLOW_DISABLE_TELEMETRY`` says otherwise.
    """

    name = "mlflow"

    def __init__(self, run_dir: Path, run_id: str, tracker_id: str) -> None:
        self._run_dir, self._run_id, self._tracker_id = run_dir.absolute(), run_id, tracker_id
        self._client: Any = None
        self._entities: Any = None
        self._mlflow_id = ""
        self._kept = FirstValues({})
        self._waiting: list[Any] = []  # metrics of the next request
        self._status = ""

    def write(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "run_end":
            self._status = _STATUS.get(str(event.get("reason")), "")
        elif kind in TRACKED and (metrics := event_metrics(event)):
            self._open()
            step, at_ms = int(event["step"]), int(event["t"] * 1000)
            for name, value in metrics.items():
                if self._kept.is_new(key := _key(name), step):
                    self._waiting.append(self._entities.Metric(key, value, at_ms, step))
            if len(self._waiting) >= _MAX_METRICS:
                self.flush()
        elif kind == "log_image":
            self._open()
            folder, _, _ = event["path"].rpartition("/")
            self._client.log_artifact(self._mlflow_id, str(self._run_dir / event["path"]), folder)
        elif (text := event_text(event, self._run_dir)) is not None:
            self._open()
            file = str(event.get("path") or f"{text[0]}/step-{int(event['step']):08d}.txt")
            self._client.log_text(self._mlflow_id, text[1], file)

    def flush(self) -> None:
        """Send the metrics that were written since the last request."""
        while self._waiting:
            part, self._waiting = self._waiting[:_MAX_METRICS], self._waiting[_MAX_METRICS:]
            self._client.log_batch(self._mlflow_id, metrics=part)

    def close(self) -> None:
        """Send what is left and set the status of the MLflow run. Of a run that made no step there is none."""
        if self._client is None:
            return
        self.flush()
        self._client.set_terminated(self._mlflow_id, status=self._status or "KILLED")

    def _open(self) -> None:
        if self._client is not None:
            return
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
        tracking: Any = importlib.import_module("mlflow.tracking")
        self._entities = importlib.import_module("mlflow.entities")
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of each table of a new database
        logging.getLogger("alembic").setLevel(logging.WARNING)
        uri = os.environ.get(TRACKING_URI, "")
        place: dict[str, str] = {}
        if not uri:
            folder = self._run_dir / "mlflow"
            make_folder(folder, mode=0o700)  # what mlflow makes in it has the permissions that the umask leaves
            uri, place = f"sqlite:///{folder / 'mlflow.db'}", {"artifact_location": (folder / "artifacts").as_uri()}
        client: Any = tracking.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "unisono")
        known = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name, **place) if known is None else known.experiment_id
        runs = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{self._tracker_id}'", max_results=1)
        if runs:
            self._mlflow_id = runs[0].info.run_id
            client.update_run(self._mlflow_id, status="RUNNING")
            # of each metric the value with the highest step
            metrics = client.get_run(self._mlflow_id).to_proto().data.metrics
            self._kept = FirstValues({metric.key: metric.step for metric in metrics})
        else:
            run = client.create_run(experiment, tags={RUN_TAG: self._tracker_id}, run_name=self._run_id)
            self._mlflow_id = run.info.run_id
        self._client = client
        self._log_settings(dict(runs[0].data.params) if runs else {})

    def _log_settings(self, logged: dict[str, str]) -> None:
        settings = {_key(name): str(value) for name, value in run_settings(self._run_dir).items()}
        given = {name: value[:_MAX_PARAM_CHARACTERS] for name, value in settings.items()}
        new = [self._entities.Param(name, value) for name, value in given.items() if name not in logged]
        for start in range(0, len(new), _MAX_PARAMS):
            self._client.log_batch(self._mlflow_id, params=new[start : start + _MAX_PARAMS])
        changed = [
            self._entities.RunTag(f"changed.{name}", value)
            for name, value in given.items()
            if logged.get(name, value) != value
        ]
        for start in range(0, len(changed), _MAX_PARAMS):
            self._client.log_batch(self._mlflow_id, tags=changed[start : start + _MAX_PARAMS])


def _key(name: str) -> str:
    """``name`` with the characters that MLflow takes."""
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name)
