"""The tracker ``mlflow`` with the real package, from an environment of its own: what MLflow's own client reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from modes import mode_of

SRC, HERE = Path(__file__).parents[2] / "src", Path(__file__).parent
MLFLOW = os.environ.get("UNISONO_MLFLOW_PYTHON")

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(600),  # each script makes a database
    pytest.mark.skipif(MLFLOW is None, reason="no environment with MLflow: tests/peers/venvs.sh"),
]

READ = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
found = []
for experiment in client.search_experiments():
    for run in client.search_runs([experiment.experiment_id]):
        history = {
            name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        artifacts, folders = [], [""]
        while folders:
            for each in client.list_artifacts(run.info.run_id, folders.pop() or None):
                (folders if each.is_dir else artifacts).append(each.path)
        found.append({
            "experiment": experiment.name, "name": run.info.run_name, "status": run.info.status, "params": run.data.params,
            "tags": run.data.tags, "history": {name: sorted(each) for name, each in history.items()},
            "artifacts": sorted(artifacts), "latest": run.data.metrics,
        })
print(json.dumps(found))
"""

TRAIN = """
import sys
import numpy as np, torch
from torch import nn
from unisono import CheckpointOptions, ObserveOptions, PlanOptions, Trainer, TrainOptions
from unisono.train import mean_squared_error
class Stop(Exception): pass
data = [(torch.ones(3), torch.ones(1))] * 8
run = Trainer(
    nn.Linear(3, 1), data, PlanOptions(device="cpu", precision="fp32", global_batch=4), objective=mean_squared_error,
    options=TrainOptions(steps=int(sys.argv[2]), eval_every_steps=2), checkpoint=CheckpointOptions(every_steps=2),
    run_dir=sys.argv[1], eval_data=data, observe=ObserveOptions(console="off", trackers=("mlflow",)),
)
fails_at = int(sys.argv[3])
try:
    with run:
        for step in run:
            run.log("own/x", step.index)
            run.log_text("own/words", "hello")
            run.log_image("own/picture", np.zeros((2, 3, 3), np.uint8))
            if step.index == fails_at:
                raise Stop
        run.evaluate()
except Stop:
    pass
"""

ROLLBACKS = """
import json, sys
from pathlib import Path
from hypothesis import HealthCheck, given, settings
from test_sink_rollbacks import ATTEMPTS, emit
made = []
@settings(max_examples=8, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(ATTEMPTS)
def some(attempts):
    folder = Path(sys.argv[1]) / f"run{len(made)}"
    folder.mkdir()
    first = emit(folder, ["mlflow"], attempts).first
    failed = [line for line in (folder / "e.jsonl").read_text().splitlines() if "sink_failed" in line]
    identity = (folder / "tracker_id").read_text().strip()
    made.append([identity, sorted([name, step, value] for (name, step), value in first.items()), failed])
some()
print(json.dumps(made))
"""


def with_mlflow(code: str, *arguments: object, **environ: str) -> str:
    """Run a script in this environment with MLflow's packages behind its own."""
    assert MLFLOW is not None
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([MLFLOW, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path.append({site!r})\n{code}", *map(str, arguments)],
        env=kept | {"PYTHONPATH": os.pathsep.join([str(SRC), str(HERE)])} | environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def runs_at(uri: str) -> list[dict[str, Any]]:
    return json.loads(with_mlflow(READ, uri).splitlines()[-1])


def uri_of(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def failures(run_dir: Path) -> list[str]:
    lines = (run_dir / "events" / "rank00000.jsonl").read_text().splitlines()
    return [line for line in lines if "sink_failed" in line]


def test_a_run_that_fails_and_is_resumed_is_one_run_of_mlflow(tmp_path: Path) -> None:
    run_dir = tmp_path / "mine"
    with_mlflow(TRAIN, run_dir, 6, 5)
    assert mode_of(run_dir / "mlflow") == 0o700
    (failed,) = runs_at(uri_of(run_dir / "mlflow"))
    assert (failed["status"], failed["name"], failed["experiment"]) == ("FAILED", "mine", "unisono")
    with_mlflow(TRAIN, run_dir, 8, 0)
    assert failures(run_dir) == []
    (run,) = runs_at(uri_of(run_dir / "mlflow"))
    assert run["status"] == "FINISHED"
    assert run["tags"]["unisono_run"] == (run_dir / "tracker_id").read_text().strip()
    assert run["params"]["optim.lr"] == "0.002"
    assert (run["params"]["train.steps"], run["tags"]["changed.train.steps"]) == ("6", "8")
    assert [step for step, _ in run["history"]["train/loss"]] == list(range(1, 9))
    assert run["history"]["own/x"] == [[n, n] for n in range(1, 9)]
    assert [step for step, _ in run["history"]["eval/loss"]] == [8]
    assert run["artifacts"] == sorted(
        f"media/rank00000/own/{name}/step-0000000{n}.{suffix}"
        for name, suffix in (("words", "txt"), ("picture", "png"))
        for n in range(1, 9)
    )


def test_any_number_of_restarts_leaves_one_value_of_each_step(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/server.db"
    told = with_mlflow(ROLLBACKS, tmp_path, MLFLOW_TRACKING_URI=uri, MLFLOW_EXPERIMENT_NAME="restarts")
    made = json.loads(told.splitlines()[-1])
    runs = {run["tags"]["unisono_run"]: run for run in runs_at(uri)}
    assert {run["experiment"] for run in runs.values()} == {"restarts"}
    assert sum(bool(first) for _, first, _ in made) == len(runs) > 3
    for identity, first, failed in made:
        assert failed == []
        found = runs[identity]["history"] if first else {}
        assert sorted([name, *each] for name, values in found.items() for each in values) == first


def test_a_server_that_is_gone_does_not_stop_training(tmp_path: Path) -> None:
    run_dir = tmp_path / "mine"
    gone = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    with_mlflow(TRAIN, run_dir, 3, 0, **gone)
    (failed,) = failures(run_dir)
    assert '"sink":"mlflow"' in failed
    assert (run_dir / "checkpoints" / "step-00000003").exists()
