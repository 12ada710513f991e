"""Every public name in cells of a real notebook: what it shows, what it starts, what an error or an interrupt leaves."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from procs import wait_until

import unisono
from unisono.dist.stop_notice import INTERRUPTED

SETUP = """
import os, sys
import psutil, torch
from torch import nn
import unisono
from unisono import *
from unisono.dist import job_from_environ, join_world

started = []
def record(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"):
        started.append((event, str(args)))

class Rows:
    def __len__(self): return 64
    def __getitem__(self, i): return torch.full((2,), i / 64), int(i % 2)

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))
    def forward(self, inputs): return self.layers(inputs)

def hits(outputs, batch, loss_sum, weight):
    return torch.stack([(outputs.argmax(-1) == batch["targets"]).sum(), weight]).double()

def share(total): return total[0] / total[1]

torch.manual_seed(0)
world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=60)
sys.addaudithook(record)
"""

# A cell for each public name, in the order of the notebook, and what its last line shows.
WALK = {
    "CheckpointOptions": ("CheckpointOptions(every_steps=10)", r"CheckpointOptions\(every_steps=10\)"),
    "DataOptions": ("DataOptions(seq_len=64)", r"DataOptions\(seq_len=64\)"),
    "LoaderOptions": ("LoaderOptions()", r"LoaderOptions\(\)"),
    "LaunchOptions": ("LaunchOptions(num_processes=2)", r"LaunchOptions\(num_processes=2\)"),
    "ModelOptions": ("ModelOptions(dim=32)", r"ModelOptions\(dim=32\)"),
    "ObserveOptions": ("ObserveOptions(trackers=())", r"ObserveOptions\(trackers=\(\)\)"),
    "OptimOptions": ("OptimOptions(kind='sgd', lr=0.1)", r"OptimOptions\(kind='sgd', lr=0\.1\)"),
    "ScheduleOptions": ("ScheduleOptions(warmup_steps=5)", r"ScheduleOptions\(warmup_steps=5\)"),
    "PlanOptions": ("PlanOptions(global_batch=16)", r"PlanOptions\(global_batch=16\)"),
    "RunOptions": ("RunOptions(dir='runs/a')", r"RunOptions\(dir='runs/a'\)"),
    "TrainOptions": ("TrainOptions(steps=40)", r"TrainOptions\(steps=40\)"),
    "DistillOptions": ("DistillOptions(temperature=4.0)", r"DistillOptions\(temperature=4\.0\)"),
    "Distillation": (
        "Distillation(Net(), DistillOptions(temperature=4.0))",
        r"(?s)Distillation\(teacher=Net\(.*\), options=DistillOptions\(temperature=4\.0\)\)",
    ),
    "Components": ("Components(model=Net, objective=hits)", r"Components\(model=Net, objective=hits\)"),
    "RunConfig": ("RunConfig(train=TrainOptions(steps=40))", r"RunConfig\(train=TrainOptions\(steps=40\)\)"),
    "load_config": (
        "load_config(RunConfig, overrides=['train.steps=40'])",
        r"Resolved\(RunConfig\(train=TrainOptions\(steps=40\)\), hash='\w{32}', 1 of \d+ values given\)",
    ),
    "from_map_style": ("data = from_map_style(Rows())\ndata", r"Dataset\(64 samples of a Rows\)"),
    "Dataset": ("isinstance(data, Dataset), isinstance(Rows(), Dataset)", r"\(True, False\)"),
    "Loader": (
        "loader = Loader(data, seed=0, global_batch=8, options=LoaderOptions(num_workers=2))\n"
        "with loader:\n    assert sum(len(part['inputs']) for part in loader) == 64\nloader",
        r"Loader\(Dataset\(64 samples of a Rows\), 8 steps of 8 per epoch, rank 0 of 1, 2 thread workers, next step 8\)",
    ),
    "Metric": (
        "accuracy = Metric(size=2, sums=hits, value=share)\naccuracy",
        r"Metric\(size=2, sums=hits, value=share\)",
    ),
    "initialize": ("initialize(Net(), [{'match': '*', 'kind': 'xavier'}], seed=0)", r"Net\(\n.*\)"),
    "Trainer": (
        "trainer = Trainer(Net(), Rows(), PlanOptions(global_batch=8), objective=nn.CrossEntropyLoss(),\n"
        "    options=TrainOptions(steps=60, eval_every_steps=20, num_eval_samples=0),\n"
        "    eval_data=Rows(), metrics={'accuracy': accuracy})\n"
        "print(trainer)\nwith trainer as run:\n    result = run.fit()\n    print(run)\ntrainer",
        r"Trainer\(Net, closed at step 60 of 60, run_dir='runs/study'\)",
    ),
    "Result": (
        "assert isinstance(result, Result)\nresult",
        r"Result\(step=60, reason='finished', evaluation=\{'loss': [\d.]+, 'accuracy': [\d.]+\}\)",
    ),
    "Plan": (
        "assert isinstance(trainer.plan, Plan)\ntrainer.plan",
        r"Plan\(1 x cpu, \w+, batch 8 = 1 ranks x 1 x 8, sync local, recompute none, compile off\)",
    ),
    "Step": (
        "with Trainer(Net(), Rows(), PlanOptions(global_batch=8), objective=nn.CrossEntropyLoss(),\n"
        "        options=TrainOptions(steps=3), run_dir='runs/steps') as run:\n"
        "    for step in run: pass\nassert isinstance(step, Step)\nstep",
        r"Step\(3, loss=[\d.]+, grad_norm=[\d.]+, lr=[\d.e-]+\)",
    ),
    "create_kvstore": (
        "store = create_kvstore('local')\nstore.init('w', torch.zeros(2))\nstore.push('w', torch.ones(2))\n"
        "print(store.pull('w'), store.pull('w').wait().tolist())\nstore",
        r"KVStore\('local', 1 keys, World\(rank 0 of 1\)\)",
    ),
    "StepGuard": (
        "guard = StepGuard(torch.device('cpu'), sigmas=6.0)\nguard.accept(torch.tensor(1.0), torch.tensor(torch.nan))\nguard",
        r"StepGuard\(sigmas=6, window=128, skipped=1\)",
    ),
    "LossScaler": ("LossScaler(torch.device('cpu'))", r"LossScaler\(value=65536, dynamic=True\)"),
    "GuardedOptimizer": (
        "net = Net()\noptimizer = GuardedOptimizer(net, torch.optim.Adam(net.parameters()), world, clip_norm=1.0)\n"
        "part = next(iter(loader))\nloader.close()\n"
        "optimizer.backward(nn.functional.cross_entropy(net(part['inputs']), part['targets'], reduction='sum'), 8)\n"
        "print(optimizer.step())\noptimizer",
        r"GuardedOptimizer\(Net, Adam, 22 parameters, clip_norm=1, World\(rank 0 of 1\)\)",
    ),
    "LoopCheckpoints": (
        "with LoopCheckpoints('runs/own', {'optimizer': optimizer, 'loader': loader}, world) as checkpoints:\n"
        "    checkpoints.resume()\n    checkpoints.save(1)\ncheckpoints",
        r"LoopCheckpoints\('runs/own', parts optimizer, loader, last of step 1\)",
    ),
    "autocast": (
        "with autocast('bf16', 'cpu'):\n    outputs = net(part['inputs'])\noutputs.dtype",
        r"torch\.bfloat16",
    ),
    "Problem": (
        "Problem(given='a', rule='b', consequence='c', nearest='d')",
        r"Problem\(given='a', rule='b', consequence='c', nearest='d'\)",
    ),
    "UnisonoError": (
        "try:\n    PlanOptions(global_batch=8, tp=2) and create_kvstore('local', local_sgd=1)\n"
        "except UnisonoError as error:\n    caught = error\ncaught.problems[0].nearest",
        r"'leave out local_sgd'",
    ),
}

# What a user gets wrong in a cell, and the four parts that the notebook shows.
MISTAKES = {
    "trainer.evaluate()": (
        "unisono.errors.ConfigError: evaluate() of a Trainer that was left\n"
        "  rule: it works inside of a with statement, which opens and closes its files, workers and connections\n"
        "  so:   nothing was done\n"
        "  try:  with trainer as run: run.evaluate(data)"
    ),
    "with Trainer(Net(), Rows(), PlanOptions(tp=2), objective=nn.CrossEntropyLoss()) as run: run.fit()": (
        "unisono.errors.PlanError: dp_replicate 1 x dp_shard 1 x tp 2 on 1 ranks\n"
        "  rule: the product of the mesh axes is the number of ranks\n"
        "  so:   the plan is for 2 ranks\n"
        "  try:  dp_replicate=1, dp_shard=1, tp=1, or launch.num_processes=2 (of a script: unisono launch -n 2)"
    ),
    "list(Loader(data, seed=0, global_batch=8, options=LoaderOptions(num_workers=1, worker_kind='process')))": (
        "unisono.data.loading.worker_start.WorkerStartError: Rows, which is defined in the program or notebook itself\n"
        "  rule: a worker process imports modules and never runs the program or its cells again\n"
        "  so:   no worker process was started\n"
        "  try:  define what is passed at the top of a module that the program imports; or loader.worker_kind thread"
    ),
    "create_kvstore('dist_async')": (
        "unisono.errors.ConfigError: a store of kind 'dist_async' with no servers\n"
        "  rule: servers that know the secret hold its values\n"
        "  so:   no store was made\n"
        "  try:  servers=ServerConfig.from_environ(os.environ)"
    ),
    "with Trainer(Net(9), Rows(), PlanOptions(global_batch=8), objective=nn.CrossEntropyLoss(), "
    "run_dir='runs/steps') as run: run.fit()": (
        "  rule: a resumed run has the model, optimizer and options the checkpoint was saved with\n"
        "  so:   nothing was loaded and nothing was changed\n"
        "  try:  use the configuration saved in the run's folder, or another run.dir for a new run"
    ),
}

ROWS = """
import torch
class Rows:
    def __len__(self): return 64
    def __getitem__(self, i): return torch.full((2,), i / 64), int(i % 2)
"""
CHILDREN = "print(len(psutil.Process().children(recursive=True)))"


class Notebook:
    """Cells to execute, one after the other, in a new kernel in ``folder``."""

    def __init__(self, folder: Path, sources: Sequence[str], *, allow_errors: bool = False) -> None:
        nbformat: Any = importlib.import_module("nbformat")
        client: Any = importlib.import_module("nbclient")
        self.cells: list[Any] = [nbformat.v4.new_code_cell(source) for source in sources]
        self.client = client.NotebookClient(
            nbformat.v4.new_notebook(cells=self.cells),
            timeout=180,
            allow_errors=allow_errors,
            resources={"metadata": {"path": str(folder)}},
        )
        self.env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "JPY_SESSION_NAME": str(folder / "study.ipynb"),  # as Jupyter Server has it
        }

    def execute(self) -> None:
        self.client.execute(env=self.env)

    def interrupt(self) -> None:
        """What the button of a notebook does."""
        os.kill(self.client.km.provisioner.pid, signal.SIGINT)

    def stream(self, cell: int, name: str = "stdout") -> str:
        return "".join(o.text for o in self.cells[cell].outputs if o.output_type == "stream" and o.name == name)

    def shown(self, cell: int, kind: str) -> list[str]:
        """Texts of a cell's outputs of a kind: ``execute_result``, ``display_data``."""
        return [o.data["text/plain"] for o in self.cells[cell].outputs if o.output_type == kind]

    def error(self, cell: int) -> str:
        return "\n".join(line for o in self.cells[cell].outputs if o.output_type == "error" for line in o.traceback)


def test_every_public_name_is_walked() -> None:
    assert set(WALK) == set(unisono.__all__)
    assert [name for name, (cell, _) in WALK.items() if not re.search(rf"\b{name}\b", cell)] == []


@pytest.mark.full
def test_every_public_name_works_in_a_notebook(tmp_path: Path) -> None:
    walked = [cell for cell, _ in WALK.values()]
    report = "print(started, len(psutil.Process().children(recursive=True)))"
    notebook = Notebook(tmp_path, [SETUP, *walked, "print(store, optimizer.guard)", report])
    notebook.execute()
    for number, (name, (_, pattern)) in enumerate(WALK.items(), 1):
        (text,) = notebook.shown(number, "execute_result")
        assert re.fullmatch(pattern, text, re.S), (name, text)
        output = text + notebook.stream(number)
        assert " object at 0x" not in output, (name, output)
        assert "tensor(" not in output, (name, output)
        assert len(text) < 250, (name, text)
        assert notebook.stream(number, "stderr") == "", name
    assert notebook.stream(len(WALK) + 2) == "[] 0\n"

    train = 1 + list(WALK).index("Trainer")
    (bar,) = notebook.shown(train, "display_data")  # one display that was redrawn
    assert "step 60/60 100.0%" in bar
    assert len(bar.splitlines()) == 3
    said = notebook.stream(train).splitlines()
    assert said[0] == "Trainer(Net, not entered, 60 steps, run_dir='runs/study')"
    assert "Trainer(Net, open at step 60 of 60, run_dir='runs/study')" in said
    assert [line for line in said if line.startswith("eval step=")]
    assert len(said) < 15
    assert (tmp_path / "runs/study/report.html").exists()


@pytest.mark.full
def test_a_mistake_in_a_cell_shows_four_parts_and_the_line_of_the_cell(tmp_path: Path) -> None:
    used = [WALK[name][0] for name in ("from_map_style", "Metric", "Trainer", "Step")]
    own = "def broken(sample, rng): raise ValueError('mine')\nlist(Loader(data, seed=0, global_batch=8, transform=broken))"
    notebook = Notebook(tmp_path, [SETUP, *used, *MISTAKES, own, CHILDREN], allow_errors=True)
    notebook.execute()
    assert [notebook.error(number) for number in range(1 + len(used))] == [""] * (1 + len(used))
    for number, (cell, text) in enumerate(MISTAKES.items(), 1 + len(used)):
        shown = notebook.error(number)
        assert text in shown, shown
        lines = shown.splitlines()
        assert lines[:3] == [
            "Traceback (most recent call last):",
            '  File "<cell>", line 1, in <module>',
            f"    {cell}",
        ]
        assert len(lines) <= 8
    of_own_code = notebook.error(1 + len(used) + len(MISTAKES))
    assert "raise ValueError('mine')" in of_own_code
    assert "  so:   step 0 cannot run" in of_own_code
    assert "site-packages" not in of_own_code
    assert "unisono/" not in of_own_code
    assert notebook.stream(-1) == "0\n"


@pytest.mark.full
def test_processes_that_were_asked_for_run_without_the_notebooks_code(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    (tmp_path / "train.py").write_text(
        "import torch\nfrom rows import Rows\nfrom unisono import PlanOptions, Trainer, TrainOptions\n"
        "objective, options = torch.nn.CrossEntropyLoss(), TrainOptions(steps=5)\n"
        "with Trainer(torch.nn.Linear(2, 2), Rows(), PlanOptions(), objective=objective, options=options) as run:\n"
        "    print(f'{run.fit().reason} {run.world.world_size}\\n', end='')\n"
    )
    workers = (
        "from rows import Rows as FromModule\n"
        "options = LoaderOptions(num_workers=2, worker_kind='process')\n"
        "with Loader(from_map_style(FromModule()), seed=0, global_batch=8, options=options) as loader:\n"
        "    print(sum(1 for _ in loader), len(psutil.Process().children(recursive=True)), bool(started))"
    )
    launch = "!{sys.executable} -m unisono launch -n 2 -- {sys.executable} train.py"
    notebook = Notebook(tmp_path, [SETUP, workers, CHILDREN, launch, CHILDREN, "create_kvstore('dist_sync')"])
    notebook.execute()
    assert notebook.stream(1) == "8 2 True\n"
    assert notebook.stream(2) == notebook.stream(4) == "0\n"
    assert "finished 2\r\n" in notebook.stream(3)  # of rank 0
    assert notebook.shown(5, "execute_result") == ["KVStore('dist_sync', 0 keys, World(rank 0 of 1))"]


@pytest.mark.full
def test_an_interrupted_cell_leaves_nothing_and_continues_when_it_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    slow = (
        "from pathlib import Path\nimport time\nfrom rows import Rows as FromModule\n"
        "class Slow(Net):\n"
        "    def forward(self, inputs):\n"
        "        Path('stepping').touch()\n"
        "        time.sleep(float(Path('pause').read_text()))\n"
        "        return super().forward(inputs)\n"
    )
    # every run of it makes a new model and a new trainer, as a user's does
    train = (
        "with Trainer(Slow(), FromModule(), PlanOptions(global_batch=8), objective=nn.CrossEntropyLoss(),\n"
        "        loader=LoaderOptions(num_workers=2, worker_kind='process'), options=TrainOptions(steps=200)) as run:\n"
        "    result = run.fit()\n"
        "result.reason, result.step == 200"
    )
    own_loop = (
        "with Loader(from_map_style(FromModule()), seed=0, global_batch=8,\n"
        "        options=LoaderOptions(num_workers=2, worker_kind='process')) as loader:\n"
        "    for _ in loader:\n        Path('looping').touch()\n        time.sleep(60)"
    )
    cells = [SETUP, slow, train, CHILDREN, train, CHILDREN, own_loop, CHILDREN, train, CHILDREN]
    notebook = Notebook(tmp_path, cells, allow_errors=True)
    pause, events = tmp_path / "pause", tmp_path / "runs/study/events/rank00000.jsonl"
    pause.write_text("0.05")

    def interrupt() -> None:
        wait_until(lambda: events.exists() and events.read_text().count('"step":') > 2, "steps are made", 120)
        notebook.interrupt()
        wait_until(lambda: '"preempt"' in events.read_text(), "the first run ends", 60)
        pause.write_text("60")  # a step that nobody waits for
        (tmp_path / "stepping").unlink()
        wait_until((tmp_path / "stepping").exists, "a long step is under way", 60)
        for _ in range(2):
            notebook.interrupt()
            threading.Event().wait(0.5)
        pause.write_text("0")
        wait_until((tmp_path / "looping").exists, "the loop without a trainer is under way", 60)
        notebook.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    notebook.execute()
    thread.join()

    assert notebook.shown(2, "execute_result") == ["('preempted', False)"]
    assert notebook.stream(2, "stderr") == INTERRUPTED + "\n"
    assert "KeyboardInterrupt" in notebook.error(4)
    assert "KeyboardInterrupt" in notebook.error(6)
    assert notebook.shown(8, "execute_result") == ["('finished', True)"]
    assert "resumed at step" in notebook.stream(4)
    assert "resumed at step" in notebook.stream(8)
    for number in (2, 8):
        (bar,) = notebook.shown(number, "display_data")
        assert "/200" in bar
        assert len(notebook.stream(number).splitlines()) < 15
    assert [notebook.stream(number) for number in (3, 5, 7, 9)] == ["0\n"] * 4
