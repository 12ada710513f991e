"""Every text of ``plan.validate`` for pipelines, offload, fp8, placements and single choices."""

from __future__ import annotations

from typing import Any

import pytest
from plan_edit import changed

from unisono import PlanOptions
from unisono.errors import PlanError
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan
from unisono.plan.rules import ColwiseRowwise, ParameterPlacement
from unisono.plan.validate import validate_plan

PLACED = (ParameterPlacement(module="ffn", parameter="up.weight", dims=("tp", None)),)
RULE = ColwiseRowwise(module="a", rowwise="b")


def plan(ranks: int, **options: Any) -> Plan:
    made = PlanOptions(**{"device": "cpu", "global_batch": 8, "micro_batch": 2, "precision": "fp32", **options})
    return derive_plan(made, world_size=ranks, device="cpu", native_bf16=False)


PIPELINE = {"pp": 2}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "splits that pp does not divide": (
        2,
        PIPELINE,
        {"pipeline.layers_per_stage": (1, 1, 2)},
        "layers_per_stage [1, 1, 2] with pp 2\n"
        "  rule: layers_per_stage has the number of blocks of each pipeline stage, and each rank as many stages\n"
        "  so:   a rank would have no stage\n"
        "  try:  2 numbers, or none (stages are balanced by cost)",
    ),
    "splits of a whole model": (
        1,
        {},
        {"pipeline.layers_per_stage": (1, 1)},
        "layers_per_stage [1, 1] with pp 1\n"
        "  rule: layers_per_stage has the number of blocks of each pipeline stage, and each rank as many stages\n"
        "  so:   there is one stage, the whole model\n"
        "  try:  no layers_per_stage, or pp above 1",
    ),
    "weights beside splits": (
        2,
        PIPELINE,
        {"pipeline.layers_per_stage": (1, 1), "pipeline.block_costs": (0.0, 1.0, 1.0, 2.0)},
        "block_costs [0.0, 1.0, 1.0, 2.0] with layers_per_stage [1, 1]\n"
        "  rule: pipeline stages are balanced by block_costs where layers_per_stage is empty\n"
        "  so:   they would change nothing\n"
        "  try:  layers_per_stage or block_costs",
    ),
    "weights of a whole model": (
        1,
        {},
        {"pipeline.block_costs": (0.0, 1.0, 1.0, 2.0)},
        "block_costs [0.0, 1.0, 1.0, 2.0] with pp 1\n"
        "  rule: pipeline stages are balanced by block_costs where layers_per_stage is empty\n"
        "  so:   they would change nothing\n"
        "  try:  no block_costs, or pp above 1",
    ),
    **{
        f"weights that are {kind}": (
            2,
            PIPELINE,
            {"pipeline.block_costs": weights},
            f"block_costs {list(weights)}\n"
            "  rule: block_costs are relative costs of the parts of a model: finite, 0 or more, and not all 0\n"
            "  so:   no stage would be the heaviest\n"
            "  try:  a cost of 1 for each block, and 0 for what comes before and after them",
        )
        for kind, weights in {
            "negative": (0.0, 1.0, -1.0, 2.0),
            "all 0": (0.0, 0.0, 0.0, 0.0),
            "no numbers": (0.0, 1.0, float("nan"), 2.0),
            "not finite": (0.0, 1.0, float("inf"), 2.0),
        }.items()
    },
    "modules that do not recompute": (
        1,
        {},
        {"recompute.modules": ("blocks.*.ffn",)},
        "recompute.modules ['blocks.*.ffn'] with recompute 'none'\n"
        "  rule: it names the modules that are recomputed\n"
        "  so:   it would change nothing\n"
        "  try:  recompute='full', or no recompute.modules",
    ),
    "modules that recompute, and blocks": (
        1,
        {},
        {"recompute": "full", "recompute.modules": ("blocks.*.ffn",), "recompute.blocks_per_stage": (1,)},
        "recompute.modules ['blocks.*.ffn'] with recompute.blocks_per_stage [1]\n"
        "  rule: recomputed modules are named, or counted in blocks\n"
        "  so:   it would be unclear which of the two counts\n"
        "  try:  names of blocks in recompute.modules, or no recompute.modules",
    ),
    "an empty piece": (
        2,
        PIPELINE,
        {"pipeline.layers_per_stage": (4, 0)},
        "layers_per_stage [4, 0]\n"
        "  rule: every stage has at least one block\n"
        "  so:   a stage would only pass data on\n"
        "  try:  move a block from a neighbour",
    ),
    "stages that the schedule does not run": (
        2,
        PIPELINE,
        {"pipeline.layers_per_stage": (1, 1, 1, 1)},
        "schedule '1f1b' with 2 stages per rank\n"
        "  rule: gpipe and 1f1b run one stage per rank, zbv two, interleaved two or more\n"
        "  so:   there is no such order of passes\n"
        "  try:  2 numbers in layers_per_stage, or schedule='interleaved'",
    ),
    "three stages of zbv": (
        2,
        PIPELINE,
        {"schedule": "zbv", "pipeline.layers_per_stage": (1, 1, 1, 1, 1, 1)},
        "schedule 'zbv' with 3 stages per rank\n"
        "  rule: gpipe and 1f1b run one stage per rank, zbv two, interleaved two or more\n"
        "  so:   there is no such order of passes\n"
        "  try:  4 numbers in layers_per_stage, or schedule='1f1b'",
    ),
    "too few micro-batches": (
        2,
        PIPELINE,
        {"micro_batch": 8, "accumulation": 1},
        "accumulation 1 with pp 2, schedule '1f1b'\n"
        "  rule: the schedule keeps 2 micro-batches in flight at once\n"
        "  so:   some ranks would never have work\n"
        "  try:  micro_batch=4, or global_batch=16 with micro_batch=8, or schedule='gpipe'",
    ),
    "a group that is not whole": (
        2,
        {**PIPELINE, "global_batch": 6},
        {"schedule": "interleaved"},
        "accumulation 3 with pp 2, schedule 'interleaved'\n"
        "  rule: interleaved stages take micro-batches in groups of pp\n"
        "  so:   the last group would be incomplete\n"
        "  try:  accumulation 2, by global_batch or micro_batch",
    ),
    "pipelines of different length": (
        4,
        PIPELINE,
        {"global_batch": 7},
        "pp 2 with global_batch 7 on 2 data ranks\n"
        "  rule: all pipelines run the same number of micro-batches: global_batch is a multiple of the data ranks\n"
        "  so:   the schedules would not fit together\n"
        "  try:  plan.global_batch=6",
    ),
    "zbv with sharded states": (
        4,
        {"pp": 2, "dp_shard": 2},
        {"schedule": "zbv"},
        "schedule 'zbv' with dp_shard 2 x cp 1\n"
        "  rule: zbv computes weight gradients after a block's backward pass, and sharded states reduce them at its end\n"
        "  so:   gradients would be missing\n"
        "  try:  schedule='interleaved', or dp_replicate in place of dp_shard",
    ),
    "fp8 with zbv": (
        2,
        PIPELINE,
        {"schedule": "zbv", "precision": "fp8"},
        "precision 'fp8' with tp 1, schedule 'zbv'\n"
        "  rule: layers that tp shards, and layers whose weight gradients zbv delays, have no fp8 products\n"
        "  so:   they would not compute in fp8\n"
        "  try:  precision='bf16', or dp_shard in place of tp and schedule='interleaved'",
    ),
    "offload on the CPU": (
        1,
        {},
        {"offload": True},
        "offload on the device 'cpu'\n"
        "  rule: it moves activations from an accelerator to the host\n"
        "  so:   they would be copied to where they are\n"
        "  try:  offload=False, and recompute to save memory",
    ),
    "offload of what is not kept": (
        1,
        {},
        {"offload": True, "device": "cuda", "compile": "regional"},
        "offload with recompute 'none', compile 'regional'\n"
        "  rule: it moves what a block keeps; recomputed blocks keep next to nothing, compiled graphs choose for themselves\n"
        "  so:   little or nothing would be moved\n"
        "  try:  offload=False, or recompute='none' and compile='off'",
    ),
    "compiled experts": (
        2,
        {"dp_shard": 2, "ep": 2},
        {"compile": "model"},
        "ep 2 with compile 'model'\n"
        "  rule: sending tokens to experts on other ranks cannot be traced by the compiler\n"
        "  so:   the graph would break in every block\n"
        "  try:  compile='off'",
    ),
    "compiled sums": (
        2,
        {"tp": 2},
        {"compile": "regional"},
        "tp 2 with compile 'regional'\n"
        "  rule: sums inside a layer between ranks cannot be traced by the compiler\n"
        "  so:   the graph would break at each of them\n"
        "  try:  compile='off'",
    ),
    "a sequence of one": (
        1,
        {},
        {"sequence_parallel": True},
        "sequence_parallel with tp 1\n"
        "  rule: it shards the activations between layers that tp shards\n"
        "  so:   it would change nothing\n"
        "  try:  sequence_parallel=False, or cp to share sequences",
    ),
    "experts without a place": (
        2,
        {"dp_shard": 2},
        {"ep": 3},
        "ep 3 with dp_shard 2 x cp 1\n"
        "  rule: experts are distributed over ranks that share one copy of the state: ep divides dp_shard x cp\n"
        "  so:   some experts would be on no rank\n"
        "  try:  ep=2, or dp_shard=3",
    ),
    "a count of passes that is not one": (
        1,
        {},
        {"accumulation": 3},
        "accumulation 3 of micro_batch 2 for a share of 8 samples\n"
        "  rule: accumulation is the number of micro-batches in a rank's share of the step\n"
        "  so:   the plan would not say what is computed\n"
        "  try:  accumulation=4",
    ),
    "keeping without selective recompute": (
        1,
        {},
        {"recompute.saved_ops": ("mm",), "recompute": "full"},
        "recompute.saved_ops ['mm'] with recompute 'full'\n"
        "  rule: it names the operators whose results selective recompute keeps\n"
        "  so:   it would change nothing\n"
        "  try:  recompute='selective', or no recompute.saved_ops",
    ),
    "placements of one rank": (
        1,
        {},
        {"placements": PLACED},
        "placements with plan.tp=1\n"
        "  rule: they shard parameters over the ranks of tp\n"
        "  so:   they would act on nothing\n"
        "  try:  plan.tp=2, or no placements",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_says_what_would_work(name: str) -> None:
    ranks, options, changes, text = CASES[name]
    with pytest.raises(PlanError) as caught:
        validate_plan(changed(plan(ranks, **options), **changes), ranks)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("ranks", "options", "changes", "given", "rule", "nearest"),
    [
        (2, {}, {"sequence_parallel": True}, "sequence_parallel True", "DTensor decides how activations are sharded", ""),
        (2, {}, {"rules": (RULE,)}, "rules 1", "a layer is sharded by rules or by placements", "one of the two"),
    ],
)  # fmt: skip
def test_what_is_not_beside_placements(
    ranks: int, options: dict[str, Any], changes: dict[str, Any], given: str, rule: str, nearest: str
) -> None:
    with pytest.raises(PlanError) as caught:
        validate_plan(changed(plan(ranks, tp=2, **options), placements=PLACED, **changes), ranks)
    nearest = nearest or f"no {given.partition(' ')[0]}, or tensor_parallel.rules in place of placements"
    assert str(caught.value) == (
        f"placements with {given}\n  rule: {rule}\n  so:   the model could not be sharded both ways\n  try:  {nearest}"
    )
