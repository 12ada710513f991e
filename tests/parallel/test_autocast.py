"""The cast map: what a step in bf16 converts. Nothing is converted twice, and norms and losses stay in fp32."""

from __future__ import annotations

from collections import Counter
from typing import Any

import matrix
import pytest
import tiny
import torch
from pool import Pool
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.dist import JobSpec, World

VOCABULARY = 48
# of 12 samples: two micro-batches of each rank unless it says otherwise
AXES: dict[str, dict[str, Any]] = {
    "dp_replicate": {"micro_batch": 3},
    "dp_shard": {"dp_shard": 2, "micro_batch": 3},
    "tp": {"tp": 2},
    "sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "pp, four micro-batches": {"pp": 2, "micro_batch": 3},
    "zbv": {"pp": 2, "schedule": "zbv"},
}


class Casts(TorchDispatchMode):
    """Conversions between floating-point dtypes: what was converted, from what and to what."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names  # of parameters, by where they lie
        self._alive: list[Tensor] = []
        self._made: dict[int, tuple[int, torch.dtype]] = {}  # results: version, dtype before
        self.counts: Counter[tuple[Any, ...]] = Counter()
        self.back: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten._to_copy and made.is_floating_point():
            (source, *_), place = args, args[0].untyped_storage().data_ptr()
            if source.is_floating_point() and source.dtype != made.dtype:
                self._alive += [source, made]  # an address is used again once its tensor is gone
                window = (source.storage_offset(), tuple(source.shape), source.stride(), source._version)
                name = self._names.get(place, "")
                self.counts[(name, place, *window, source.dtype, made.dtype)] += 1
                if self._made.get(place) == (source._version, made.dtype):
                    self.back.append(tuple(source.shape))
                self._made[made.untyped_storage().data_ptr()] = (made._version, source.dtype)
        return made


def cast_maps(world: World, run_dir: str, model: str, plans: dict[str, dict]) -> dict[str, Any]:
    """By plan, of the second step: parameters and how often each was converted, values that were converted more than once to the
    same dtype, shapes of what was converted and back, and how often matrices of each shape were rounded."""
    found = {}
    for name, plan in plans.items():
        network, data, objective = matrix.MODELS[model](4)
        settings = {"precision": "bf16", "global_batch": 12, "micro_batch": 6, "steps": 2, **plan}
        run_dir_of = f"{run_dir}/{name}"
        with tiny.trainer(run_dir_of, world=world, network=network, data=data, objective=objective, **settings) as run:
            steps = iter(run)
            next(steps)
            names = {p.untyped_storage().data_ptr(): n for n, p in run.state.sharded.parameters.items()}
            with Casts(names) as casts:
                next(steps)
        parameters: Counter[str] = Counter()
        for (parameter, *_), count in casts.counts.items():
            parameters[parameter] += count if parameter else 0
        # FSDP2 gathers matrices where others were before
        gathered = run.plan.uses_fsdp
        again = [
            key[3]
            for key, count in casts.counts.items()
            if not key[0] and count > 1 and not (gathered and VOCABULARY in key[3])
        ]
        matrices: Counter[tuple[int, ...]] = Counter()
        for (*_, shape, _, _, _, to), count in casts.counts.items():
            matrices[shape] += count if len(shape) == 2 and to == torch.bfloat16 else 0
        found[name] = {
            "parameters": {n: c for n, c in parameters.items() if n},
            "again": again,
            "back": casts.back,
            "matrices": {shape: count for shape, count in matrices.items() if count},
        }
    return found


def check(found: dict[str, Any], model: str) -> None:
    for name, each in found.items():
        assert each["again"] == [], f"{name}: converted once for each use"
        # the router reads what the experts read, in fp32
        of_routers = len([shape for shape in each["back"] if model == "gpt-moe"])
        assert len(each["back"]) == of_routers <= 2 * 2 * 4, f"{name}: converted and back"
        if name not in ("dp_shard", "cp"):  # what FSDP2 gathers is no parameter
            assert each["parameters"], f"{name}: nothing was computed in bf16"
            for parameter, count in each["parameters"].items():
                # of a pipeline all micro-batches but the last share one conversion; the loss makes its own
                expected = 4 if "four" in name and parameter == "embedding.weight" else 2
                assert count == expected, f"{name}: {parameter} {count} times"
                assert "norm" not in parameter, f"{name}: {parameter}"


@pytest.mark.parametrize("model", ["gpt", "gpt-moe", "bert"])
def test_one_process_converts_nothing_twice(tmp_path: Any, model: str) -> None:
    check(cast_maps(World(JobSpec()), str(tmp_path), model, {"alone": {}}), model)


def test_nor_does_any_axis(pool: Pool, tmp_path: Any) -> None:
    for found in pool.run(cast_maps, str(tmp_path), "gpt", AXES, ranks=2, timeout_s=120):
        check(found, "gpt")
        outside = {shape: count for shape, count in found["dp_replicate"]["matrices"].items() if VOCABULARY in shape}
        for name in ("dp_shard", "cp"):
            assert found[name]["matrices"] == outside, f"{name}: blocks are gathered in bf16"
