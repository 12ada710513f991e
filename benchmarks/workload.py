"""What every contestant trains: the demo's GPT on the demo's batches, as plain arrays that any framework can read.

``prepare`` needs unisono; ``Workload.read`` needs numpy only, so that workers in other environments can use it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

BATCH_NAMES = ("tokens", "targets", "weights", "positions", "documents")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """``batches[i]`` is step i's global batch, ``lrs[i]`` its learning rate, ``weights`` the initial parameters by name."""

    model: dict[str, Any]
    optim: dict[str, Any]
    batches: list[dict[str, np.ndarray]]
    lrs: list[float]
    weights: dict[str, np.ndarray]

    @staticmethod
    def read(folder: Path) -> Workload:
        """The inverse of ``prepare``."""
        facts = json.loads((folder / "workload.json").read_text())
        with np.load(folder / "batches.npz") as arrays:
            columns = {name: arrays[name] for name in BATCH_NAMES}
        batches = [{name: column[i] for name, column in columns.items()} for i in range(len(columns["tokens"]))]
        with np.load(folder / "weights.npz") as arrays:
            weights = {name: arrays[name] for name in arrays.files}
        return Workload(model=facts["model"], optim=facts["optim"], lrs=facts["lrs"], batches=batches, weights=weights)


def run_config(overrides: Sequence[str]) -> Any:
    """The demo's configuration with changes; a ``RunConfig``."""
    from unisono.config import load_config
    from unisono.train.config import RunConfig

    return load_config(RunConfig, overrides=overrides).value


def prepare(folder: Path, overrides: Sequence[str], steps: int) -> None:
    """Write the first ``steps`` global batches, learning rates and the initial weights of a configuration."""
    from unisono.data.loading.loader import Loader
    from unisono.optim import build_schedule
    from unisono.train.build import build_data, build_model

    config = run_config([*overrides, f"train.steps={steps}"])
    data = build_data(config)
    size = config.plan.global_batch
    loader = Loader(
        data.train,
        seed=config.run.seed,
        global_batch=size,
        micro_batch=size,
        rank=0,
        world_size=1,
    )
    batches = [loader.batch(step).micro_batches[0] for step in range(steps)]
    np.savez(folder / "batches.npz", **{n: np.stack([batch[n].numpy() for batch in batches]) for n in BATCH_NAMES})
    model = build_model(config, data.tokenizer)
    np.savez(folder / "weights.npz", **{name: p.detach().numpy() for name, p in model.named_parameters()})
    lr_at = build_schedule(config.schedule, steps, config.optim.lr)
    optim = {
        "betas": [config.optim.beta1, config.optim.beta2],
        "eps": config.optim.eps,
        "weight_decay": config.optim.effective_weight_decay,
        "clip_norm": config.optim.clip_norm,
    }
    options: Any = model.options
    facts = {
        "model": {**asdict(options), "ffn_dim": options.hidden_ffn},
        "optim": optim,
        "lrs": [lr_at(i) for i in range(steps)],
    }
    (folder / "workload.json").write_text(json.dumps(facts))
