"""Locks with hashes, the question for known vulnerabilities, the bill of materials, and builds that are the same twice."""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import audit
import pytest
from locks import LOCKS, entries, main
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = LOCKS.parent
needs_builders = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("build", "hatchling", "cyclonedx_py", "pip_audit")),
    reason="this environment was made before they were dependencies: remove .venv/bin/.dev",
)


def locked(name: str) -> dict[str, list[str]]:
    """Versions by package."""
    found: dict[str, list[str]] = {}
    for package, version, _ in entries((LOCKS / name).read_text()):
        found.setdefault(package, []).append(version)
    return found


def declared() -> list[Requirement]:
    """All that pyproject.toml asks for, the build's own included, and what constraints.txt narrows it to."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    texts = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    extras = project["project"]["optional-dependencies"]
    texts += [text for text in extras["dev"] if not text.startswith("unisono[")]
    (itself,) = (Requirement(text) for text in extras["dev"] if text.startswith("unisono["))
    texts += [text for extra in itself.extras for text in extras[extra]]
    texts += [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("name", ["cpu.txt", "cuda.txt"])
def test_every_requirement_is_locked_to_releases_that_it_allows(name: str) -> None:
    versions = locked(name)
    for requirement in declared():
        found = versions[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in found), (requirement, found)


@pytest.mark.parametrize("name", ["cpu.txt", "cuda.txt"])
def test_every_locked_release_has_hashes(name: str) -> None:
    text = (LOCKS / name).read_text()
    found = entries(text)
    assert len(found) == sum(line[:1].isalnum() for line in text.splitlines())
    assert all(hashes for _, _, hashes in found)


def test_the_lock_without_cuda_is_the_other_one_and_cpu_builds_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(LOCKS, tmp_path / "locks")
    monkeypatch.setattr("locks.LOCKS", tmp_path / "locks")
    main()
    assert (tmp_path / "locks" / "cpu.txt").read_text() == (LOCKS / "cpu.txt").read_text()
    only_cuda = locked("cuda.txt").keys() - locked("cpu.txt").keys()
    assert only_cuda
    assert all(package.startswith(("nvidia-", "cuda-", "triton")) for package in only_cuda)
    hashes = {
        version: found for package, version, found in entries((LOCKS / "cpu.txt").read_text()) if package == "torch"
    }
    (version,) = locked("cuda.txt")["torch"]
    builds = [line.split() for line in (LOCKS / "torch-cpu.sha256").read_text().splitlines()]
    assert hashes[f"{version}+cpu"] == [digest for digest, _ in builds]
    assert all(name.startswith(f"torch-{version}+cpu-") for _, name in builds)


@pytest.mark.full
@needs_builders
def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    hashes: list[dict[str, str]] = []
    for number, mode in enumerate((0o755, 0o700)):
        # another folder, other times and permissions of files
        folder = tmp_path / f"tree-{number}"
        shutil.copytree(
            ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copy
        )
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"):
            shutil.copy(ROOT / name, folder)
        for path in folder.rglob("*"):
            path.chmod(mode if path.is_dir() else mode & 0o666)
            os.utime(path, (10**9 + number, 10**9 + number))
        argv = [
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            "--outdir",
            str(tmp_path / f"dist-{number}"),
            str(folder),
        ]
        subprocess.run(argv, check=True, capture_output=True, timeout=120)
        hashes.append(
            {
                path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                for path in (tmp_path / f"dist-{number}").iterdir()
            }
        )
    assert sorted(path.rpartition(".")[2] for path in hashes[0]) == ["gz", "whl"]
    assert hashes[0] == hashes[1]


@pytest.mark.full
@needs_builders
def test_the_bill_of_materials_lists_what_the_lock_installs(tmp_path: Path) -> None:
    target = tmp_path / "sbom.json"
    argv = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "requirements",
        str(LOCKS / "cpu.txt"),
        "--output-reproducible",
        "--of",
        "JSON",
    ]
    argv += ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library", "-o", str(target)]
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    bill = json.loads(target.read_text())
    assert bill["metadata"]["component"]["name"] == "unisono"
    listed = {(component["name"], component["version"]) for component in bill["components"]}
    assert listed == {(package, version) for package, version, _ in entries((LOCKS / "cpu.txt").read_text())}


class Database(http.server.BaseHTTPRequestHandler):
    """Answers as osv.dev does: jinja2 2.4.1 and leaky 1.0 have one vulnerability each."""

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, version = query["package"]["name"], query["version"]
        body: dict[str, object] = {}
        if (name, version) in (("jinja2", "2.4.1"), ("leaky", "1.0")):
            ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "9.9"}]}]
            package = {"name": name, "ecosystem": "PyPI"}
            body = {
                "vulns": [{"id": "TEST-1", "summary": "leaks", "affected": [{"package": package, "ranges": ranges}]}]
            }
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def database() -> Iterator[list[str]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Database)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield ["-s", "osv", "--osv-url", f"http://127.0.0.1:{server.server_port}/v1/query"]
    server.shutdown()
    thread.join()
    server.server_close()


def lock_of(folder: Path, package: str) -> Path:
    path = folder / "lock.txt"
    path.write_text(f"{package} --hash=sha256:{64 * '0'}\n")
    return path


@needs_builders
def test_a_known_vulnerability_fails_the_check(
    database: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(lock_of(tmp_path, "leaky==1.0"), database) == 1
    assert capsys.readouterr().out == "leaky 1.0: TEST-1, mended in 9.9\n"
    assert audit.main(lock_of(tmp_path, "sound==1.0"), database) == 0
    assert "no known vulnerability in " in capsys.readouterr().out


@needs_builders
def test_a_database_that_cannot_be_asked_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = ["-s", "osv", "--osv-url", "http://127.0.0.1:9/v1/query", "--timeout", "2"]
    assert audit.main(lock_of(tmp_path, "leaky==1.0"), nowhere) == 0
    assert "NOT CHECKED, the database of vulnerabilities could not be asked: " in capsys.readouterr().out


@needs_builders
def test_a_lock_that_cannot_be_read_fails_the_check(
    database: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = lock_of(tmp_path, "sound==1.0")
    lock.write_text("sound==1.0\n")  # without hashes
    for wrong in (lock, tmp_path / "missing.txt"):
        assert audit.main(wrong, database) == 1
        assert "NOT CHECKED, though the database answers: " in capsys.readouterr().out
