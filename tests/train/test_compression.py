"""Compressed gradients through the trainer: ranks stay equal, resume is exact, skipped steps leave no trace, auto says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from pool import Pool

from unisono.errors import PlanError
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.train.gradient_sync import compression_reason

STEPS = 8
CODECS = ("bf16", "int8", "1bit", "2bit:rms*1.5", "topk:0.05", "powersgd:2")
SGD = {"kind": "sgd", "lr": 0.3, "momentum": 0.9, "clip_norm": 0.0}


def cut_and_resumed(world: Any, folder: str, codecs: tuple[str, ...]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for codec in codecs:
        changes = {"world": world, "steps": STEPS, "compression": codec, "micro_batch": 2, **SGD}
        whole = tiny.complete(f"{folder}/whole-{codec}", **changes)
        tiny.complete(f"{folder}/cut-{codec}", stop_after=5, **changes)
        rest = tiny.complete(f"{folder}/cut-{codec}", **changes)
        found[codec] = [whole["losses"], rest["losses"], whole["digest"], rest["digest"]]
    return found


def test_ranks_stay_equal_and_a_run_resumes_bit_for_bit(tmp_path: Path, pool: Pool) -> None:
    plain = tiny.complete(tmp_path / "plain", steps=STEPS, **SGD)["losses"]
    first, second = pool.run(cut_and_resumed, str(tmp_path), CODECS, timeout_s=120)
    for codec in CODECS:
        losses, rest, digest, again = first[codec]
        assert rest == losses[5:]
        assert again == digest == second[codec][2] == second[codec][3]
        assert losses != plain
        assert losses[-1] < losses[0]


def skipping(world: Any, folder: str) -> list[Any]:
    """The third step is poisoned on one rank: what the codec holds back must not change by it."""
    found: list[Any] = []
    with tiny.trainer(
        folder, world=world, steps=STEPS, compression="2bit:0.01", data=tiny.PoisonedFrom(2), **SGD
    ) as run:
        for step in run:
            own = {
                name: tensor.clone() for name, tensor in run.state.sync_state.rank_state().items() if name != "steps"
            }
            found.append((step.skipped, own))
            if step.index == 3:
                break
    (_, before), (skipped, after) = found[1:]
    return [skipped, all(bool((after[name] == before[name]).all()) for name in before), len(before)]


def test_a_skipped_step_leaves_no_trace(tmp_path: Path, pool: Pool) -> None:
    for skipped, equal, count in pool.run(skipping, str(tmp_path / "run")):
        assert skipped
        assert equal
        assert count > 0


def otherwise(world: Any, folder: str) -> list[Any]:
    changes: dict[str, Any] = {"world": world, "steps": STEPS, **SGD}
    tiny.complete(folder, stop_after=4, compression="int8", **changes)
    tiny.complete(folder, stop_after=2, **changes)
    tiny.complete(folder, compression="1bit", **changes)
    kept = [event for event in tiny.events(folder, world.rank) if event["kind"] == "resumed"]
    chosen = [event for event in tiny.events(folder, world.rank) if event["kind"] == "compression"]
    return [[event["differences"] for event in kept], [[event["codec"], event["why"]] for event in chosen]]


def test_another_codec_goes_on_and_says_what_is_left_behind(tmp_path: Path, pool: Pool) -> None:
    for differences, chosen in pool.run(otherwise, str(tmp_path / "run")):
        without, with_another = (" ".join(each) for each in differences)
        assert "rank-local tensors are not used" in without
        assert "plan.sync.compression 'int8' then, 'none' now" in without
        assert "no rank-local state for rank" in with_another
        assert [codec for codec, _ in chosen] == ["int8", "1bit"]


def automatic(world: Any, folder: str) -> list[Any]:
    tiny.complete(folder, steps=2, world=world, compression="auto")
    return [event for event in tiny.events(folder, world.rank) if event["kind"] == "compression"]


def test_one_or_two_bits_with_a_second_moment_are_doubted() -> None:
    assert "the second moment is made of squares of what was sent" in compression_reason("2bit:rms*1.5", "adamw")
    assert {
        compression_reason("2bit", "sgd"),
        compression_reason("1bit", "lars"),
        compression_reason("int8", "adamw"),
    } == {"as asked"}


def test_auto_decides_once_for_all_ranks_and_says_why(tmp_path: Path, pool: Pool) -> None:
    (first,), (second,) = pool.run(automatic, str(tmp_path / "run"))
    assert first["asked"] == "auto"
    assert (first["codec"], first["why"]) == (second["codec"], second["why"])
    assert "GB/s" in first["why"] or "MB/s" in first["why"], first["why"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dp_shard": 2}, "FSDP2 reduces the gradients of sharded states itself"),
        ({"tp": 2, "compression": "int8"}, "no gradient is sent from rank to rank"),
        ({"precision": "fp16"}, "in units of the gradients, which a loss scale changes"),
    ],
)
def test_compression_that_would_act_on_nothing_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        derive_plan(
            PlanOptions(**{"global_batch": 8, "compression": "int8", **options}),
            world_size=2,
            device="cpu",
            native_bf16=True,
        )
