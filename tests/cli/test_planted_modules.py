"""A working folder full of modules with the names of others': no command and no process that one starts imports them."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from code_rules import ROOT, Source, constant, finds, found, is_in
from commands import Desk
from PIL import Image
from sshd import serve

MAIN = [
    "-P",
    "-m",
    "unisono",
]  # as the console script: the working folder is not importable in the command's own process
SMALL = ["--set=run.dir=run", "--set=train.steps=2", "--set=checkpoint.asynchronous=false"]


class Hostile:
    """A folder with a module for each top-level name of Python and of the installed packages."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ran = folder, folder.parent / "ran"
        folder.mkdir()
        names = {name for name in sys.stdlib_module_names if not name.startswith("_")}
        names |= {name for name in metadata.packages_distributions() if name.isidentifier()} | {"unisono"}
        assert {"json", "torch", "msgspec", "numpy", "unisono", "xxhash"} <= names
        code = f"open({str(self.ran)!r}, 'a').write(__name__ + ' ' + __import__('sys').argv[0] + chr(10))\n"
        for name in names:
            (folder / f"{name}.py").write_text(code)

    def run(self, desk: Desk, command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the folder, and assert that nothing planted was imported."""
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=self.environ(desk) | environ,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert not self.ran.exists(), f"{command}: {self.ran.read_text()}\n{done.stderr}"
        return done

    def environ(self, desk: Desk) -> dict[str, str]:
        path = [entry for entry in sys.path if entry and Path(entry).is_absolute()]
        return os.environ | desk.environ | {"PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    return Hostile(tmp_path / "hostile")


def test_what_is_planted_runs_where_the_working_folder_is_importable(hostile: Hostile, desk: Desk) -> None:
    environ = hostile.environ(desk)
    subprocess.run([sys.executable, "-c", "import colorsys"], cwd=hostile.folder, env=environ, check=True)
    assert hostile.ran.read_text().split()[0] == "colorsys"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["config", "show"], ["config", "schema"], ["completion", "bash"], ["init", "new.toml"]],
    ids=" ".join,
)
def test_commands_without_children(hostile: Hostile, desk: Desk, arguments: list[str]) -> None:
    assert hostile.run(desk, [*MAIN, *arguments]).returncode == 0


def test_packing_images_in_processes(hostile: Hostile, desk: Desk, tmp_path: Path) -> None:
    for number in range(4):
        folder = tmp_path / "album" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / f"{number}.png")
    command = ["data", "pack", str(tmp_path / "album"), str(tmp_path / "a.rec"), "--workers", "2"]
    done = hostile.run(desk, [*MAIN, *command])
    assert done.returncode == 0, done.stderr
    inspected = hostile.run(desk, [*MAIN, "data", "inspect", str(tmp_path / "a.rec")])
    assert "4 records" in inspected.stdout, inspected.stderr


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_function_of_the_working_folder_and_its_neighbour_are_found(
    hostile: Hostile, desk: Desk, tmp_path: Path, workers: str
) -> None:
    (hostile.folder / "my_rows.py").write_text("import my_neighbour, colorsys\nrow = my_neighbour.row\n")
    (hostile.folder / "my_neighbour.py").write_text("def row(item): return {'x': int(item)}\n")
    (tmp_path / "items.txt").write_text("1\n2\n3\n")
    command = ["data", "pack", str(tmp_path / "items.txt"), str(tmp_path / "a.jsonl"), "--function", "my_rows:row"]
    done = hostile.run(desk, [*MAIN, *command, "--schema", "x=int64", "--workers", workers])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.jsonl").read_text().splitlines() == ['{"x": 1}', '{"x": 2}', '{"x": 3}']


def test_processes_of_a_tokenizer(hostile: Hostile, desk: Desk) -> None:
    program = """
    from unisono.data.tokens.encoding import encode_documents
    from unisono.data.tokens.tokenizer import load_tokenizer
    documents = [("train", "text")] * 3
    print([each.ids.size for _, each in encode_documents(documents, load_tokenizer("bytes"), workers=2)])
    """
    assert hostile.run(desk, ["-P", "-c", textwrap.dedent(program)]).stdout == "[4, 4, 4]\n"


def test_data_workers_of_a_script_import_its_neighbours_and_nothing_of_the_working_folder(
    hostile: Hostile, desk: Desk, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/my_data.py").write_text(
        textwrap.dedent("""
        import numpy as np
        class Squares:
            def __len__(self): return 8
            def __getitem__(self, number): return {"x": np.array([number**2])}
        """)
    )
    script = tmp_path / "mine/script.py"
    script.write_text(
        textwrap.dedent("""
        import my_data
        from unisono.data import Loader, LoaderOptions, as_dataset
        options = LoaderOptions(num_workers=2, worker_kind="process")
        with Loader(as_dataset(my_data.Squares()), seed=0, global_batch=4, options=options, shuffle=False) as loader:
            steps = loader.iterate(0, 2)
            print([int(x) for step in steps for batch in step.micro_batches for x in batch["x"].flatten()])
        """)
    )
    done = hostile.run(desk, [str(script)])
    assert done.stdout == "[0, 1, 4, 9, 16, 25, 36, 49]\n", done.stderr


@pytest.mark.full
@pytest.mark.parametrize("sync", ["dist_sync", "dist_async"])
def test_ranks_and_servers_of_a_run(hostile: Hostile, desk: Desk, sync: str) -> None:
    settings = [*desk.settings, *SMALL, f"--set=plan.sync={sync}", "--set=launch.num_processes=2"]
    settings += ["--set=loader.num_workers=1", "--set=loader.worker_kind=process"]
    if sync == "dist_async":
        settings += ["--set=launch.num_servers=1"]
    done = hostile.run(desk, [*MAIN, "train", *settings])
    assert done.returncode == 0, done.stderr
    assert list((hostile.folder / "run/checkpoints").glob("step-*")), done.stderr


@pytest.mark.full
def test_the_report_of_a_run_that_was_killed(hostile: Hostile, desk: Desk) -> None:
    settings = [*desk.settings, *SMALL, "--set=launch.max_restarts=0"]
    done = hostile.run(desk, [*MAIN, "train", *settings], UNISONO_FAULT="backward@1:0")
    assert done.returncode == 1, done.stderr
    assert (hostile.folder / "run/report.html").exists(), done.stderr


@pytest.mark.full
def test_a_launch_of_this_host_with_servers_and_of_a_script(hostile: Hostile, desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/neighbour.py").write_text("WORD = 'imported'\n")
    script = tmp_path / "mine/script.py"
    script.write_text("import neighbour, os\nprint('neighbour', neighbour.WORD, os.environ['UNISONO_RANK'])\n")
    launch = [
        "launch",
        "-n",
        "2",
        "--servers",
        "1",
        "--dir",
        str(tmp_path / "launch"),
        "--",
        sys.executable,
        str(script),
    ]
    done = hostile.run(desk, [*MAIN, *launch])
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition("neighbour")[2] for line in done.stdout.splitlines()) == [" imported 0", " imported 1"]


@pytest.mark.full
def test_a_python_configuration_and_its_neighbours(hostile: Hostile, desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/neighbour.py").write_text("STEPS = 2\n")
    config = tmp_path / "mine/run.py"
    config.write_text(
        textwrap.dedent("""
        import neighbour
        from unisono.train import RunConfig, TrainOptions
        def config():
            return RunConfig(train=TrainOptions(steps=neighbour.STEPS))
        """)
    )
    settings = [text for text in [*desk.settings, *SMALL] if "train.steps" not in text]
    done = hostile.run(desk, [*MAIN, "train", str(config), *settings, "--set=launch.num_processes=2"])
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (hostile.folder / "run/checkpoints").glob("step-*")] == ["step-00000002"]


@pytest.mark.full
def test_the_benchmark_of_stores(hostile: Hostile, desk: Desk) -> None:
    sizes = ["--size", "1KB", "--rounds", "1"]
    done = hostile.run(desk, [*MAIN, "kvstore", "bench", "--kind", "dist_async", *sizes])
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_agents_of_hosts(hostile: Hostile, desk: Desk, tmp_path: Path) -> None:
    """They are reached over ssh, and go to the working folder of the launcher before they start."""
    script, hosts, folder = tmp_path / "script.py", tmp_path / "hosts", tmp_path / "launch"
    script.write_text("import os\nprint('rank', os.environ['UNISONO_RANK'], 'in', os.getcwd())\n")
    (tmp_path / "sshd").mkdir()
    with serve(tmp_path / "sshd") as sshd:
        hosts.write_text(f"127.0.0.1 slots=1\n127.0.0.2:{sshd.port} slots=1\n")
        launch = ["launch", "--hostfile", str(hosts), "--ssh-port", str(sshd.port), "--dir", str(folder)]
        # the script leaves its working folder out too, so that what is imported is an agent's import
        done = hostile.run(desk, [*MAIN, *launch, "--", sys.executable, "-P", str(script)], **sshd.environ)
    assert done.returncode == 0, done.stderr
    said = sorted(line.partition("] ")[2] for line in done.stdout.splitlines() if "rank" in line)
    assert said == [f"rank {rank} in {hostile.folder}" for rank in range(2)]
    assert set(json.loads((folder / "launch.json").read_text())["hosts"]) == {"127.0.0.1", "127.0.0.2"}


# --- every command line with Python ----------------------------------------------------------------------------------

# names under which a program finds its own interpreter, and what starts one by itself
INTERPRETERS = {"sys.executable", "sys._base_executable", "sys.orig_argv"}
STARTERS = {"multiprocessing", "concurrent.futures.ProcessPoolExecutor", "concurrent.futures.process"}
NO_PROCESSES = {"multiprocessing.connection", "multiprocessing.shared_memory"}
# as a path, with a version or with an option; the mere word is one where it is a part of a command line
PYTHON = re.compile(
    r"(^|[/\\ ])(python|pypy)([0-9.]+w?(\.exe)?$|w?(\.exe)$|[0-9.]*w? -)|[/\\](python|pypy)$|^/proc/(self|[0-9]+)/exe$"
)
WORDS = re.compile(r"python|pypy|pythonw|executable|_base_executable")


def pythons(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Where a file names an interpreter: as an attribute of ``sys``, by its own name or path in a text, or by what starts one."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    parts = {
        id(part)
        for node in ast.walk(source.tree)
        for part in (
            node.elts[:2]
            if isinstance(node, ast.List | ast.Tuple)
            else node.args
            if isinstance(node, ast.Call) and source.full_name(node.func) in ("shutil.which", "getattr")
            else ()
        )
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute | ast.Name) and source.full_name(node) in INTERPRETERS | STARTERS:
            yield node, source.full_name(node)
        text = constant(node) if id(node) not in documentation else None
        if isinstance(text, str) and (PYTHON.search(text) or (id(node) in parts and WORDS.fullmatch(text))):
            yield node, text
    for node, name in source.imports():
        if is_in(name, INTERPRETERS | STARTERS) and not is_in(name, NO_PROCESSES):
            yield node, name


def starts(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Where a file starts a process, however its program is called."""
    for node, name in source.calls():
        if re.fullmatch(
            r"subprocess\.(Popen|run|call|check_call|check_output|getoutput|getstatusoutput)", name
        ) or re.fullmatch(
            r"(os|posix)\.(exec[lvpe]+|spawn[lvpe]+|posix_spawnp?|system|popen|startfile)|_posixsubprocess\.fork_exec"
            r"|asyncio\.(subprocess\.)?create_subprocess_(exec|shell)|runpy\.\w+",
            name,
        ):
            yield node, name


def test_one_function_makes_the_command_lines_of_our_own_processes() -> None:
    """The others are texts for people, comparisons, and the reaper of a launch, which has ``-I -S`` and starts in ``/``."""
    named = {
        file.removeprefix("src/unisono/"): [re.sub(r" in line \d+$", "", each) for each in lines]
        for file, lines in found(pythons, "src/unisono").items()
    }
    assert named == {
        # the name of a module and of a fact in a record
        "config/help_text.py": ["python"],
        "train/setup.py": ["python"],
        # a fact of a host, and texts
        "doctor/nodes.py": ["sys.executable"],
        "doctor/reachability.py": ["sys.executable"] * 2,
        "data/convert/pack/worker.py": ["python -c 'from MODULE import FUNCTION' says whether it can be found"],
        "dist/interpreter.py": ["sys.executable"] * 2,
        "launch/script_hook/sitecustomize.py": ["sys.executable"],
        # the user's own script, as he starts it himself
        "compare/replay_child.py": ["sys.executable"],
        # of a line that is shown, and a text
        "launch/launcher_lines.py": [
            "python",
            "python",
            "it is a line of torchrun, python -m torch.distributed.run or .launch, msrun, mpirun, horovodrun, accelerate launch, "
            "deepspeed, MXNet's launch.py, or DMLC_NUM_WORKER=… and a program",
        ],
        # part of a path
        "profile/growth_watch.py": ["/lib/python3"],
        "launch/workers.py": ["sys.executable"] * 3,
    }
    text = (ROOT / "src/unisono/launch/workers.py").read_text()
    assert '[sys.executable, "-I", "-S", str(Path(reaper.__file__))]' in text


def test_every_place_that_starts_a_process_is_known() -> None:
    """Each takes its command from ``dist/interpreter.py``, from the user, or runs another program than Python."""
    begun = {file.removeprefix("src/unisono/"): len(lines) for file, lines in found(starts, "src/unisono").items()}
    assert begun == {
        "cli/plan_auto.py": 1,
        "data/image/restart_markers.py": 1,
        "data/loading/subprocess_map.py": 1,
        "device/npu_smi.py": 1,
        "dist/dmlc.py": 1,
        "doctor/ranks.py": 1,
        "doctor/reachability.py": 2,
        "doctor/storage.py": 1,
        "kvstore/bench/processes.py": 1,
        "kvstore/server/child_servers.py": 1,
        "launch/child.py": 1,
        "launch/host_agent_client.py": 1,
        "launch/missing_report.py": 1,
        "launch/mpi_slurm.py": 1,
        "launch/resources.py": 1,
        "launch/workers.py": 2,
    }


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nx = [sys.executable, '-m', y]",
        "from sys import executable as mine\nx = [mine]",
        "import sys as s\nx = [getattr(s, 'executable')]",
        "import sys\nx = sys._base_executable",
        "import sys\nx = sys.orig_argv[0]",
        "x = ['python3', '-m', y]",
        "x = f'{folder}/bin/python'",
        "x = 'exec python3.11 -m unisono'",
        "import shutil\nx = shutil.which('python')",
        "x = ['/usr/bin/env', 'python3']",
        "import os\nx = os.readlink('/proc/self/exe')",
        "import multiprocessing",
        "from multiprocessing import get_context",
        "from concurrent.futures import ProcessPoolExecutor",
        "from concurrent import futures\nx = futures.ProcessPoolExecutor()",
    ],
)
def test_every_way_to_name_an_interpreter_is_seen(text: str) -> None:
    assert finds(pythons, text)


@pytest.mark.parametrize(
    "text",
    [
        "import subprocess as s\ns.run(x)",
        "from subprocess import Popen as Child\nChild(x)",
        "import os\nos.execvp(x, y)",
        "import os\nos.posix_spawn(x, y, z)",
        "import os\nos.spawnlp(x, y)",
        "import asyncio\nasyncio.create_subprocess_exec(x)",
        "import runpy\nrunpy.run_module(x)",
    ],
)
def test_every_way_to_start_a_process_is_seen(text: str) -> None:
    assert finds(starts, text)
