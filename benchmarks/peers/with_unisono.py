"""Worker: unisono's Trainer on its own data. Setting ``whole``: with console, trackers and checkpoints, as ``train`` does."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from benchmarks.peers.gate import Gate
from benchmarks.workload import run_config

from unisono.dist import JobSpec, join_world
from unisono.observe.console import Console
from unisono.observe.sinks.trackers import Trackers
from unisono.train.build import build_data, build_trainer
from unisono.train.setup import open_events, resolve_plan


def main() -> None:
    gate = Gate()
    settings = json.loads(sys.argv[1])
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    facts = json.loads((Path(settings["workload"]) / "workload.json").read_text())
    overrides = [*settings["set"], f"train.steps={len(facts['lrs'])}", f"run.dir={settings['folder']}"]
    if not settings["whole"]:
        overrides += ["checkpoint.every_steps=0"]
    config = run_config(overrides)
    world = join_world(JobSpec(), device_type="cpu", timeout_s=60)
    with ExitStack() as stack:
        events = stack.enter_context(open_events(Path(settings["folder"]), world))
        if settings["whole"]:
            console = stack.enter_context(Console(mode="plain"))
            events.subscribe(console, console.name)
            stack.enter_context(Trackers(events, config.observe.trackers, Path(settings["folder"])))
        data = build_data(config)
        trainer = build_trainer(
            config, data, resolve_plan(config.plan, world.job)[1], world=world, events=events, provenance={}
        )
        run = stack.enter_context(trainer)
        gate.open(versions={"torch": str(torch.__version__)}, threads=torch.get_num_threads(), plan=run.plan.to_json())
        for step in run:
            gate.step_done(step.stats[0].item)


if __name__ == "__main__":
    main()
