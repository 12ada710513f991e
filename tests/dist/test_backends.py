"""Collective back ends of other packages: a run with one has the bits of a run with Gloo, and what one lacks is said."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fake_backend
import pytest
import torch.distributed as dist
from commands import Desk, losses_of, make_desk, problem
from fake_device import Entry, FakeDevice, installed

from unisono.dist import JobSpec, join_world
from unisono.dist.backends import collective_backend
from unisono.errors import LaunchError

PLANS = {
    "dist_sync": (),
    "zero3": ("plan.dp_shard=2",),
    "tp": ("plan.tp=2", "plan.sequence_parallel=true"),
    "pp": ("plan.pp=2", "plan.micro_batch=2", "model.num_layers=2"),
    "ep": ("model.num_experts=4", "plan.dp_shard=2", "plan.ep=2"),
    "compressed": ("plan.compression=int8",),
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("desk")
    return make_desk(folder, folder / "cache")


def train(desk: Desk, run_dir: Path, site: Path, *settings: str, counts: Path | None = None) -> tuple[int, str]:
    given = [f"--set={each}" for each in ("model.num_kv_heads=2", "launch.num_processes=2", "launch.max_restarts=0")]
    given += [f"--set={each}" for each in settings]
    done = desk.process(
        "train",
        f"--set=run.dir={run_dir}",
        *desk.settings,
        *given,
        PYTHONPATH=str(site),
        UNISONO_TEST_COUNTS=str(counts or ""),
    )
    return done.code, done.err


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
def test_two_ranks_with_a_back_end_of_another_package_have_the_losses_of_gloo(
    desk: Desk, tmp_path: Path, plan: str
) -> None:
    site = fake_backend.install(tmp_path / "site")
    code, said = train(desk, tmp_path / "gloo", site, *PLANS[plan])
    assert code == 0, said
    code, said = train(
        desk, tmp_path / "other", site, *PLANS[plan], "launch.collective_backend=counting", counts=tmp_path
    )
    assert code == 0, said
    assert losses_of(tmp_path / "other") == losses_of(tmp_path / "gloo")
    assert len(losses_of(tmp_path / "other")) == 4
    for rank in (0, 1):  # and it was this back end that carried them
        counts = json.loads((tmp_path / f"counts-{rank}.json").read_text())
        assert sum(counts.values()) > 10, counts
        if plan == "pp":
            assert counts["send"] >= 4, counts


# --- what a back end lacks ---------------------------------------------------------------------------------------------

NOTHING_STARTED = "the ranks could not exchange anything, so nothing was started"


@pytest.mark.full
@pytest.mark.parametrize(
    ("lacks", "settings", "message"),
    [
        (
            ("creation",),
            (),
            "collective back end 'counting' for tensors on cpu made no process group: OSError: the fabric has no link\n"
            "  rule: a back end connects the ranks of a job when it creates its process group\n"
            f"  so:   {NOTHING_STARTED}\n"
            "  try:  see the documentation of the package that registers 'counting', or launch.collective_backend=auto\n",
        ),
        (
            ("reduce_scatter_single",),
            ("plan.dp_shard=2",),
            "by the collective back end 'counting': No backend type associated with device type cpu\n"
            "  rule: a back end does each operation of the job, on the device it was chosen for\n"
            "  so:   the ranks cannot exchange these data, and this process cannot continue\n"
            "  try:  launch.collective_backend=auto, the back end of the device; or a plan that needs other operations\n",
        ),
        (
            ("all_to_all_single",),  # with which connections are proven before anything else
            (),
            "the proof of the connections #1 in group 'default' by the collective back end 'counting': ",
        ),
    ],
)
def test_a_run_whose_back_end_lacks_something_ends_with_the_reason(
    lacks: tuple[str, ...], settings: tuple[str, ...], message: str, desk: Desk, tmp_path: Path
) -> None:
    site = fake_backend.install(tmp_path / "site", lacks=lacks)
    code, said = train(desk, tmp_path / "run", site, *settings, "launch.collective_backend=counting")
    assert code != 0
    assert message in said
    assert not list((tmp_path / "run/checkpoints").glob("step-*"))


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    """Back ends that a test registers are forgotten."""
    kinds = ("backend_list", "backend_capability", "default_device_backend_map", "backend_type_map", "_plugins")
    before = {kind: getattr(dist.Backend, kind).copy() for kind in kinds}
    yield
    for kind, value in before.items():
        setattr(dist.Backend, kind, value)


REGISTERS = "an entry point of the group 'unisono.dist_backends' is a function that registers the back end of its name"
REINSTALL = "update or reinstall counting-backend, or launch.collective_backend=auto"


@pytest.mark.parametrize(
    ("lacks", "target", "problem_text", "rule", "nearest"),
    [
        (
            ("driver",),
            "register",
            "collective back end 'counting', entry point 'counting_backend:register' of counting-backend: ImportError: "
            "libfabric.so.1: cannot open shared object file",
            REGISTERS,
            REINSTALL,
        ),
        (
            ("registration",),
            "register",
            "collective back end 'counting', entry point 'counting_backend:register' of counting-backend: after the call "
            "torch.distributed knows no back end 'counting'",
            REGISTERS,
            REINSTALL,
        ),
        (
            (),
            "gone",
            "collective back end 'counting', entry point 'counting_backend:gone' of counting-backend: AttributeError: module "
            "'counting_backend' has no attribute 'gone'",
            REGISTERS,
            REINSTALL,
        ),
    ],
)
def test_an_entry_point_that_registers_nothing(
    lacks: tuple[str, ...],
    target: str,
    problem_text: str,
    rule: str,
    nearest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    torch_as_before: None,
) -> None:
    monkeypatch.syspath_prepend(str(fake_backend.install(tmp_path, lacks=lacks, target=target)))
    monkeypatch.delitem(sys.modules, "counting_backend", raising=False)
    with pytest.raises(LaunchError) as caught:
        collective_backend("cpu", "counting")
    assert f"unisono: {caught.value}\n" == problem(problem_text, rule, NOTHING_STARTED, nearest)


def test_a_back_end_for_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_as_before: None) -> None:
    monkeypatch.syspath_prepend(str(fake_backend.install(tmp_path, lacks=("cpu",))))
    monkeypatch.delitem(sys.modules, "counting_backend", raising=False)
    assert collective_backend("cuda", "counting") == "counting"
    with pytest.raises(LaunchError) as caught:
        collective_backend("cpu", "counting")
    assert str(caught.value) == (
        "collective back end 'counting' for tensors on cpu\n"
        "  rule: it exchanges tensors on cuda\n"
        "  so:   the ranks could not exchange gradients, so nothing was started\n"
        "  try:  launch.collective_backend=auto, or a device it is for"
    )


@pytest.mark.parametrize("name", ["fake", "undefined", "gloom", "nccl"])
def test_names_that_carry_nothing_on_the_cpu(name: str) -> None:
    # ``nccl`` is known, and not for the cpu; ``fake`` is torch's own, and sends nothing
    with pytest.raises(LaunchError) as caught:
        join_world(JobSpec(world_size=2, local_world=2), device_type="cpu", timeout_s=1, backend=name)
    told = str(caught.value)
    assert told.startswith(f"collective back end {name!r}"), told
    assert ("did you mean 'gloo'?" in told) == (name == "gloom")
    assert ("(gloo, nccl, " in told) == (name != "nccl")


def test_the_adapter_of_a_device_names_its_back_end_and_an_entry_point_may_bring_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_as_before: None
) -> None:
    """As HCCL of torch_npu, which registers it for the devices ``npu``."""
    adapter = replace(FakeDevice().adapter("npu"), collective_backend=lambda: "counting")
    site = fake_backend.install(tmp_path, lacks=("cpu",))
    module = site / "counting_backend.py"
    module.write_text(module.read_text().replace('"cuda"', '"npu"'))
    with installed(Entry("npu", lambda: adapter)):
        with pytest.raises(LaunchError, match="collective back end 'counting'\n"):
            collective_backend("npu")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, "counting_backend", raising=False)
        assert collective_backend("npu") == "counting"
        assert dist.Backend.default_device_backend_map["npu"] == "counting"


def test_a_device_without_a_back_end() -> None:
    def none_known() -> str:
        raise ValueError("Default backend not registered for device : abacus")

    adapter = replace(FakeDevice().adapter("abacus"), collective_backend=none_known)
    with installed(Entry("abacus", lambda: adapter)), pytest.raises(LaunchError) as caught:
        collective_backend("abacus")
    assert "for tensors on abacus: Default backend not registered" in str(caught.value)


@pytest.mark.parametrize("settings", [(), ("plan.sync=dist_async", "launch.num_processes=2")])
def test_a_back_end_that_would_carry_nothing_is_refused(settings: tuple[str, ...], desk: Desk, tmp_path: Path) -> None:
    given = [f"--set={each}" for each in ("launch.collective_backend=gloo", *settings)]
    run = ["train", f"--set=run.dir={tmp_path}/run", *desk.settings, *given]
    done = desk.process(*run) if settings else desk.here(*run, "--debug")
    assert done.code == 2
    kind = "dist_async" if settings else "local"
    ranks = "2 ranks" if settings else "1 rank"
    said = done.out + done.err  # of two processes beside servers, lines come through the launcher
    assert f"launch.collective_backend 'gloo' with {ranks}, plan.sync {kind!r}\n" in said
    assert "it would change nothing" in said
