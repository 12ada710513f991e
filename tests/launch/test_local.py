"""The launcher's promises, with real processes that crash, hang, stop and are killed. The workers here need no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from launching import run, start
from little_memory import small_memory
from modes import FILE, left, mode_of
from procs import command_lines, is_running, listening, marked, wait_until

from unisono.errors import LaunchError
from unisono.launch import LaunchOptions, launch_local
from unisono.launch.supervise import first_attempt, job_folder
from unisono.launch.workers import open_log

# --- how it ends -----------------------------------------------------------------------------------------------------


def test_all_ranks_end_well(tmp_path: Path) -> None:
    script = """
assert (job.source, job.world_size, job.local_world) == ("unisono", 2, 2)
assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(job.rank), "2")
assert sys.stdin.read() == ""
print("hello from", job.rank)
seen("env", json.dumps({
    "launch": json.loads(os.environ["UNISONO_LAUNCH"]), "cpus": sorted(os.sched_getaffinity(0)),
    "omp": os.environ["OMP_NUM_THREADS"], "mmap": os.environ["MALLOC_MMAP_THRESHOLD_"], "pgid": os.getpgid(0) == os.getpid(),
}))
"""
    launched = start(script, tmp_path)
    out, _ = launched.process.communicate(timeout=60)
    assert launched.process.returncode == 0
    # rank 0 has the launcher's terminal, the others have logs
    assert out == "hello from 0\n"
    log = launched.run_dir / "logs" / "rank-1.attempt-0.log"
    assert log.read_text() == "hello from 1\n"
    assert mode_of(log) == left(FILE)
    record = launched.record()
    assert record["processes"] == 2
    assert record["run_id"] == "test"
    assert record["allocator"]["MALLOC_TOP_PAD_"] == "268435456"
    (attempt,) = record["attempts"]
    assert record["began_at_s"] == attempt["began_at_s"]
    assert attempt.pop("began_at_s") <= attempt.pop("ended_at_s")
    assert attempt == {
        "attempt": 0,
        "exit_codes": [0, 0],
        "stopped_by": None,
        "root_rank": None,
        "failure": None,
        "cause": None,
        "decision": {"restart": False, "why": "finished"},
    }
    for rank in (0, 1):
        told = json.loads((launched.run_dir / f"env.{rank}.0").read_text())
        share = record["affinity"][rank] if record["affinity"] else None
        assert told["launch"]["affinity"] == share
        assert share is None or told["cpus"] == share
        assert (told["omp"], told["mmap"], told["launch"]["threads"]) == ("1", "4294967296", 1)
        assert told["pgid"] is True
    assert sorted(path.name for path in launched.run_dir.iterdir()) == [
        *("env.0.0", "env.1.0", "launch.json", "launch.lock", "logs"),
    ]


def test_a_user_error_is_never_restarted(tmp_path: Path) -> None:
    code, said, launched = run("sys.exit(2 if job.rank == 1 else 0)", tmp_path)
    assert code == 2
    assert "attempt 0: rank 1 (pid " in said
    assert "ended with exit code 2" in said
    assert "restarting" not in said
    assert len(launched.record()["attempts"]) == 1


def test_what_a_user_must_change_is_said_once_and_by_rank_0(tmp_path: Path) -> None:
    # rank 0 is slower to end than the launcher waits for the peers of a crash
    code, said, launched = run("time.sleep(1.5 * (1 - job.rank)); sys.exit(2)", tmp_path)
    assert (code, said) == (2, "")
    assert launched.record()["attempts"][0]["exit_codes"] == [2, 2]


def test_a_user_error_of_one_rank_is_its_text_and_no_traceback(tmp_path: Path) -> None:
    script = """
if job.rank == 1:
    record_failure(run_dir / "logs", job, ValueError("three heads for two ranks"), step=None)
    sys.exit(2)
"""
    code, said, _ = run(script, tmp_path)
    assert code == 2
    assert "it failed before the first step:\nlaunch: three heads for two ranks" in said
    assert "ValueError" not in said


def test_what_must_not_be_repeated_is_not(tmp_path: Path) -> None:
    code, said, launched = run("sys.exit(76 * job.rank)", tmp_path)
    assert code == 76
    assert "a rank says that this would fail again the same way; not restarted" in said
    assert launched.record()["attempts"][0]["exit_codes"] == [0, 76]


def test_requeue_from_all_is_requeue(tmp_path: Path) -> None:
    code, said, launched = run("time.sleep(0.2 * job.rank); sys.exit(75)", tmp_path)
    assert (code, said) == (75, "")
    assert launched.record()["attempts"][0]["exit_codes"] == [75, 75]


def test_a_crash_is_explained_and_restarted_at_the_next_epoch(tmp_path: Path) -> None:
    script = """
seen("start", os.environ.get("UNISONO_FAULT"))
if job.restart_count == 0:
    if job.rank == 1:
        try:
            raise ValueError("bad sample 7")
        except ValueError as error:
            record_failure(run_dir / "logs", job, error, step=12)
        sys.exit(1)
    time.sleep(600)
"""
    code, said, launched = run(script, tmp_path, environ={"UNISONO_FAULT": "never@1"})
    assert code == 0
    assert "attempt 0: rank 1 (pid " in said
    assert "launch: it failed in step 12:" in said
    assert "launch: ValueError: bad sample 7" in said
    assert "launch: restarting all ranks as attempt 1 (restart 1 of 3)" in said
    first, second = launched.record()["attempts"]
    assert (first["exit_codes"], first["root_rank"], first["failure"]) == ([-15, 1], 1, "ValueError: bad sample 7")
    assert (second["attempt"], second["exit_codes"]) == (1, [0, 0])
    # a drill hits the first attempt only
    assert (launched.run_dir / "start.0.0").read_text() == "never@1"
    assert (launched.run_dir / "start.0.1").read_text() == "None"


def test_the_cause_is_named_and_not_the_peer_that_failed_of_it(tmp_path: Path) -> None:
    script = """
class CommError(Exception): pass
def fail(error):
    record_failure(run_dir / "logs", job, error, step=3)
    sys.exit(1)
if job.rank == 0:
    fail(CommError("all_reduce failed"))
time.sleep(0.3)
fail(ZeroDivisionError("the cause"))
"""
    code, said, _ = run(script, tmp_path, max_restarts=0)
    assert code == 1
    assert "attempt 0: rank 1 (pid " in said
    assert "ZeroDivisionError: the cause" in said
    assert "no restart left of 0 (launch.max_restarts); the newest checkpoint is kept" in said


def test_the_same_crash_after_one_restart_is_the_end(tmp_path: Path) -> None:
    script = """
if job.rank == 0:
    record_failure(run_dir / "logs", job, RuntimeError("loss is a banana"), step=41)
    sys.exit(1)
time.sleep(600)
"""
    code, said, launched = run(script, tmp_path, max_restarts=50)
    assert code == 1
    assert len(launched.record()["attempts"]) == 2
    assert "launch: RuntimeError in step 41 on rank 0, 2 times in a row" in said
    assert "rule: a crash with the same type, message and step as the one before is not restarted again" in said
    assert "so:   the run ends here; the newest checkpoint is kept" in said
    assert "try:  repair the cause shown above, then start the same command again" in said


BUG = """
def model(step):
    raise ValueError("size mismatch")
try:
    model(0)
except ValueError as error:
    record_failure(run_dir / "logs", job, error, step=STEP)
    raise
"""


@pytest.mark.parametrize("step", [None, 0])
def test_a_bug_before_the_first_finished_step_is_not_restarted_and_shown_once(step: int | None, tmp_path: Path) -> None:
    code, said, launched = run(BUG.replace("STEP", str(step)), tmp_path, max_restarts=3)
    assert code == 1
    assert len(launched.record()["attempts"]) == 1
    assert "launch: ValueError on rank " in said
    assert " before the first finished step\n" in said
    assert (
        "rule: an error of the program before its first finished step would come back, so it is not restarted" in said
    )
    assert "so:   the run ends here" in said
    assert "try:  repair the cause shown above, then start the same command again" in said
    assert said.count("Traceback (most recent call last)") == 1


def run_plain(script: str, folder: Path, command: Sequence[str], *options: str) -> tuple[int, str]:
    """``unisono launch`` of a script that uses nothing of unisono; exit code and what was shown."""
    (folder / "plain.py").write_text(script)
    argv = [sys.executable, "-m", "unisono", "launch", "--dir", str(folder / "run"), *options, "--", *command]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_an_error_at_the_start_of_a_plain_script_is_shown_once_and_not_restarted(tmp_path: Path) -> None:
    code, said = run_plain("import nosuch", tmp_path, [sys.executable, "plain.py"], "-n", "2")
    assert code == 1
    assert said.count("Traceback (most recent call last)") == 1
    assert "ModuleNotFoundError: No module named 'nosuch'" in said
    assert " s after the script began\n" in said
    assert "rule: an error of the program in its first 60 s would come back, so it is not restarted" in said
    attempts = json.loads((tmp_path / "run/launch.json").read_text())["attempts"]
    assert [attempt["failure"] for attempt in attempts] == ["ModuleNotFoundError: No module named 'nosuch'"]


HOOKS = """
import os, sys
sys.excepthook = lambda kind, error, trace: print("mine:", error, file=sys.stderr)
assert not any("script_hook" in text for text in [*sys.path, os.environ.get("PYTHONPATH", "")])
raise ValueError("no such column")
"""


@pytest.mark.full
@pytest.mark.parametrize("command", [[sys.executable, "plain.py"], ["sh", "-c", f"{sys.executable} plain.py; exit 1"]])
def test_a_script_with_its_own_hook_or_behind_a_shell_is_recorded_too(command: list[str], tmp_path: Path) -> None:
    code, said = run_plain(HOOKS, tmp_path, command)
    assert code == 1
    assert said.count("mine: no such column") == 1
    assert "ValueError on rank 0 " in said
    assert "restarting" not in said


@pytest.mark.full
def test_the_interpreters_own_sitecustomize_is_loaded_and_helpers_are_not_recorded(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("MARK = 7")
    script = """
import subprocess, sys, sitecustomize
assert sitecustomize.MARK == 7
assert subprocess.run([sys.executable, "-c", "raise ValueError('of a helper')"], stderr=subprocess.DEVNULL).returncode == 1
"""
    code, said = run_plain(script, tmp_path, [sys.executable, "plain.py"], "--env", f"PYTHONPATH={tmp_path}")
    assert code == 0, said
    assert not list((tmp_path / "run/logs").glob("failure-*"))


@pytest.mark.full
def test_an_error_that_passes_in_a_plain_script_is_restarted(tmp_path: Path) -> None:
    script = "import os\nif os.environ['UNISONO_RESTART_COUNT'] == '0': raise ConnectionResetError('peer')"
    code, said = run_plain(script, tmp_path, [sys.executable, "plain.py"])
    assert code == 0
    assert "restarting all ranks as attempt 1" in said


def test_a_later_error_of_a_script_is_restarted_once_and_explained_once(tmp_path: Path) -> None:
    script = """
if job.rank == 1:
    record_failure(run_dir / "logs", job, KeyError("row 7"), step=None, script_s=61.0 + job.restart_count)
    sys.exit(1)
time.sleep(600)
"""
    code, said, launched = run(script, tmp_path, max_restarts=9)
    assert code == 1
    assert len(launched.record()["attempts"]) == 2
    assert "it failed 61.0 s after the script began:\n" in said
    assert "it failed 62.0 s after the script began, with the error that is shown above: KeyError: 'row 7'" in said
    assert "KeyError 62.0 s after the script began on rank 1, 2 times in a row" in said


def test_errors_of_the_other_ranks_are_named_in_a_line(tmp_path: Path) -> None:
    script = """
import os
if job.rank > 0:  # after rank 0, within the half second in which the launcher waits for others
    while not (run_dir / "first").exists():
        time.sleep(0.01)
    time.sleep(0.1)
error = [KeyError("a"), KeyError("a"), KeyError("a"), OverflowError("b")][job.rank]
record_failure(run_dir / "logs", job, error, step=0)
(run_dir / "first").touch()
os._exit(1)
"""
    code, said, _ = run(script, tmp_path, num_processes=4)
    assert code == 1
    assert "launch: it failed in step 0, as rank 0 has shown above: KeyError: 'a'" in said
    assert f"launch: ranks 1, 2: the same error (tracebacks in {tmp_path}/run/logs)" in said
    assert f"launch: rank 3: OverflowError: b (tracebacks in {tmp_path}/run/logs)" in said


def test_a_lost_connection_before_the_first_step_is_restarted(tmp_path: Path) -> None:
    script = """
if job.restart_count == 0:
    record_failure(run_dir / "logs", job, ConnectionResetError("peer"), step=None)
    sys.exit(1)
"""
    code, said, launched = run(script, tmp_path)
    assert code == 0, said
    assert len(launched.record()["attempts"]) == 2


def test_crashes_that_differ_use_up_the_restarts(tmp_path: Path) -> None:
    script = """
error = RuntimeError("again", job.restart_count)
record_failure(run_dir / "logs", job, error, step=1 + job.restart_count)
sys.exit(1)
"""
    code, said, launched = run(script, tmp_path, num_processes=1, max_restarts=4)
    assert code == 1
    assert len(launched.record()["attempts"]) == 5
    assert "no restart left of 4" in said


BUG_LATER = """
error, step = ERROR, 20 + 13 * job.restart_count
try:
    raise error
except Exception:
    record_failure(run_dir / "logs", job, error, step=step, checkpoint=f"step-{CHECKPOINT:08}")
    raise
"""


def later(error: str, checkpoint: str) -> str:
    return BUG_LATER.replace("ERROR", error).replace("CHECKPOINT", checkpoint)


def test_an_error_of_the_program_that_comes_back_at_a_later_step_is_the_end(tmp_path: Path) -> None:
    code, said, launched = run(later("ValueError('no such column')", "10"), tmp_path, num_processes=1, max_restarts=9)
    assert code == 1
    assert len(launched.record()["attempts"]) == 2
    assert "launch: ValueError in step 33 on rank 0, after the same error in step 20\n" in said
    rule = "an error of the program that comes back is restarted again only if a checkpoint was committed in between"
    assert f"rule: {rule}\n" in said
    assert "so:   the run ends here; the newest checkpoint is kept" in said
    # the traceback once, and one line the second time
    assert said.count("Traceback (most recent call last)") == 1
    assert "launch: it failed in step 33, with the error that is shown above: ValueError: no such column\n" in said


@pytest.mark.parametrize(
    ("error", "checkpoint"),
    [("ValueError('no such column')", "10 * job.restart_count"), ("ConnectionResetError('peer')", "10")],
)
def test_progress_and_errors_that_pass_use_up_the_restarts(error: str, checkpoint: str, tmp_path: Path) -> None:
    code, said, launched = run(later(error, checkpoint), tmp_path, num_processes=1, max_restarts=3)
    assert code == 1
    assert len(launched.record()["attempts"]) == 4
    assert "no restart left of 3" in said
    assert said.count("Traceback (most recent call last)") == 1


def test_another_error_after_a_restart_has_its_traceback(tmp_path: Path) -> None:
    script = later("[ValueError('first'), KeyError('second')][min(job.restart_count, 1)]", "10")
    code, said, launched = run(script, tmp_path, num_processes=1, max_restarts=1)
    assert code == 1
    assert len(launched.record()["attempts"]) == 2
    assert said.count("Traceback (most recent call last)") == 2
    assert said.count("ValueError: first\n") >= 1
    assert "launch: KeyError: 'second'\n" in said


TRAINED = """
import torch
from pathlib import Path
from unisono import CheckpointOptions, PlanOptions, Trainer, TrainOptions
data = [(torch.full((3,), float(number)), torch.ones(1)) for number in range(64)]
with Trainer(torch.nn.Linear(3, 1), data, PlanOptions(device="cpu", precision="fp32", global_batch=4),
             objective="mean_squared_error", options=TrainOptions(steps=300, eval_every_steps=0),
             checkpoint=CheckpointOptions(every_steps=EVERY), run_dir="trained") as run:
    starts = Path("starts")
    count = int(starts.read_text()) if starts.exists() else 0
    starts.write_text(str(count + 1))
    for step in run:
        if EVERY and step.index % 10 == 0:
            run.save(wait=True)  # a save in the background may not be committed when the error comes
        if step.index >= 20 + 13 * count:
            raise ValueError("no such column")
"""


@pytest.mark.full
@pytest.mark.parametrize(("every", "starts"), [(0, 2), (10, 4)])
def test_a_bug_of_a_trainers_loop_is_restarted_once_or_while_it_saves(every: int, starts: int, tmp_path: Path) -> None:
    code, said = run_plain(TRAINED.replace("EVERY", str(every)), tmp_path, [sys.executable, "plain.py"])
    assert code == 1
    assert int((tmp_path / "starts").read_text()) == starts
    assert said.count("Traceback (most recent call last)") == 1
    assert said.count("with the error that is shown above: ValueError: no such column\n") == starts - 1
    assert ("in step 33 on rank 0, after the same error in step 20\n" in said) == (every == 0)


def test_a_killed_worker_is_told_from_a_crash(tmp_path: Path) -> None:
    code, said, _ = run(
        "os.kill(os.getpid(), signal.SIGKILL) if job.rank == 1 else time.sleep(600)", tmp_path, max_restarts=0
    )
    assert code == 1
    assert "was killed by signal 9 (SIGKILL), which this launcher did not send; the kernel" in said
    assert "memory" in said
    assert "rank-1.attempt-0.log is empty" in said


def test_a_wordless_crash_shows_the_end_of_its_log(tmp_path: Path) -> None:
    script = """
if job.rank == 1:
    print("\\n".join(f"line {n}" for n in range(100)), "no such column", sep="\\n", flush=True)
    os._exit(1)
time.sleep(600)
"""
    code, said, launched = run(script, tmp_path, max_restarts=0)
    assert code == 1
    assert f"the end of its log {launched.run_dir}/logs/rank-1.attempt-0.log:" in said
    assert "no such column" in said
    assert "line 99" in said
    assert "line 50" not in said


@pytest.mark.parametrize("command", [[sys.executable, "plain.py"], ["sh", "-c", "exit 3"]])
def test_an_exit_code_without_an_error_is_restarted_once(command: list[str], tmp_path: Path) -> None:
    code, said = run_plain("import sys; sys.exit(3)", tmp_path, command, "-n", "1", "--max-restarts", "5")
    assert code == 1
    assert len(json.loads((tmp_path / "run/launch.json").read_text())["attempts"]) == 2
    assert "launch: exit code 3 of rank 0, " in said
    assert " s after its start, 2 times in a row\n" in said
    assert "  rule: the same exit code twice within 60 s and without a new checkpoint is not restarted again\n" in said
    assert f"  try:  the logs in {tmp_path / 'run/logs'}, then start the same command again" in said


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit(3 + job.restart_count)",
        "sys.exit(137)",  # a shell's code for a killed command
        "(run_dir / 'checkpoints' / str(job.restart_count)).mkdir(parents=True); sys.exit(3)",
    ],
    ids=["other_code", "killed", "progress"],
)
def test_exit_codes_that_may_be_another_failure_use_up_the_restarts(ending: str, tmp_path: Path) -> None:
    code, said, launched = run(ending, tmp_path, num_processes=1, max_restarts=2)
    assert code == 1
    assert len(launched.record()["attempts"]) == 3
    assert "no restart left of 2" in said


def test_a_second_launch_in_the_same_folder_counts_on(tmp_path: Path) -> None:
    run("print(job.restart_count)", tmp_path)
    _, _, launched = run("print(job.restart_count)", tmp_path)
    assert launched.record()["attempts"][0]["attempt"] == 1
    assert (launched.run_dir / "logs" / "rank-1.attempt-0.log").read_text() == "0\n"
    assert (launched.run_dir / "logs" / "rank-1.attempt-1.log").read_text() == "1\n"


def test_attempts_of_one_process_are_counted_too(tmp_path: Path) -> None:
    run("sys.exit(2)", tmp_path, num_processes=1)
    _, _, launched = run("seen('epoch')", tmp_path, num_processes=1)
    assert (launched.run_dir / "epoch.0.1").exists()
    assert launched.record()["attempt"] == 1


# no file of the launcher can grow from here on; its standard error is a pipe
FULL_DISK = """
import resource
resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""


@pytest.mark.parametrize(("ending", "expected"), [("", 0), ("sys.exit(75)", 75), ("sys.exit(2)", 2)])
def test_a_full_disk_at_the_end_leaves_the_exit_code(tmp_path: Path, ending: str, expected: int) -> None:
    code, said, launched = run(FULL_DISK + ending, tmp_path, num_processes=1)
    assert code == expected, said
    assert said.count("warning: ") == 1
    assert f"launch: warning: {launched.run_dir}/launch.json was not written: EFBIG" in said
    assert "Traceback" not in said
    assert launched.record()["attempts"] == []  # the record of the start is whole


@pytest.mark.parametrize("planted", ['{"attempt": 1e999}', '{"attempt": 4000000000}', "a pipe"])
def test_a_record_that_is_none_counts_for_nothing(tmp_path: Path, planted: str) -> None:
    (tmp_path / "run").mkdir()
    if planted == "a pipe":
        os.mkfifo(tmp_path / "run/launch.json")
    else:
        (tmp_path / "run/launch.json").write_text(planted)
    assert first_attempt_of(tmp_path / "run") == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_record_of_another_user_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/launch.json").write_text('{"attempt": 7}')
    assert first_attempt_of(tmp_path / "run") == 8
    (tmp_path / "run/launch.json").write_text('{"attempt": 7}')
    os.chown(tmp_path / "run/launch.json", 65534, 65534)
    assert first_attempt_of(tmp_path / "run") == 0


def first_attempt_of(run_dir: Path) -> int:
    with job_folder(run_dir):
        return first_attempt(run_dir, {})


@pytest.mark.full
def test_a_rank_that_hangs_with_the_interpreters_lock_held_leaves_its_stack(tmp_path: Path) -> None:
    """No Python code of it can run again, so neither SIGTERM nor a thread of ours ends it."""
    script = """
import ctypes
def hold_the_lock():
    c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)
with StopNotice():
    seen("ready")
    if job.rank == 1:
        hold_the_lock()
    while not (run_dir / "ready.1.0").exists():
        time.sleep(0.02)
    record_failure(Path(os.environ["UNISONO_LOGS"]), job, TimeoutError("rank 1 waits in no collective"), step=3)
    sys.exit(1)
"""
    code, said, launched = run(script, tmp_path, max_restarts=0)
    assert code == 1
    assert "TimeoutError: rank 1 waits in no collective" in said
    log = (launched.run_dir / "logs" / "rank-1.attempt-0.log").read_text()
    assert log.startswith("Fatal Python error: Aborted")
    assert " in hold_the_lock\n" in log
    assert launched.record()["attempts"][0]["exit_codes"] == [1, -signal.SIGABRT]


def test_a_kill_for_lack_of_memory_is_told_from_other_kills(tmp_path: Path) -> None:
    with small_memory(48) as members:
        script = f"""
if job.rank == 1:
    Path({str(members)!r}).write_text(str(os.getpid()))
    hoard = [bytearray(b"x") * 2**20 for _ in range(400)]
time.sleep(600)
"""
        code, said, _ = run(script, tmp_path, max_restarts=0)
    assert code == 1
    assert "was killed by signal 9 (SIGKILL), which this launcher did not send; the kernel ended" in said
    assert "most likely out of memory (smaller micro_batch, recompute, or fewer processes)" in said


# --- how it is stopped -----------------------------------------------------------------------------------------------

POLITE = """
with StopNotice() as notice:
    seen("ready")
    assert notice.wait(60)
seen("stopped", notice.signal_name)
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("sent", "received"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT"), (signal.SIGHUP, "SIGTERM"), (signal.SIGUSR1, "SIGTERM")],
)
def test_a_stop_is_passed_on_and_the_requeue_code_comes_back(
    tmp_path: Path, sent: signal.Signals, received: str
) -> None:
    launched = start(POLITE, tmp_path)
    launched.wait_for("ready.0.0", "ready.1.0")
    launched.process.send_signal(sent)
    code, said = launched.finish()
    assert code == 75
    assert f"{sent.name}: asking 2 ranks to save and end within 20 s" in said
    assert [(launched.run_dir / f"stopped.{rank}.0").read_text() for rank in (0, 1)] == [received] * 2
    assert launched.record()["attempts"][0]["stopped_by"] == sent.name


def test_a_launch_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    launched = start(POLITE, tmp_path, prefix=["nohup"])
    launched.wait_for("ready.0.0", "ready.1.0")
    launched.process.send_signal(signal.SIGHUP)
    launched.process.send_signal(signal.SIGTERM)
    code, said = launched.finish()
    assert code == 75
    assert "SIGTERM: asking 2 ranks" in said
    assert "SIGHUP" not in said


def test_a_rank_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    launched = start(
        "if job.rank == 1:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN); seen('ready'); time.sleep(600)\n"
        + POLITE,
        tmp_path,
        grace_s=0.5,
    )
    launched.wait_for("ready.0.0", "ready.1.0")
    launched.process.send_signal(signal.SIGTERM)
    code, said = launched.finish()
    assert code == 1
    assert "stopped by SIGTERM, and not every rank said that its state is committed" in said
    assert "rank 1 (pid " in said
    assert "was ended by this launcher (SIGKILL)" in said
    assert launched.record()["attempts"][0]["exit_codes"] == [75, -9]


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    launched = start(
        "signal.signal(signal.SIGINT, lambda *_: seen('first')); seen('ready')\nwhile True: time.sleep(1)",
        tmp_path,
        grace_s=600.0,
    )
    launched.wait_for("ready.0.0", "ready.1.0")
    launched.process.send_signal(signal.SIGINT)
    launched.wait_for("first.0.0", "first.1.0")
    launched.process.send_signal(signal.SIGINT)
    code, _ = launched.finish()
    assert code == 1
    assert launched.record()["attempts"][0]["exit_codes"] == [-9, -9]


GRANDCHILDREN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
seen("ready")
"""


def test_a_killed_launcher_takes_workers_and_their_children_along(tmp_path: Path) -> None:
    launched = start(GRANDCHILDREN + "time.sleep(600)", tmp_path)
    launched.wait_for("ready.0.0", "ready.1.0")
    family = [launched.process.pid, *launched.children()]
    # launcher, guard, two workers, two grandchildren
    wait_until(lambda: len(launched.children()) == 5, "five descendants")
    assert len(marked(launched.mark)) == 5
    launched.process.kill()
    launched.process.communicate()
    launched.assert_gone(family)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_workers_end_with_the_launcher_even_without_the_guard(tmp_path: Path) -> None:
    launched = start("seen('ready'); time.sleep(600)", tmp_path)
    launched.wait_for("ready.0.0", "ready.1.0")
    family = [launched.process.pid, *launched.children()]
    for guard in set(launched.children()) - set(marked(launched.mark)):
        os.kill(guard, signal.SIGKILL)
    launched.process.kill()
    launched.process.communicate()
    launched.assert_gone(family)


def test_a_worker_that_ends_takes_its_children_along(tmp_path: Path) -> None:
    # finish() fails if anything of the launch is left
    code, _, _ = run(GRANDCHILDREN, tmp_path)
    assert code == 0


def test_the_guard_is_not_stopped_by_the_terminal(tmp_path: Path) -> None:
    launched = start("seen('ready'); time.sleep(600)", tmp_path)
    launched.wait_for("ready.0.0", "ready.1.0")
    guards = [pid for pid in launched.children() if pid not in marked(launched.mark)]
    assert len(guards) == 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(guards[0], number)
    family = [launched.process.pid, *launched.children()]
    launched.process.kill()
    launched.process.communicate()
    launched.assert_gone(family)
    assert not is_running(guards[0])


# --- what it opens, and what it shows --------------------------------------------------------------------------------


def test_the_port_is_held_from_the_start_and_free_afterwards(tmp_path: Path) -> None:
    launched = start("seen('ready', job.master_port); time.sleep(1)", tmp_path)
    launched.wait_for("ready.0.0", "ready.1.0")
    port = int((launched.run_dir / "ready.0.0").read_text())
    holders = {pid: listening(pid) for pid in [launched.process.pid, *launched.children()]}
    assert [where for where in holders.values() if where] == [[f"0100007F:{port:04X}"]]
    assert listening(launched.process.pid) == [], "the launcher itself keeps no port"
    launched.finish()
    assert f":{port:04X} 00000000:0000 0A" not in Path("/proc/net/tcp").read_text()


def test_secrets_stay_out_of_argument_vectors_and_files(tmp_path: Path) -> None:
    canary = "canary-5f1c9e"
    launched = start("seen('ready'); time.sleep(1)", tmp_path, environ={"WANDB_API_KEY": canary})
    launched.wait_for("ready.0.0", "ready.1.0")
    lines = command_lines()
    assert "reaper.py" in lines
    assert "worker.py" in lines
    assert canary not in lines
    launched.finish()
    for path in launched.run_dir.rglob("*"):
        assert path.is_dir() or canary not in path.read_text()


def test_links_that_wait_in_the_folder_lead_nowhere(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    for link in (logs / "rank-1.attempt-3.log", logs.parent / "launch.json", logs.parent / ".launch.json.partial"):
        link.symlink_to(precious)
    code, _, launched = run("print('here')", tmp_path)
    assert code == 0
    # a name that was taken counts as an earlier attempt
    assert launched.record()["attempts"][0]["attempt"] == 4
    assert (logs / "rank-1.attempt-4.log").read_text() == "here\n"
    assert precious.read_text() == "mine"
    for taken in (logs / "rank-1.attempt-3.log", logs / "rank-1.attempt-4.log"):
        with pytest.raises(LaunchError, match=r"cannot be written \(File exists\)"):
            open_log(taken)
    dangling = logs / "dangling.log"
    dangling.symlink_to(tmp_path / "not yet there")
    with pytest.raises(LaunchError, match=r"cannot be written"):
        open_log(dangling)
    assert not (tmp_path / "not yet there").exists()


def test_a_folder_of_logs_that_is_a_link_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/logs").symlink_to(tmp_path / "other")
    with pytest.raises(LaunchError, match=r"cannot be written \(logs is a link\)"):
        launch_local(["true"], LaunchOptions(), run_dir=tmp_path / "run", run_id="r")
    assert not list((tmp_path / "other").iterdir())


# --- what cannot be started ------------------------------------------------------------------------------------------


def test_unwritable_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError) as caught:
        launch_local(["true"], LaunchOptions(num_processes=1), run_dir=tmp_path / "file" / "run", run_id="r")
    text = str(caught.value)
    assert f"{tmp_path}/file/run cannot be written (Not a directory)" in text
    assert "so:   no process was started" in text
    assert "try:  another run.dir" in text


def test_unknown_command(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        launch_local(["no-such-program-here"], LaunchOptions(num_processes=2), run_dir=tmp_path, run_id="r")
    assert "'no-such-program-here' cannot be started (No such file or directory)" in str(caught.value)
    assert f"try:  {sys.executable} -m your_module" in str(caught.value)


def test_a_launch_inside_a_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        launch_local(["true"], LaunchOptions(), run_dir=tmp_path, run_id="r")
    assert "this process is rank 1 of 4 of a job that torchrun started" in str(caught.value)
    assert f"4 jobs would write into {tmp_path}, so nothing was started" in str(caught.value)


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    assert (
        launch_local([sys.executable, "-S", "-c", ""], LaunchOptions(num_processes=1), run_dir=tmp_path, run_id="r")
        == 0
    )
    assert {number: signal.getsignal(number) for number in before} == before


def test_the_guard_script_imports_nothing_of_ours() -> None:
    from unisono.launch import reaper

    done = subprocess.run(
        [sys.executable, "-I", "-S", reaper.__file__], input="+999999999\n-999999999\n", text=True, env={}, check=False
    )
    assert done.returncode == 0


def test_every_rank_has_the_secret_of_its_launch_and_of_no_other(tmp_path: Path) -> None:
    script = """
from unisono.dist.secret import job_secret
import hashlib
secret = job_secret(job, os.environ)
assert secret == job_secret(job, os.environ)
assert not os.get_inheritable(int(os.environ["UNISONO_SECRET_FD"]))
assert secret not in Path("/proc/self/environ").read_bytes()
seen("secret", hashlib.sha256(secret).hexdigest())
"""
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        code, said, launched = run(script, tmp_path / name)
        assert code == 0, said
        digests = {(launched.run_dir / f"secret.{rank}.0").read_text() for rank in range(2)}
        assert len(digests) == 1
        found += digests
    assert found[0] != found[1]
