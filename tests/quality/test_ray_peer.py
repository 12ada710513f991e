"""Data sets prepared on a Ray cluster, by the real package: UNISONO_RAY_PYTHON names an interpreter that has ray 2.60.0."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import planted
import psutil
import pytest
from pictures import jpeg, photograph
from procs import is_running, listening, wait_until

SRC = Path(__file__).parents[2] / "src"
RAY = os.environ.get("UNISONO_RAY_PYTHON")
TASK = "ray::make_chunk_on_node"

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(300),  # Ray starts a dozen processes
    pytest.mark.skipif(RAY is None, reason="set UNISONO_RAY_PYTHON to an interpreter with ray: nothing was compared"),
]

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
settings = dict(num_cpus=1, object_store_memory=160 << 20, include_dashboard=False)
cluster = Cluster(initialize_head=True, head_node_args=settings)
cluster.add_node(**settings)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


AHEAD = """
import json
import numpy as np
from safetensors.numpy import load
from unisono.errors import UnisonoError
from unisono.quality.duplicates.chunks import encode_request, make_chunk
from unisono.quality.options import CleanRecipe
from unisono.quality.duplicates.ray_map import ray_map
most, drawn, answered = 0, 0, 0
hashes = np.zeros(0, np.uint64)
def requests():
    global drawn
    for number in range(40):
        drawn += 1
        yield number, encode_request([b"text %d" % number], None)
for limit, size in ((40, 16 << 20), (3, 32 << 20)):  # the second one ends early, and begins a cluster of its own
    drawn = 0
    chunks = ray_map(requests(), CleanRecipe(), hashes, address="local", request_bytes=size)
    for answered, (number, chunk) in enumerate(chunks, 1):
        assert number == answered - 1
        here, there = load(make_chunk([b"text %d" % number], CleanRecipe(), hashes)), load(chunk)
        assert here.keys() == there.keys()
        assert all(here[name].tobytes() == there[name].tobytes() for name in here)  # also of what was not measured, NaN
        most = max(most, drawn - answered)
        if answered == limit:
            break
    chunks.close()
    assert answered == limit
print(json.dumps(most))
try:
    list(ray_map([(0, b"no request")], CleanRecipe(), hashes, address="local", request_bytes=16 << 20))
except UnisonoError as error:
    assert error.problems[0].given.startswith("a task of the Ray cluster that ended with ValidationError: "), error
else:
    raise AssertionError("a damaged request was answered")
"""


def environ(folder: Path, source: Path | None = SRC) -> dict[str, str]:
    """Without Ray's variables and any other module path; temporary files in a folder with a short name."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = "" if source is None else str(source)
    return kept | {"PYTHONPATH": path, "TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name is short enough for the sockets below it."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five batches of documents, with copies."""
    rng = np.random.default_rng(8)
    texts = planted.documents(16_000, rng)
    texts += [planted.edited(text, 1, rng) for text in texts[:500]] + texts[500:1000]
    source = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    source.write_text("".join(json.dumps({"text": text, "label": text[1]}) + "\n" for text in texts))
    return source


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the same job in one process."""
    out = tmp_path_factory.mktemp("whole") / "out"
    subprocess.run(
        command("dedup", corpus, "--out", out, "--workers", "0"),
        env=environ(out.parent),
        check=True,
        capture_output=True,
    )
    return tree(out)


def command(*arguments: object) -> list[str]:
    assert RAY is not None
    return [RAY, "-P", "-m", "unisono", "data", *map(str, arguments)]


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def journal(out: Path) -> Path:
    return out / "work" / "sketches" / "chunks.jsonl"


def begin(short: Path, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), env=environ(short), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], *, told: str = "") -> dict[str, Any]:
    """The result. ``told`` is in what Ray prints about its processes."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert told in err
    assert bool(told) == bool(err)
    assert out.count("\n") == 1
    return json.loads(out)


def run(short: Path, *arguments: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env=environ(short),
        cwd=folder or short,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def working(pid: int) -> psutil.Process | None:
    """A process below another that makes a batch now."""
    for process in below(pid):
        try:
            if process.cmdline()[:1] == [TASK] or process.name().startswith(TASK[:15]):
                return process
        except psutil.Error:
            continue
    return None


def below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_one(pid: int) -> bool:
    """Kill a process below another if it makes a batch, and say whether that was so."""
    if (process := working(pid)) is None:
        return False
    try:
        process.suspend()
        is_still_at_it = process.cmdline()[:1] == [TASK]
        if is_still_at_it:
            process.kill()
        else:
            process.resume()
    except psutil.NoSuchProcess:
        return False
    return is_still_at_it


@contextmanager
def two_nodes(short: Path, source: Path | None = SRC) -> Iterator[tuple[int, str]]:
    """The process that started a cluster of two nodes, and the cluster's address. ``source`` is in the nodes' module path."""
    assert RAY is not None
    (short / "ray").mkdir(exist_ok=True)  # where Ray writes the cluster's address
    process = subprocess.Popen(
        [RAY, "-P", "-c", CLUSTER],
        env=environ(short, source),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.pid, process.stdout.readline().strip()
    finally:
        started = below(process.pid)
        process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()
        psutil.wait_procs(started, timeout=30)


def test_one_machine(corpus: Path, whole: dict[str, bytes], short: Path, tmp_path: Path) -> None:
    """Nothing but the result is printed, nothing is left, and no port is open to other machines."""
    process = begin(short, "dedup", corpus, "--out", tmp_path / "out", "--ray", "local", "--json")
    wait_until(lambda: working(process.pid) is not None, "a task", 120)
    started = [psutil.Process(process.pid), *below(process.pid)]
    ports = {address for each in started if is_running(each.pid) for address in listening(each.pid)}
    modes = {each.environ().get("RAY_AUTH_MODE") for each in started if each.name() in ("gcs_server", "raylet")}
    assert finish(process)["dropped"] == {"dedup.exact": 500, "dedup.near": 500}
    assert tree(tmp_path / "out") == whole
    assert ports
    assert {address.rpartition(":")[0][-8:] for address in ports} == {"0100007F"}
    assert modes == {"token"}
    assert os.listdir(short) == []
    wait_until(lambda: not any(is_running(each.pid) for each in started), "the end of Ray's processes")


def test_a_killed_command_goes_on(corpus: Path, whole: dict[str, bytes], short: Path, tmp_path: Path) -> None:
    """Its processes end with it. What it had finished is not made again, here or there."""
    arguments = ("dedup", corpus, "--out", tmp_path / "out", "--json")
    killed = begin(short, *arguments, "--ray", "local")
    lines = journal(tmp_path / "out")
    wait_until(lambda: killed.poll() is not None or (lines.exists() and lines.stat().st_size > 0), "a batch", 120)
    # two of Ray's agents notice it a minute later
    started = [each for each in below(killed.pid) if "Agent" not in each.name()]
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    wait_until(lambda: not any(is_running(each.pid) for each in started), "the end of Ray's processes", 120)
    made = lines.read_bytes()
    assert 0 < made.count(b"\n") < 5
    stopped = begin(short, *arguments, "--ray", "local")
    wait_until(lambda: stopped.poll() is not None or lines.stat().st_size > len(made), "another batch", 120)
    stopped.send_signal(signal.SIGTERM)
    _, err = stopped.communicate(timeout=60)
    assert (stopped.returncode, err) == (75, f"unisono: interrupted; the same command goes on in {tmp_path / 'out'}\n")
    assert lines.read_bytes().startswith(made)
    finish(begin(short, *arguments, "--workers", "0"))
    assert tree(tmp_path / "out") == whole


def test_a_batch_whose_process_dies_is_made_again(
    corpus: Path, whole: dict[str, bytes], short: Path, tmp_path: Path
) -> None:
    process = begin(short, "dedup", corpus, "--out", tmp_path / "out", "--ray", "local", "--json")
    wait_until(lambda: kill_one(process.pid), "a task", 120)
    finish(process, told="A worker died or was killed")
    assert tree(tmp_path / "out") == whole


def test_a_batch_whose_process_always_dies(corpus: Path, whole: dict[str, bytes], short: Path, tmp_path: Path) -> None:
    process = begin(short, "dedup", corpus, "--out", tmp_path / "out", "--ray", "local")
    killed: list[bool] = []

    def has_ended() -> bool:
        killed.append(kill_one(process.pid))
        return process.poll() is not None

    wait_until(has_ended, "the end", 120)
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    assert sum(killed) >= 4
    assert "unisono: a task of the Ray cluster: " in err
    assert "tried 3 more times" in err
    assert "Traceback" not in err
    finish(begin(short, "dedup", corpus, "--out", tmp_path / "out", "--workers", "0", "--json"))
    assert tree(tmp_path / "out") == whole


def test_a_machine_that_dies(corpus: Path, whole: dict[str, bytes], short: Path, tmp_path: Path) -> None:
    with two_nodes(short) as (cluster, address):
        process = begin(short, "dedup", corpus, "--out", tmp_path / "out", "--ray", address, "--json")
        raylets = [each for each in psutil.Process(cluster).children() if each.name() == "raylet"]
        other = max(raylets, key=lambda raylet: raylet.create_time())
        assert len(raylets) == 2
        wait_until(lambda: working(other.pid) is not None, "a task on the other node", 120)
        other.kill()
        finish(process, told="Raylet is terminated")
    assert tree(tmp_path / "out") == whole


def test_requests_in_flight_are_bounded_and_answers_in_order(short: Path) -> None:
    assert RAY is not None
    done = subprocess.run(
        [RAY, "-P", "-c", AHEAD], env=environ(short), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 1 <= json.loads(done.stdout) <= max(2, 2 * len(os.sched_getaffinity(0)))


def test_every_command(short: Path, tmp_path: Path) -> None:
    """Also those that read benchmarks and labels."""
    rng = np.random.default_rng(1)
    texts = planted.documents(40, rng, words=(60, 90))
    texts += [planted.edited(text, 1, rng) for text in texts[:10]]
    rows = [json.dumps({"text": text, "label": "ab"[n % 3 == 0]}) + "\n" for n, text in enumerate(texts)]
    for name, part in (("a.jsonl", rows), ("b.jsonl", rows[5:15]), ("benchmark.jsonl", rows[20:22])):
        (tmp_path / name).write_text("".join(part))
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    commands = {
        "clean": ("clean", a, "--set", f'decontaminate.against=["{tmp_path}/benchmark.jsonl"]'),
        "split": ("split", a, "--part", "x=0.5", "--part", "y=0.5"),
        "leak": ("leak", b, a),
        "labels": ("labels", a, "--label", "label"),
    }
    with two_nodes(short) as (_, address):
        for name, arguments in commands.items():
            for out, where in (("here", ("--workers", "0")), ("there", ("--ray", address))):
                done = run(short, *arguments, "--out", tmp_path / out / name, *where)
                assert done.returncode == (1 if name == "leak" else 0), done.stderr
                assert done.stderr == ""
            assert tree(tmp_path / "here" / name) == tree(tmp_path / "there" / name)
    report = json.loads((tmp_path / "there" / "clean" / "report.json").read_text())
    assert report["dropped"]["decontaminate"] == 2


def test_machines_with_another_unisono_or_none(short: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n')
    shutil.copytree(SRC, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "src" / "unisono" / "quality" / "duplicates" / "shingles.py").open("a") as file:
        file.write("# another version\n")
    for source, message in (
        (tmp_path / "src", ", a machine of the Ray cluster, with unisono of source "),
        (None, "a machine of the Ray cluster that cannot import unisono.quality.duplicates.ray_map"),
    ):
        with two_nodes(short, source) as (_, address):
            done = run(short, "dedup", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--ray", address)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    done = run(short, "dedup", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--workers", "0")
    assert done.returncode == 0, done.stderr


def test_an_error_of_a_task_and_one_of_the_start(short: Path, tmp_path: Path) -> None:
    """A task takes no module of the working folder for a package that is missing."""
    (tmp_path / "simplejpeg.py").write_text("raise RuntimeError('planted')\n")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(jpeg(photograph(0)))
    arguments = ("dedup", tmp_path / "photos", "--out", tmp_path / "out")
    without_decoder = run(short, *arguments, "--ray", "local", folder=tmp_path)
    assert without_decoder.returncode == 2
    assert "a machine of the Ray cluster, " in without_decoder.stderr
    assert "pip install 'unisono[images]'" in without_decoder.stderr
    assert "Traceback" not in without_decoder.stderr
    no_cluster = run(short, *arguments, "--ray", "127.0.0.1:1")
    assert no_cluster.returncode == 2
    assert no_cluster.stderr.startswith("unisono: --ray 127.0.0.1:1: ")
    assert len(no_cluster.stderr.splitlines()) == 4, no_cluster.stderr
