"""Worker: what the memory estimators of DeepSpeed, Accelerate and Megatron-LM say of runs.

    python -m benchmarks.peers.estimate_memory '{"estimators": ["DeepSpeed"], "runs": {...}, "megatron": FOLDER}'

Prints for each estimator and run the bytes of its states and of its peak, null where it has none. A run has what an estimator
asks for under that estimator's name: the devices and the ZeRO stage; the precision; Megatron-LM's arguments.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions

Estimate = tuple[float, float | None]
_MIB = 2**20


def built(options: Mapping[str, Any]) -> nn.Module:
    """The GPT, without values."""
    with torch.device("meta"):
        return GPT(ModelOptions(**options))


def deepspeed(run: Mapping[str, Any]) -> Estimate:
    """Model states in the memory of each device, without offload. The peak is not estimated."""
    from deepspeed.runtime.zero.stage3 import (  # pyright: ignore[reportMissingImports]
        estimate_zero3_model_states_mem_needs,
    )
    from deepspeed.runtime.zero.stage_1_and_2 import (  # pyright: ignore[reportMissingImports]
        estimate_zero2_model_states_mem_needs,
    )

    given = run["DeepSpeed"]
    model = built(run["options"])
    # as its functions for live models count, which take all parameters on the meta device for one
    total = sum(parameter.numel() for parameter in model.parameters())
    largest = max(sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules())
    devices = {"num_gpus_per_node": given["devices"], "cpu_offload": False}
    if given["zero"] == 3:
        states = estimate_zero3_model_states_mem_needs(total, largest, cpu_offload_params=False, **devices)[1]
    else:
        states = estimate_zero2_model_states_mem_needs(total, **devices)[1]
    return states, None


def accelerate(run: Mapping[str, Any]) -> Estimate:
    """The column "Training using Adam" of ``accelerate estimate-memory``: a step with one sample, on one device."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    size = calculate_maximum_sizes(built(run["options"]))[0]
    return max(estimate_training_usage(size, run["Accelerate"]["precision"]).values()), None


def megatron(run: Mapping[str, Any]) -> Estimate:
    """Weights and optimizer, and these with activations, of ``report_theoretical_memory``."""
    module = importlib.import_module("megatron.training.theoretical_memory_usage")
    given = dict(run["Megatron-LM"])
    num_micro_batches = given.pop("num_micro_batches")
    states, _, total = module.report_theoretical_memory(types.SimpleNamespace(**given), num_micro_batches)
    return states * _MIB, total * _MIB


def open_megatron(folder: Path) -> str:
    """Make the estimator's module importable alone, without what the rest of Megatron-LM needs; its version."""
    training = types.ModuleType("megatron.training")
    training.__path__ = [str(folder / "megatron" / "training")]
    utils: Any = types.ModuleType("megatron.training.utils")
    utils.is_hybrid_model = lambda args: False
    utils.print_rank_0 = lambda message: print(message, file=sys.stderr)
    sys.path.append(str(folder))
    sys.modules |= {"megatron.training": training, "megatron.training.utils": utils}
    (found,) = (each.version for each in distributions(path=[str(folder)]) if each.name == "megatron-core")
    return found


def main() -> None:
    given = json.loads(sys.argv[1])
    estimators = {"DeepSpeed": deepspeed, "Accelerate": accelerate, "Megatron-LM": megatron}
    estimates: dict[str, dict[str, Estimate]] = {}
    versions: dict[str, str] = {}
    with redirect_stdout(sys.stderr):
        for name in given["estimators"]:
            versions[name] = open_megatron(Path(given["megatron"])) if name == "Megatron-LM" else version(name.lower())
            estimates[name] = {of: estimators[name](run) for of, run in given["runs"].items() if name in run}
    print(json.dumps({"estimates": estimates, "versions": versions}))


if __name__ == "__main__":
    main()
