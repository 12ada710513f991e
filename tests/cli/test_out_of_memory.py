"""Runs that really run out of memory: what ``unisono train`` says then. The change it names trains under the same limit."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Desk, Outcome
from little_memory import small_memory

from unisono.dist import JobSpec, record_failure
from unisono.dist.interpreter import module_command

GIB = 2**30
# a rank with a micro-batch of 1024 needs 1.7 GiB for activations and takes a second a step
WIDE = {
    "data.seq_len": 128,
    "model.num_layers": 2,
    "model.dim": 64,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "plan.precision": "fp32",
    "plan.device": "cpu",
    "plan.micro_batch": 1024,
    "train.steps": 1,
    "train.num_eval_samples": 4,
    "train.eval_every_steps": 0,
    "launch.max_restarts": 0,
}
ADDRESS_SPACE = """
import resource, torch
import unisono.train.trainer
torch.ones(300, 300) @ torch.ones(300, 300)
print(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1])
"""


def write_corpus(path: Path, num_bytes: int) -> Path:
    path.write_bytes(bytes(random.Random(0).choices(b"abcdefgh \n", k=num_bytes)))
    return path


def unisono(desk: Desk, *arguments: str, begin: Callable[[], object] = lambda: None) -> Outcome:
    """``unisono ARGUMENTS`` in a process that calls ``begin`` first."""
    done = subprocess.run(
        [sys.executable, "-m", "unisono", *arguments],
        cwd=desk.folder,
        env=desk.child_environ(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=begin,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def settings(desk: Desk, folder: Path, ranks: int = 1, **changes: object) -> list[str]:
    values = WIDE | {
        "data.corpus": write_corpus(folder / "corpus", 400_000 * ranks),
        "data.cache_dir": desk.cache / "data",
        "plan.global_batch": 1024 * ranks,
        "launch.num_processes": ranks,
        **changes,
    }
    return [f"--set={name}={value}" for name, value in values.items()]


def change_of(desk: Desk, outcome: Outcome, run_dir: Path, begin: Callable[[], object] = lambda: None) -> list[str]:
    """The change that the launcher names; where its minute was over before it had one, that of the command it names."""
    said = outcome.err
    if not (lines := re.findall(r"^launch: fits with (--set .+)$", said, flags=re.MULTILINE)):
        assert "in time" in said or "cut short" in said, said
        said = unisono(desk, "plan", "fit", "--failed", str(run_dir), begin=begin).out
        lines = re.findall(r"^fits with (--set .+)$", said, flags=re.MULTILINE)
    (line,) = lines
    return shlex.split(line)


@pytest.mark.full
@pytest.mark.timeout(600)  # two trainings and a trace, on few cores
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_named_change_trains_under_the_limit_that_the_run_failed_under(
    desk: Desk, tmp_path: Path, ranks: int
) -> None:
    loaded = int(subprocess.run([sys.executable, "-c", ADDRESS_SPACE], capture_output=True, check=True).stdout) * 1024
    limit = loaded + round(1.5 * GIB)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    given = settings(desk, tmp_path, ranks)
    run_dir = tmp_path / "run"
    failed = unisono(desk, "train", f"--set=run.dir={run_dir}", *given, begin=limited)
    assert failed.code == 1
    assert "can't allocate memory" in failed.err.partition("traced, rank")[0]
    assert "MemoryError" not in failed.err
    change = change_of(desk, failed, run_dir, limited)
    found = json.loads((run_dir / "logs" / "out-of-memory.json").read_text())
    first = min(
        (json.loads(path.read_text()) for path in (run_dir / "logs").glob("failure-rank-*.json")),
        key=lambda record: record["at_monotonic_s"],
    )
    assert (found["rank"], found["measured"]) == (first["rank"], first["memory"])
    assert found["measured"]["address_space_limit_bytes"] == limit
    assert found["measured"]["address_space_peak_bytes"] > 0.8 * limit
    assert sum(found["peak_bytes_by_kind"].values()) == found["peak_bytes"] > 1.6 * GIB
    assert found["budget_bytes"] < found["peak_bytes"]
    for text in (f"traced, rank {found['rank']} holds", found["peak_operator"], "GiB (ulimit -v)"):
        assert text in failed.err

    (finding,) = [
        each for each in desk.here("diagnose", "--json", str(run_dir)).json["findings"] if each["id"] == "EXIT01"
    ]
    assert finding["patch"] == found["settings"]
    assert change == [part for name, value in finding["patch"].items() for part in ("--set", f"{name}={value}")]
    assert any(line.startswith(f"traced, rank {found['rank']} holds") for line in finding["evidence"])
    assert "the smallest change that fits" in (run_dir / "report.html").read_text()

    trained = unisono(desk, "train", f"--set=run.dir={tmp_path / 'again'}", *given, *change, begin=limited)
    assert trained.code == 0, trained.err


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_rank_that_the_kernel_ended_for_lack_of_memory_is_traced_too(desk: Desk, tmp_path: Path) -> None:
    given = settings(desk, tmp_path)
    with small_memory(1200) as members:

        def limited() -> None:
            members.write_text(str(os.getpid()))

        failed = unisono(desk, "train", f"--set=run.dir={tmp_path / 'run'}", *given, begin=limited)
        change = change_of(desk, failed, tmp_path / "run", limited)
        trained = unisono(desk, "train", f"--set=run.dir={tmp_path / 'again'}", *given, *change, begin=limited)
    assert failed.code == 1
    assert "SIGKILL" in failed.err.partition("traced, rank 0 holds")[0]
    assert "the host, or its control group, has 1.172 GiB" in failed.err
    assert trained.code == 0, trained.err


@pytest.mark.full
def test_without_a_report_nothing_is_traced(desk: Desk, tmp_path: Path) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2 * GIB, 2 * GIB))

    given = settings(desk, tmp_path, **{"observe.report": "false"})
    failed = unisono(desk, "train", f"--set=run.dir={tmp_path / 'run'}", *given, begin=limited)
    assert failed.code == 1
    assert "cause: out of memory" in failed.err
    assert "traced" not in failed.err


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_run_that_ends_as_its_model_is_built_is_traced_with_what_it_was_started_with(
    desk: Desk, tmp_path: Path
) -> None:
    """Such a run has no configuration and no plan in its folder. Traced with the defaults, it would be another model."""
    loaded = int(subprocess.run([sys.executable, "-c", ADDRESS_SPACE], capture_output=True, check=True).stdout) * 1024
    limit = loaded + round(1.5 * GIB)
    run_dir = tmp_path / "run"
    large = {"model.dim": 1024, "model.num_layers": 16, "model.num_heads": 8, "model.num_kv_heads": 8}
    large |= {"plan.micro_batch": 4, "plan.global_batch": 4}
    given = [f"--set=run.dir={run_dir}", *settings(desk, tmp_path, **large)]
    failed = unisono(desk, "train", *given, begin=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert failed.code == 1
    assert not (run_dir / "config.toml").exists()
    assert "its memory was not traced" not in failed.err
    found = json.loads((run_dir / "logs" / "out-of-memory.json").read_text())
    assert found["peak_bytes"] > 2 * GIB  # parameters, gradients and moments alone; the default model holds 0.1 GiB
    for other in ((), given[:3], ["--set=plan.micro_batch=1"]):
        refused = desk.here("plan", "fit", "--failed", str(run_dir), *other)
        assert refused.code == 2
        assert f"plan fit --failed {run_dir} {shlex.join(given)}" in refused.err


@pytest.mark.parametrize(
    ("started", "given", "nearest"),
    [
        (None, ["--set=model.dim=32"], "CONFIG, with the CONFIG and each --set of the run"),
        (["my.toml", "--set=model.dim=32"], ["--set=model.dim=32"], "my.toml --set=model.dim=32"),
        (["--set=model.dim=32"], ["--set=plan.tp=1"], "--set=model.dim=32"),
    ],
)
def test_a_run_without_configuration_is_not_traced_as_the_default_model(
    desk: Desk, mine: Path, started: list[str] | None, given: list[str], nearest: str
) -> None:
    (mine / "config.toml").unlink()
    (mine / "launch.json").unlink(missing_ok=True)
    if started is not None:
        command = module_command("unisono", "train", "--json", *started)
        (mine / "launch.json").write_text(json.dumps({"command": command}))
    refused = desk.here("plan", "fit", "--failed", str(mine), *given)
    assert refused.code == 2
    assert refused.out == ""
    assert f"try:  unisono plan fit --failed {mine} {nearest}\n" in refused.err
    if started is not None:  # what is to be given is enough for another reason to be the first
        (desk.folder / "my.toml").write_text("# all defaults\n")
        assert "ran out of memory" in desk.here("plan", "fit", "--failed", str(mine), *started).err


def test_a_run_that_did_not_run_out_of_memory_is_refused(desk: Desk, trained: Path) -> None:
    refused = desk.here("plan", "fit", "--failed", str(trained))
    assert refused.code == 2
    assert "its last attempt ended because a rank ran out of memory" in refused.err


def test_what_a_device_measured_gives_the_memory_there_is(desk: Desk, mine: Path) -> None:
    (mine / "launch.json").unlink(missing_ok=True)
    sizes = {"allocated_bytes": 900, "allocated_peak_bytes": 5000, "reserved_peak_bytes": 9000, "free_bytes": 2000}
    sizes |= {"limit_bytes": 16000, "requested_bytes": 4096}
    error = RuntimeError("CUDA out of memory. Tried to allocate 4.00 KiB.")
    record_failure(mine / "logs", JobSpec(), error, step=3, memory=sizes)
    outcome = desk.here("plan", "fit", "--json", "--failed", str(mine))
    assert outcome.code == 1
    assert outcome.json["budget_bytes"] == 7000
    assert outcome.json["processes"] == 1
    kept = json.loads((mine / "logs" / "out-of-memory.json").read_text())
    assert kept["measured"] == sizes
    assert kept["peak_bytes"] == outcome.json["rungs"][0]["peak_bytes"]
    said = desk.here("plan", "fit", "--failed", str(mine)).out
    assert (
        "measured, it had 8.382e-07 GiB in tensors, at most 4.657e-06, and its allocator held at most 8.382e-06" in said
    )
    # what it measured says that the configured plan would fit, and it did not
    (mine / "logs" / "failure-rank-0.json").unlink()
    record_failure(mine / "logs", JobSpec(), error, step=3, memory=sizes | {"free_bytes": GIB})
    found = desk.here("plan", "fit", "--json", "--failed", str(mine)).json
    assert found["fits"]
    assert found["settings"]
    assert found["budget_bytes"] == found["rungs"][0]["peak_bytes"] - 1


@pytest.mark.gpu
def test_a_device_that_runs_out_of_memory(desk: Desk, tmp_path: Path) -> None:
    import torch

    limit = torch.cuda.get_device_properties(0).total_memory
    batch = 1 << (2 * limit // (1_800_000)).bit_length()  # bytes of activations of a sample, as on the CPU
    given = settings(desk, tmp_path, **{"plan.device": "cuda", "plan.global_batch": batch, "plan.micro_batch": batch})
    write_corpus(tmp_path / "corpus", 200 * batch)
    failed = unisono(desk, "train", f"--set=run.dir={tmp_path / 'run'}", *given)
    assert failed.code == 1
    assert "OutOfMemoryError" in failed.err.partition("traced, rank 0 holds")[0]
    found = json.loads((tmp_path / "run" / "logs" / "out-of-memory.json").read_text())
    assert 0 < found["measured"]["allocated_peak_bytes"] <= found["measured"]["reserved_peak_bytes"] <= limit
    assert found["measured"]["requested_bytes"] > found["measured"]["free_bytes"]
    change = change_of(desk, failed, tmp_path / "run")
    trained = unisono(desk, "train", f"--set=run.dir={tmp_path / 'again'}", *given, *change)
    assert trained.code == 0, trained.err
