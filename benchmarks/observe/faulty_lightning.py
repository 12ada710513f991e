"""Lightning's Trainer around the model of ``faulty``, under each of its profilers, one fit after the other."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from benchmarks.observe.faulty import BATCH, FAULTS, SAVE_EVERY, Network, Rows, fault_here, mean_loss, slow_link
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return mean_loss(self.network(batch["inputs"]), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class SlowLink(lightning.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        slow_link(trainer.strategy.model)


def main(folder: Path) -> None:
    """Train under each profiler, which writes ``folder/fit-NAME-RANK.txt``."""
    warnings.filterwarnings("ignore")
    fault, name = FAULTS[os.environ["FAULT"]], fault_here()
    profilers = {
        "simple": SimpleProfiler(folder, "simple"),
        "advanced": AdvancedProfiler(folder, "advanced"),
        "pytorch": PyTorchProfiler(folder, "pytorch", row_limit=-1, profile_memory=True),
    }
    for way, profiler in profilers.items():
        torch.compiler.reset()
        torch.manual_seed(0)
        callbacks: list[Any] = []
        if name == "slow link":
            callbacks.append(SlowLink())
        if name == "synchronous saves":
            saves = ModelCheckpoint(folder / f"saves-{way}", save_top_k=-1, every_n_train_steps=SAVE_EVERY)
            callbacks.append(saves)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=fault.processes,
            strategy=DDPStrategy(process_group_backend="gloo") if fault.processes > 1 else "auto",
            max_epochs=1,
            callbacks=callbacks,
            profiler=profiler,
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=bool(name == "synchronous saves"),
            default_root_dir=folder,
        )
        rows: Any = Rows(fault.steps * BATCH)
        trainer.fit(Module(), DataLoader(rows, batch_size=BATCH))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
