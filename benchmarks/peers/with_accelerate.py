"""Worker: Hugging Face Accelerate's own five changes to the hand-written loop."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import accelerate
import torch
from benchmarks.hand import build_adamw, build_gpt, mean_loss, set_lr, torch_batches
from benchmarks.peers.gate import Gate
from benchmarks.workload import Workload
from torch.utils.data import DataLoader


def main() -> None:
    gate = Gate()
    settings = json.loads(sys.argv[1])
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    workload = Workload.read(Path(settings["workload"]))
    accelerator = accelerate.Accelerator(cpu=True)
    model = build_gpt(workload)
    model, optimizer, loader = accelerator.prepare(
        model,
        build_adamw(model, workload.optim, fused=settings["fused"]),
        DataLoader(torch_batches(workload), batch_size=None, shuffle=False),
    )
    gate.open(
        versions={"accelerate": accelerate.__version__, "torch": str(torch.__version__)},
        threads=torch.get_num_threads(),
    )
    for batch, lr in zip(loader, workload.lrs, strict=True):
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), workload.optim["clip_norm"])
        set_lr(optimizer, lr)
        optimizer.step()
        gate.step_done(loss.item)


if __name__ == "__main__":
    main()
