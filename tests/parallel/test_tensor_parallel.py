"""Tensor and sequence parallelism: equal to one process alone and with sharded data, refused where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from matrix import Images
from plans import like_one_process, on_ranks, save_at
from pool import Pool

from unisono.dist import JobSpec, World
from unisono.errors import PlanError
from unisono.models.resnet import ResNet, ResNetOptions
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan

WIDE = {"num_heads": 4, "num_kv_heads": 2}


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        pytest.param(4, {"tp": 2, "dp_shard": 2}, marks=pytest.mark.full),
        (2, {"tp": 2, "sequence_parallel": True, "micro_batch": 2}),
        pytest.param(2, {"tp": 2}, marks=pytest.mark.full),
        pytest.param(4, {"tp": 2}, marks=pytest.mark.full),
        pytest.param(4, {"tp": 2, "dp_shard": 2, "zero": 1, "micro_batch": 2}, marks=pytest.mark.full),
    ],
)
def test_trains_like_one_process(pool: Pool, tmp_path: Path, ranks: int, axes: dict) -> None:
    together = like_one_process(pool, tmp_path, ranks, sizes=WIDE, **axes)
    spread = axes["tp"] * axes.get("dp_shard", 1)
    # embedding and norms are on every rank along tp
    assert 1 / spread < together[0]["held"] < 1 / axes.get("dp_shard", 1)
    assert len({str(outcome["losses"]) for outcome in together}) == 1


@pytest.mark.parametrize(
    ("ranks", "axes", "sizes"),
    [
        (2, {"tp": 2}, {"num_kv_heads": 1, "tied": False, "vocab_size": 49, "head_dim": 6}),
        pytest.param(4, {"tp": 4}, {"num_kv_heads": 1, "vocab_size": 51}, marks=pytest.mark.full),
        (4, {"tp": 4, "sequence_parallel": True}, {"num_kv_heads": 2, "vocab_size": 51, "tied": False}),
        pytest.param(
            8, {"tp": 4, "dp_shard": 2, "sequence_parallel": True}, {"num_kv_heads": 1}, marks=pytest.mark.full
        ),
    ],
)
def test_shared_key_value_heads_and_odd_vocabularies(
    pool: Pool, tmp_path: Path, ranks: int, axes: dict, sizes: dict
) -> None:
    together = like_one_process(pool, tmp_path, ranks, sizes={**WIDE, **sizes}, **axes)
    assert together[0]["held"] < 1 / axes["tp"] + 0.2  # tables are cut too


def test_sequence_parallel_drops_what_a_whole_layer_would(pool: Pool, tmp_path: Path) -> None:
    changes = {"tp": 2, "dropout": 0.2, "sizes": WIDE}
    plain = pool.run(on_ranks, str(tmp_path / "plain"), changes, ranks=2)[0]
    cut = {**changes, "sequence_parallel": True}
    found = pool.run(on_ranks, str(tmp_path / "cut"), cut, ranks=2)
    assert found[0]["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    again = pool.run(on_ranks, str(tmp_path / "again"), {**cut, "recompute": "full"}, ranks=2)
    assert [o["digest"] for o in again] == [o["digest"] for o in found]


def test_bf16_follows_fp32(pool: Pool, tmp_path: Path) -> None:
    changes = {"tp": 2, "sizes": WIDE, "sequence_parallel": True}
    exact = pool.run(on_ranks, str(tmp_path / "exact"), changes, ranks=2)[0]
    rounded = pool.run(on_ranks, str(tmp_path / "rounded"), {**changes, "precision": "bf16"}, ranks=2)[0]
    assert rounded["losses"] != exact["losses"]
    assert rounded["losses"] == pytest.approx(exact["losses"], rel=1e-2)


@pytest.mark.full
@pytest.mark.parametrize("changes", [{"kind": "lamb"}, {"kind": "lars", "lr": 0.5}, {"ema_decay": 0.9}])
@pytest.mark.parametrize(("ranks", "axes"), [(2, {"tp": 2}), (4, {"tp": 2, "dp_shard": 2})])
def test_other_optimizers(pool: Pool, tmp_path: Path, ranks: int, axes: dict, changes: dict) -> None:
    like_one_process(pool, tmp_path, ranks, sizes=WIDE, **axes, **changes)


@pytest.mark.full
def test_resumes_bit_by_bit_with_dropout(pool: Pool, tmp_path: Path) -> None:
    """The ranks of a layer drop the same activations, before and after; recompute draws them again."""
    changes = {"tp": 2, "dropout": 0.1, "sizes": WIDE, "recompute": "full"}
    straight = pool.run(on_ranks, str(tmp_path / "straight"), changes, ranks=4)
    assert straight[0]["losses"] == straight[1]["losses"]
    pool.run(save_at, str(tmp_path / "cut"), changes, 3, ranks=4)
    resumed = pool.run(on_ranks, str(tmp_path / "cut"), changes, ranks=4)
    assert [o["digest"] for o in resumed] == [o["digest"] for o in straight]
    plain = pool.run(on_ranks, str(tmp_path / "plain"), {**changes, "recompute": "none"}, ranks=4)
    assert [o["digest"] for o in plain] == [o["digest"] for o in straight]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, {"dp_shard": 2}), (2, {"tp": 2})),
        pytest.param((2, {"tp": 2}), (1, {}), marks=pytest.mark.full),
        pytest.param((1, {}), (4, {"tp": 2, "dp_shard": 2}), marks=pytest.mark.full),
        pytest.param((4, {"tp": 2, "dp_shard": 2}), (2, {"dp_shard": 2}), marks=pytest.mark.full),
        pytest.param((4, {"tp": 4, "sequence_parallel": True}), (2, {}), marks=pytest.mark.full),
    ],
)
def test_goes_on_under_another_plan(pool: Pool, tmp_path: Path, before: tuple, after: tuple) -> None:
    common = {"sizes": WIDE}
    alone = on_ranks(World(JobSpec()), str(tmp_path / "alone"), common)
    pool.run(save_at, str(tmp_path / "run"), {**common, **before[1]}, 3, ranks=before[0])
    outcome = pool.run(on_ranks, str(tmp_path / "run"), {**common, **after[1]}, ranks=after[0])[0]
    assert outcome["losses"] == pytest.approx(alone["losses"][3:], rel=1e-5)
    assert outcome["norms"] == pytest.approx(alone["norms"][3:], rel=1e-4)


def evaluated(world: World, run_dir: str, axes: dict) -> float:
    with tiny.trainer(
        run_dir, world=world, steps=2, sizes=WIDE, eval_data=tiny.RaggedTokens(7), gradient_stats_every_steps=2, **axes
    ) as run:
        list(run)
        return run.evaluate()["loss"]


def test_evaluation_and_statistics_are_of_the_whole(pool: Pool, tmp_path: Path) -> None:
    alone = evaluated(World(JobSpec()), str(tmp_path / "alone"), {})
    found = pool.run(evaluated, str(tmp_path / "run"), {"tp": 2, "dp_shard": 2, "micro_batch": 2}, ranks=4)
    assert found == pytest.approx([alone] * 4, rel=1e-5)
    (here,), (there,) = (
        [e["layers"] for e in tiny.events(tmp_path / name) if e["kind"] == "gradient_stats"]
        for name in ("run", "alone")
    )
    for name, figures in there.items():
        assert here[name]["norm"] == pytest.approx(figures["norm"], rel=1e-4), name
        assert here[name]["max"] == pytest.approx(figures["max"], rel=1e-4), name
    starts = [
        e["parameters"] for name in ("run", "alone") for e in tiny.events(tmp_path / name) if e["kind"] == "run_start"
    ]
    assert starts[0] == starts[1]


def refused(world: World, run_dir: str, changes: dict) -> str:
    with pytest.raises(PlanError) as caught, tiny.trainer(run_dir, world=world, **changes):
        pass
    return str(caught.value)


def test_all_that_the_model_does_not_allow_comes_at_once(pool: Pool, tmp_path: Path) -> None:
    changes = {
        "tp": 2,
        "pp": 2,
        "schedule": "interleaved",
        "micro_batch": 2,
        "sizes": {"num_heads": 3, "num_kv_heads": 3, "dim": 24},
    }
    text = pool.run(refused, str(tmp_path), changes, ranks=4)[0]
    assert text.startswith("3 problems\n1. a model of 2 blocks in 4 stages\n")
    assert "2. plan.tp=2 for blocks.0.attention, whose heads is 3\n" in text
    assert "3. plan.tp=2 for blocks.0.attention, whose kv_heads is 3\n" in text


class Looked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = torch.nn.Embedding(tiny.VOCAB, 4, sparse=True), torch.nn.Linear(4, tiny.VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(tokens))


def refused_stack(world: World, run_dir: str) -> str:
    return refused(world, run_dir, {"tp": 2, "network": Looked()})


def refused_resnet(world: World, run_dir: str, changes: dict) -> str:
    network = ResNet(ResNetOptions(classes=3, depths=(2,), widths=(8,), groups=4, norm="group", stem="small"))
    return refused(world, run_dir, {**changes, "network": network, "data": Images()})


def refused_experts(world: World, run_dir: str) -> str:
    return refused(world, run_dir, {"tp": 2, "sizes": {"num_experts": 2, "ffn_dim": 15}})


def test_layers_that_cannot_be_cut_are_named(pool: Pool, tmp_path: Path) -> None:
    text = pool.run(
        refused, str(tmp_path / "one"), {"tp": 3, "sizes": {"dim": 24, "num_heads": 6, "num_kv_heads": 2}}, ranks=3
    )[0]
    assert "plan.tp=3 for blocks.0.attention, whose kv_heads is 2" in text
    assert "or ranks share whole key/value heads" in text
    assert "plan.tp=2" in text
    text = pool.run(
        refused,
        str(tmp_path / "two"),
        {"tp": 3, "sizes": {**WIDE, "dim": 24, "num_heads": 6, "num_kv_heads": 6}},
        ranks=3,
    )[0]
    assert "blocks.0.ffn, whose width of down is 64" in text
    text = pool.run(refused_stack, str(tmp_path / "three"), ranks=2)[0]
    assert "plan.tp=2 for Looked" in text
    known = "unisono gpt, unisono gpt with experts, unisono bert, llama, gpt2, bert"
    assert f"the built-in ones ({known}) do not name its modules" in text
    assert (
        "no pair of layers was found in what it computes (last: its result is what the model returns; words: it has"
        in text
    )
    text = pool.run(refused_resnet, str(tmp_path / "four"), {"tp": 2}, ranks=2)[0]
    assert "plan.tp=2 for ResNet" in text
    assert "plan.tp=1 with plan.dp_shard" in text
    text = pool.run(refused_experts, str(tmp_path / "five"), ranks=2)[0]
    assert "plan.tp=2 for blocks.0.ffn.experts, whose number of hidden units of an expert is 15" in text
    with pytest.raises(PlanError, match="the graph would break"):
        derive_plan(PlanOptions(tp=2, compile="model"), world_size=2, device="cpu", native_bf16=False)
    with pytest.raises(PlanError, match="dp_replicate 1 x dp_shard 1 x tp 2 on 3 ranks"):
        derive_plan(PlanOptions(tp=2), world_size=3, device="cpu", native_bf16=False)
