"""Worker: the hand-written loop. Settings: fused (true, false, null), compile, bf16, threads (0 = torch's default)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from benchmarks.hand import build_adamw, build_gpt, hand_step, torch_batches
from benchmarks.peers.gate import Gate
from benchmarks.workload import Workload


def main() -> None:
    gate = Gate()
    settings = json.loads(sys.argv[1])
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    workload = Workload.read(Path(settings["workload"]))
    model = build_gpt(workload)
    optimizer = build_adamw(model, workload.optim, fused=settings["fused"])
    if settings.get("compile"):
        model.compile(dynamic=False)
    gate.open(versions={"torch": str(torch.__version__)}, threads=torch.get_num_threads())
    for batch, lr in zip(torch_batches(workload), workload.lrs, strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(settings.get("bf16"))):
            loss = hand_step(model, optimizer, batch, lr, workload.optim["clip_norm"])
        gate.step_done(loss.item)


if __name__ == "__main__":
    main()
