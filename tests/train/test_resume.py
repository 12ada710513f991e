"""Run N steps = run k, stop, resume N − k: bit for bit, at every precision, recompute, dropout and number of processes."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import tiny
import torch
from pool import Pool

from unisono.errors import CheckpointError
from unisono.train.run_checkpoints import _refuse_other_order
from unisono.train.state import generator_states, restore_generators

STEPS, AT = 7, 3


def both_ways(tmp_path: Path, **changes: object) -> None:
    whole = tiny.complete(tmp_path / "whole", steps=STEPS, **changes)
    first = tiny.complete(tmp_path / "parts", steps=STEPS, stop_after=AT, **changes)
    second = tiny.complete(tmp_path / "parts", steps=STEPS, **changes)
    assert first["step"] == AT
    assert first["losses"] + second["losses"] == whole["losses"]
    assert first["samples"] + second["samples"] == whole["samples"]
    assert second["digest"] == whole["digest"]


@pytest.mark.parametrize("precision", ["fp32", "fp16", pytest.param("bf16", marks=pytest.mark.full)])
def test_each_precision_resumes_bitwise(tmp_path: Path, precision: str) -> None:
    both_ways(tmp_path, precision=precision, dropout=0.2, micro_batch=3)


@pytest.mark.parametrize("recompute", ["selective", pytest.param("full", marks=pytest.mark.full)])
def test_recompute_resumes_bitwise(tmp_path: Path, recompute: str) -> None:
    both_ways(tmp_path, recompute=recompute, dropout=0.2)


@pytest.mark.parametrize(
    "kind", ["lamb", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("sgd", "adam", "lars"))]
)
def test_each_optimizer_resumes_bitwise(tmp_path: Path, kind: str) -> None:
    both_ways(tmp_path, kind=kind)


def test_everything_that_is_state_resumes_bitwise(tmp_path: Path) -> None:
    both_ways(tmp_path, ema_decay=0.9, spike_sigmas=4.0, dropout=0.1, num_workers=0)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("compile_", "recompute", "precision"),
    [  # every two of the three together
        ("model", "none", "fp32"),
        ("regional", "none", "bf16"),
        ("regional", "full", "fp32"),
        ("model", "full", "bf16"),
        ("model", "selective", "bf16"),
        ("regional", "selective", "fp32"),
    ],
)
def test_compile_matrix_resumes_bitwise(tmp_path: Path, compile_: str, recompute: str, precision: str) -> None:
    both_ways(tmp_path, compile=compile_, recompute=recompute, precision=precision, dropout=0.1)


def on_ranks(world, run_dir: str, stop_after: int | None, changes: dict) -> dict:
    return tiny.complete(run_dir, steps=STEPS, world=world, stop_after=stop_after, **changes)


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "changes",
    [{"precision": "fp32", "dropout": 0.2, "micro_batch": 1}, {"precision": "bf16", "recompute": "full"}],
    ids=["fp32-accumulate-dropout", "bf16-recompute"],
)
def test_several_processes_resume_bitwise(tmp_path: Path, pool: Pool, ranks: int, changes: dict) -> None:
    # torch's DistributedDataParallel fails this from three ranks on: it rebuilds its buckets after the first iteration
    whole = pool.run(on_ranks, str(tmp_path / "whole"), None, changes, ranks=ranks)
    first = pool.run(on_ranks, str(tmp_path / "parts"), AT, changes, ranks=ranks)
    second = pool.run(on_ranks, str(tmp_path / "parts"), None, changes, ranks=ranks)
    assert len({rank["digest"] for rank in whole}) == 1
    for before, after, undisturbed in zip(first, second, whole, strict=True):
        assert after["digest"] == undisturbed["digest"]
        assert before["losses"] + after["losses"] == undisturbed["losses"]
        assert before["samples"] + after["samples"] == undisturbed["samples"]


def test_elastic_resume_keeps_the_sample_list_and_the_curve(tmp_path: Path, pool: Pool) -> None:
    """Each leg on another number of processes; samples of every step equal one process's, losses within rounding."""
    whole = tiny.complete(tmp_path / "whole", steps=STEPS)
    losses, samples = [], []
    for ranks, until in ((3, 2), (1, 4), (4, 6), (2, None)):
        legs = pool.run(on_ranks, str(tmp_path / "parts"), until, {}, ranks=ranks)
        losses += legs[0]["losses"]
        samples += [list(chain.from_iterable(parts)) for parts in zip(*(leg["samples"] for leg in legs), strict=True)]
    assert samples == whole["samples"]
    # sums in another order; ten steps of a tiny model amplify fp32's 1e-7 to about 1e-6
    assert losses == pytest.approx(whole["losses"], rel=1e-5)


def test_a_finished_run_stays_finished(tmp_path: Path) -> None:
    first = tiny.complete(tmp_path / "run", steps=3)
    again = tiny.complete(tmp_path / "run", steps=3)
    assert again["losses"] == []
    assert again["digest"] == first["digest"]


def test_strict_names_what_differs(tmp_path: Path) -> None:
    tiny.complete(tmp_path / "run", steps=4, stop_after=2)
    with pytest.raises(CheckpointError) as raised:
        tiny.complete(tmp_path / "run", steps=4, resume="strict", micro_batch=2)
    assert str(raised.value) == (
        f"resume 'strict' from {tmp_path}/run/checkpoints/step-00000002 with "
        "plan.batch.micro_batch 8 then, 2 now; plan.batch.accumulation 1 then, 4 now\n"
        "  rule: strict resumes only where every bit can be the same\n"
        "  so:   nothing was loaded and nothing was changed\n"
        "  try:  restore what differs, or run.resume='auto' to resume without bit-exactness"
    )
    assert tiny.complete(tmp_path / "run", steps=4, resume="strict")["step"] == 4


def strict_on(world, run_dir: str) -> str:
    try:
        tiny.complete(run_dir, steps=4, world=world, resume="strict")
    except CheckpointError as error:
        return str(error)
    return ""


def test_strict_refuses_another_world_size(tmp_path: Path, pool: Pool) -> None:
    tiny.complete(tmp_path / "run", steps=4, stop_after=2)
    for text in pool.run(strict_on, str(tmp_path / "run"), ranks=2):
        assert "world 1 then, 2 now" in text


def test_auto_says_what_differs(tmp_path: Path) -> None:
    tiny.complete(tmp_path / "run", steps=4, stop_after=2)
    tiny.complete(tmp_path / "run", steps=4, micro_batch=2)
    (resumed,) = [e for e in tiny.events(tmp_path / "run") if e["kind"] == "resumed"]
    assert resumed["step"] == 2
    assert resumed["differences"] == ["plan.batch.micro_batch 8 then, 2 now", "plan.batch.accumulation 1 then, 4 now"]


def test_never_does_not_touch_a_run_that_is_there(tmp_path: Path) -> None:
    tiny.complete(tmp_path / "run", steps=2)
    with pytest.raises(CheckpointError) as raised:
        tiny.complete(tmp_path / "run", steps=2, resume="never")
    assert str(raised.value) == (
        f"resume 'never' in {tmp_path}/run, which holds 1 checkpoints up to step 2\n"
        "  rule: a committed checkpoint is never overwritten\n"
        "  so:   nothing was started\n"
        "  try:  another run.dir for a new run, or run.resume='auto' to continue this one"
    )


def test_a_checkpoint_of_elsewhere_is_refused_where_later_steps_are_saved(tmp_path: Path) -> None:
    tiny.complete(tmp_path / "other", steps=2)
    tiny.complete(tmp_path / "run", steps=4, every_steps=1)
    path = tmp_path / "other/checkpoints/step-00000002"
    with pytest.raises(CheckpointError) as refused:
        tiny.complete(tmp_path / "run", steps=6, resume=str(path))
    assert str(refused.value) == (
        f"{path}, of step 2, for a run in {tmp_path}/run, which has checkpoints up to step 4\n"
        "  rule: a committed checkpoint is never overwritten\n"
        "  so:   the steps after it could not be saved; nothing was loaded\n"
        "  try:  another run.dir for this run, or run.resume='auto' to continue the one that is there"
    )
    assert tiny.complete(tmp_path / "new", steps=4, resume=str(path))["step"] == 4


def test_a_path_goes_back_and_sets_later_ones_aside(tmp_path: Path) -> None:
    whole = tiny.complete(tmp_path / "run", steps=6, every_steps=2)
    back = str(tmp_path / "run/checkpoints/step-00000002")
    again = tiny.complete(tmp_path / "run", steps=6, every_steps=2, resume=back)
    assert again["losses"] == whole["losses"][2:]
    assert again["digest"] == whole["digest"]
    assert len(list((tmp_path / "run/checkpoints/quarantine").iterdir())) == 2


def test_another_model_is_refused_with_the_first_differences(tmp_path: Path) -> None:
    tiny.complete(tmp_path / "run", steps=2)
    with pytest.raises(CheckpointError) as raised:
        tiny.complete(tmp_path / "run", steps=4, network=tiny.model(dim=32))
    assert "model/blocks.0.attention.k.weight is [8, 16] torch.float32 there, [16, 32] torch.float32 here" in str(
        raised.value
    )
    assert "; and " in str(raised.value)
    with pytest.raises(CheckpointError, match=r"optim/exp_avg/blocks.0.attention.k.weight is only in the checkpoint"):
        tiny.complete(tmp_path / "run", steps=4, kind="sgd")


def test_another_order_of_samples_is_refused(tmp_path: Path) -> None:
    tiny.complete(tmp_path / "run", steps=2)
    with pytest.raises(CheckpointError) as raised:
        tiny.complete(tmp_path / "run", steps=4, global_batch=4)
    assert str(raised.value) == (
        f"the checkpoint {tmp_path}/run/checkpoints/step-00000002 for a run whose global_batch was 8 and is 4\n"
        "  rule: the samples of every step are a function of data, seed and global batch\n"
        "  so:   the run would repeat some samples and never see others; nothing was loaded\n"
        "  try:  restore these values, or start a new run in another run.dir"
    )


def test_other_data_is_told_without_fingerprints(tmp_path: Path) -> None:
    """The fingerprint of a chain of transforms is long and names classes of ours."""
    with pytest.raises(CheckpointError) as raised:
        _refuse_other_order({"data": "a" * 90, "samples": 40}, {"data": "b" * 90, "samples": 41}, tmp_path)
    assert str(raised.value).splitlines()[0] == (
        f"the checkpoint {tmp_path} for a run whose data has other sources, samples or transforms; samples was 40 and is 41"
    )


def test_a_step_saved_is_never_inside_an_accumulation(tmp_path: Path) -> None:
    """The state holds no gradients: what is saved is the state between two updates, whatever the accumulation."""
    tiny.complete(tmp_path / "run", steps=2, micro_batch=1, every_steps=1)
    from unisono.checkpoint import open_checkpoint

    names = open_checkpoint(tmp_path / "run/checkpoints/step-00000001").names()
    assert {name.split("/")[0] for name in names} == {"model", "optim", "scaler", "guard", "meter", "rng"}


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
@pytest.mark.parametrize("content", [b"[]", b"[[1]]", b"{", b"[3, [1, 2], null]", b'["MT19937", [1, -2]]'])
def test_what_is_no_state_of_a_generator_is_an_error(kind: str, content: bytes) -> None:
    states = {name.rsplit("/", 1)[1]: value for name, value in generator_states(0).items()}
    states[kind] = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    class Reader:
        path = Path("step-1")

        def names(self) -> list[str]:
            return [f"rng/rank-00000/{name}" for name in states]

        def tensor(self, name: str) -> torch.Tensor:
            return states[name.rsplit("/", 1)[1]]

    with pytest.raises(CheckpointError, match=r"rng/rank-00000/\*, which is no state of random generators"):
        restore_generators(Reader(), rank=0, seed=0, step=1)  # pyright: ignore[reportArgumentType]
