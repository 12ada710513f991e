"""Another user of the host reads a run: to evaluate, verify and export it, as far as the umask of its owner lets her."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Desk, make_desk
from modes import PRIVATE, modes, public_folder, umask

COLLEAGUE = 65534

# As the owner first, which imports all there is: another user need not be able to read this Python installation.
READS = """
import json, os, sys
from unisono.cli.main import cli
run, folder = sys.argv[1:]
for uid in (os.geteuid(), int(os.environ["COLLEAGUE"])):
    if uid != os.geteuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    own = f"{folder}/{uid}"
    os.environ |= {"UNISONO__DATA__CACHE_DIR": f"{own}/cache", "XDG_STATE_HOME": f"{own}/state", "XDG_CACHE_HOME": own}
    print(json.dumps({"uid": os.geteuid()}), flush=True)
    for command in (["eval", run, "--json"], ["checkpoint", "verify", run, "--json"],
                    ["checkpoint", "export", run, f"{own}/export", "--json"]):
        cli.main(command, standalone_mode=False)
found = f"{run}/launch/launch.json"
print(json.dumps({"exists": os.path.exists(found), "readable": os.access(found, os.R_OK)}))
"""


def read_by_another(desk: Desk, run: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    for uid in (os.geteuid(), COLLEAGUE):
        (folder / str(uid)).mkdir(parents=True)
        os.chown(folder / str(uid), uid, uid)
    environ = desk.child_environ(COLLEAGUE=str(COLLEAGUE))
    command = [sys.executable, "-c", READS, str(run), str(folder)]
    return subprocess.run(command, cwd="/", env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root: her reading of a run was not tried")
@pytest.mark.parametrize(("mask", "readable"), [(0o022, True), (0o077, False)])
def test_a_colleague_evaluates_a_run_if_the_umask_lets_her(mask: int, readable: bool) -> None:
    with public_folder() as folder:
        desk = make_desk(folder / "desk", folder / "cache")
        run = desk.folder / "run"
        with umask(mask):
            train = ["-P", "-m", "unisono", "train", *desk.settings, f"--set=run.dir={run}"]
            done = desk.process("launch", "-n", "1", "--dir", str(run / "launch"), "--", sys.executable, *train)
        assert done.code == 0, done.err
        # what is looked at below must be there
        assert (run / "launch/launch.json").is_file()
        before = modes(run)
        assert before["launch/launch.json"] == PRIVATE
        seen = read_by_another(desk, run, folder / "theirs")
        lines = [json.loads(line) for line in seen.stdout.splitlines()]
        assert lines[0] == {"uid": 0}
        assert lines[4] == {"uid": COLLEAGUE}
        if readable:
            assert seen.returncode == 0, seen.stderr
            assert lines[5]["evaluation"] == lines[1]["evaluation"]
            assert lines[5]["evaluation"]
            assert lines[6] == lines[2]
            assert (folder / f"theirs/{COLLEAGUE}/export/model.safetensors").is_file()
            assert lines[8] == {"exists": True, "readable": False}  # arguments of the launch are its owner's
        else:
            assert seen.returncode != 0
            assert len(lines) == 5
        assert modes(run) == before
