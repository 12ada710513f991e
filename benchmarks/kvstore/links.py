"""A step of a small GPT over slow links: plain, with each codec, with local steps; and what ``auto`` says. Prints JSON.

    python -m benchmarks.kvstore.links [--rates 100mbit,1gbit,10gbit] [--rounds 5] [--steps 3] [--local-steps 16]

Two processes of one thread in network namespaces and process tables of their own, so that they share no memory, joined by
interfaces whose rate ``tc tbf`` limits in both directions: on Linux, as root. All ways take turns in the same two processes;
a ratio is of neighbouring blocks. Bytes are what the interface counted, headers and acknowledgements included, and what the
gradients' own bytes come to in theory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.paired import ratio, spread

from unisono.launch.resources import TUNED_ALLOCATOR

CODECS = ("fp16", "bf16", "int8", "2bit", "1bit", "topk:0.01", "powersgd:2")
_NETWORK = "10.77.0"
_APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_BURST_S = 0.002  # what may leave at once, as time at the link's rate
_LEAST_BURST_BYTES = 128 << 10  # segments leave the host in pieces of 64 KiB


def rank_of(rounds: int, steps: int, local_steps: int, interface: str) -> dict[str, Any]:
    """This rank's part: seconds and bytes of a step by way, theory, and the choice of ``auto``."""
    import torch
    from benchmarks.kvstore.models import build

    from unisono.dist import job_from_environ, join_world
    from unisono.kvstore import LocalSGD, LocalSGDConfig
    from unisono.kvstore.allreduce.buckets import BucketedAllReduce
    from unisono.kvstore.compression import PowerSGD, auto_codec, find_codec

    torch.set_num_threads(1)
    world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=300)
    totals = torch.zeros(1)
    theory: dict[str, float] = {}
    ways: dict[str, tuple[Callable[[], object], int]] = {}  # a step, how many of them are a block

    def synced(name: str) -> Callable[[], object]:
        model, loss_of = build("gpt", world.rank)
        codec = None if name == "none" else find_codec(name)
        sync = BucketedAllReduce(dict(model.named_parameters()), world, codec=codec)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)

        def step() -> None:
            sync.zero_grad()
            loss = loss_of(model)
            sync.prepare_last_backward()
            loss.backward()
            sync.wait(totals)
            sync.commit(True)
            optimizer.step()
            sent = sync.stats()
            coded = sum(each["bytes_out"] for each in sent.values())
            whole = sum(p.nbytes for key, p in model.named_parameters() if key not in sent)
            # two workers: a ring sends everything once, and so does a gather; PowerSGD's factors are summed
            theory[name] = coded + (whole if codec is None or isinstance(codec, PowerSGD) else 0)

        return step

    def alone() -> Callable[[], object]:
        model, loss_of = build("gpt", world.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        parameters = {name: each.detach() for name, each in model.named_parameters()}
        local = LocalSGD(parameters, world, LocalSGDConfig(local_steps=local_steps))
        done = 0

        def step() -> None:
            nonlocal done
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            local.after_step(done)
            done += 1

        theory[diloco] = sum(each.nbytes for each in parameters.values()) / local_steps
        return step

    diloco = f"DiLoCo, every {local_steps} steps"
    for name in ("none", *CODECS):
        ways[name] = synced(name), steps
    ways[diloco] = alone(), local_steps
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    sent_bytes: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        shift = number % len(ways)
        for name in list(ways)[shift:] + list(ways)[:shift]:
            step, count = ways[name]
            if number < 0 and name != diloco:
                count = 1  # DiLoCo's boundaries stay where blocks end
            world.barrier()
            before, begin_s = int(counter.read_text()), time.perf_counter()
            for _ in range(count):
                step()
            if number >= 0:
                seconds[name].append((time.perf_counter() - begin_s) / count)
                sent_bytes[name].append((int(counter.read_text()) - before) / count)
    choice = auto_codec(world, torch.device("cpu"))
    world.barrier()
    world.close()
    return {
        "seconds": seconds,
        "sent_bytes": sent_bytes,
        "theory_bytes": theory,
        "auto": {"codec": choice.codec, "reason": choice.reason},
    }


@contextmanager
def two_hosts() -> Generator[list[tuple[str, str]]]:
    """(namespace, interface) twice, with ``10.77.0.1`` and ``.2`` between them. Raises CalledProcessError."""
    hosts = [(f"unisono-{os.getpid()}-{side}", f"uni{side}") for side in (1, 2)]
    try:
        for namespace, _ in hosts:
            _run("ip", "netns", "add", namespace)
        (one, left), (other, right) = hosts
        _run("ip", "-n", one, "link", "add", left, "type", "veth", "peer", "name", right, "netns", other)
        for side, (namespace, interface) in enumerate(hosts, start=1):
            _run("ip", "-n", namespace, "addr", "add", f"{_NETWORK}.{side}/24", "dev", interface)
            _run("ip", "-n", namespace, "link", "set", interface, "up")
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        yield hosts
    finally:
        for namespace, _ in hosts:
            subprocess.run(["ip", "netns", "del", namespace], stderr=subprocess.DEVNULL, check=False)


def limit(hosts: list[tuple[str, str]], rate: str) -> None:
    """Let no more than ``rate``, such as 100mbit, leave each of them."""
    bits = float(rate.removesuffix("bit")[:-1]) * {"m": 1e6, "g": 1e9}[rate.removesuffix("bit")[-1]]
    burst = max(_LEAST_BURST_BYTES, int(bits / 8 * _BURST_S))
    for namespace, interface in hosts:
        tail = ["root", "tbf", "rate", rate, "burst", str(burst), "latency", "100ms"]
        _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, *tail)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measured(hosts: list[tuple[str, str]], counts: list[str]) -> list[dict[str, Any]]:
    """What both ranks found. Raises RuntimeError with what one said that failed."""
    numbers = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 29517, "OMP_NUM_THREADS": 1}
    given = {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": f"{_NETWORK}.1"}
    script = [sys.executable, "-m", "benchmarks.kvstore.links", *counts, "--interface"]
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", namespace, *_APART, *script, interface],
            env=os.environ | TUNED_ALLOCATOR | given | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": interface},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (namespace, interface) in enumerate(hosts)
    ]
    try:
        outputs = [process.communicate(timeout=1200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, err) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(err[-2000:])
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="100mbit,1gbit,10gbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of a block")
    parser.add_argument("--local-steps", type=int, default=16)
    parser.add_argument("--interface", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.interface:
        found = rank_of(arguments.rounds, arguments.steps, arguments.local_steps, arguments.interface)
        print(json.dumps(found), flush=True)
        return
    counts = [f"--rounds={arguments.rounds}", f"--steps={arguments.steps}", f"--local-steps={arguments.local_steps}"]
    rates: dict[str, Any] = {}
    not_run: dict[str, str] = {}
    try:
        with two_hosts() as hosts:
            for rate in arguments.rates.split(","):
                print(f"{rate} …", file=sys.stderr, flush=True)
                limit(hosts, rate)
                rates[rate] = _rows(measured(hosts, counts))
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        not_run["links"] = str(error).strip().splitlines()[-1]
    print(json.dumps({"rates": rates, "not_run": not_run}, indent=1))


def _rows(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    slowest = {
        name: [max(each) for each in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
        for name in ranks[0]["seconds"]
    }
    ways = {
        name: {
            "step_s": spread(seconds),
            "over_none": ratio(seconds, slowest["none"]),
            "sent_bytes": spread(ranks[0]["sent_bytes"][name])["median"],
            "theory_bytes": ranks[0]["theory_bytes"][name],
        }
        for name, seconds in slowest.items()
    }
    return {"ways": ways, "auto": ranks[0]["auto"]}


if __name__ == "__main__":
    main()
