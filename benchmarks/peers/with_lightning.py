"""Worker: Lightning's Trainer. Setting ``quiet`` turns off its logger, progress bar, summary and checkpoints."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from benchmarks.hand import build_adamw, build_gpt, mean_loss, torch_batches
from benchmarks.peers.gate import Gate
from benchmarks.workload import Workload
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self, workload: Workload, fused: bool | None) -> None:
        super().__init__()
        self.gpt = build_gpt(workload)
        self.workload, self.fused = workload, fused

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return mean_loss(self.gpt, batch)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = build_adamw(self.gpt, self.workload.optim, fused=self.fused)
        lrs = self.workload.lrs
        rule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lrs[min(step, len(lrs) - 1)] / 1e-3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rule, "interval": "step"}}


class AtGate(lightning.Callback):
    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.gate.open(
            versions={"lightning": lightning.__version__, "torch": str(torch.__version__)},
            threads=torch.get_num_threads(),
        )

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.gate.step_done(outputs["loss"].item)


def main() -> None:
    gate = Gate()
    settings = json.loads(sys.argv[1])
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    warnings.filterwarnings("ignore")
    workload = Workload.read(Path(settings["workload"]))
    quiet = (
        {
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
        }
        if settings["quiet"]
        else {}
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        gradient_clip_val=workload.optim["clip_norm"],
        default_root_dir=settings["folder"],
        callbacks=[AtGate(gate)],
        **quiet,
    )
    loader = DataLoader(torch_batches(workload), batch_size=None, shuffle=False)
    trainer.fit(Module(workload, settings["fused"]), loader)


if __name__ == "__main__":
    main()
