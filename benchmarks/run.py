"""Runs the benchmarks and keeps what they print.

    python -m benchmarks.run [NAME ...] [--quick] [--table-only]

Each is a script that prints JSON; ``results/<name>.json`` holds that with machine, versions, commit, date and command beside
it, and ``README.md`` is the table of all results; docs/kvstore.md has one of them too. ``--quick`` takes a tenth of the
repeats: to see that they run, not to measure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.kvstore import convergence_table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PACKAGES = ("torch", "numpy", "safetensors", "msgspec", "rich", "click", "psutil", "plotly", "xxhash")
CONVENTIONS = (
    "Contestants alternate in one run. Ratios are medians over pairs of neighbouring blocks, intervals are of the median, "
    "from order statistics at the stated confidence. Seconds unless a name says otherwise. On a shared machine read the CPU "
    "ratios: they hardly feel what else runs."
)

Row = tuple[str, str, str]  # what, value, target


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A script beside this one, how to run it shortly, what it measures, and its lines of the table."""

    name: str
    title: str
    script: str = ""  # where it is not of the benchmark's name
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    text: str
    rows: Callable[[dict[str, Any]], Iterator[Row]]


def _ratio(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    return f"{found['ratio']:.3f} ({low:.3f} to {high:.3f}, {found['pairs']} pairs)"


def _step_time(result: dict[str, Any]) -> Iterator[Row]:
    for key, what, target in (
        ("one_process", "hand-written loop, 1 process", "≤ 1.02"),
        ("two_processes", "DDP, 2 processes", "≤ 1.02"),
        ("two_processes_sharded", "FSDP2, 2 processes, state cut over both", "≤ 1.03"),
    ):
        if key not in result:
            continue
        part = result[key]
        yield f"Trainer / {what}: wall", _ratio(part["wall"]), target
        yield f"Trainer / {what}: CPU time", _ratio(part["cpu"]), target
        yield f"largest loss difference to {what}", f"{part['largest_relative_loss_difference']:.1e}", ""
    host = result["host_time_per_step"]
    yield (
        "host time of a step outside model code",
        f"{host['cpu_us']['median']:.0f} µs of CPU, {100 * host['cpu_share_of_step']:.2f} % of this step's; "
        f"wall {host['wall_us']['median']:.0f} µs",
        "",
    )


def _rivals(result: dict[str, Any]) -> Iterator[Row]:
    for size, parts in result["sizes"].items():
        for part, target in (("same", "≥ 1.0"), ("default", "≥ 2 with native bf16")):
            if part not in parts:
                continue
            for name, row in parts[part]["contestants"].items():
                if "time_over_baseline" in row:
                    wall, cpu = _ratio(row["time_over_baseline"]), f"{row['cpu_over_baseline']['ratio']:.3f}"
                    yield f"{size}, {part}: {name} / unisono", f"{wall}; CPU {cpu}", ""
            best = parts[part]["best_rival_by_wall"]
            yield f"**{size}, {part}: best rival ({best['name']}) / unisono**", _ratio(best), target
        for name, row in parts.get("launcher", {}).get("contestants", {}).items():
            if "time_over_baseline" in row:
                wall, cpu = _ratio(row["time_over_baseline"]), f"{row['cpu_over_baseline']['ratio']:.3f}"
                yield f"{size}: plain script with {name} / without", f"{wall}; CPU {cpu}", ""


def _not_run(result: dict[str, Any], prefix: str = "") -> Iterator[Row]:
    for name, why in result["not_run"].items():
        yield f"{prefix}{name}", f"did not run: {why.replace('|', '/')}", ""


def _parallel_axes(result: dict[str, Any]) -> Iterator[Row]:
    for name, row in result["axes"].items():
        yield f"{name}: Trainer / {row['what']}: wall", _ratio(row["wall"]), "≤ 1.03"
        yield f"{name}: CPU time", _ratio(row["cpu"]), "≤ 1.03"
        yield f"{name}: largest loss difference", f"{row['largest_relative_loss_difference']:.1e}", "≤ 1e-4"
        yield f"{name}: largest part of the parameters on a rank", f"{row['held_frac']:.3f}", ""
    yield from _not_run(result)


def _parallel_start(result: dict[str, Any]) -> Iterator[Row]:
    for name, row in result["axes"].items():
        seconds = f"{row['trainer_s']['median']:.2f} s against {row['hand_s']['median']:.2f} s"
        yield f"{name}: Trainer / {row['what']}", f"{_ratio(row['over_hand'])}; {seconds}", ""
    yield from _not_run(result)


def _mib(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _parallel_memory(result: dict[str, Any]) -> Iterator[Row]:
    for name, row in result["contestants"].items():
        ours = name.startswith("unisono")
        state, apart = max(row["state_bytes"]), max(row["state_minus_expected_bytes"], key=abs)
        value = f"{_mib(state)}, {apart:+,} bytes from what the plan says"
        yield f"{name}: parameters and optimizer state", value, "+0 bytes" if ours else ""
        rounds = " to ".join(_mib(f(row["peaks_bytes"])) for f in (min, max))
        yield f"{name}: peak of a step", f"{_mib(row['peak_bytes'])} ({rounds}, {len(row['peaks_bytes'])} rounds)", ""
        for key, value in row.items():
            if key.startswith("peak_over_"):
                yield f"**{name} / {key.removeprefix('peak_over_')}: peak**", f"{value:.3f}", "≤ 1.05"
    yield from _not_run(result)


def _parallel_recompute(result: dict[str, Any]) -> Iterator[Row]:
    for name, row in result["kinds"].items():
        kept = f"{_mib(row['kept_bytes'])}, {row['kept_bytes_over_none']:.3f} of none"
        yield f"{name}: kept for the backward pass", kept, ""
        peak = f"{_mib(row['peak_bytes'])}, {row['peak_bytes_over_none']:.3f} of none"
        yield f"{name}: peak of a step above its state", peak, ""
        if name != "none":
            yield f"{name}: step time / none", _ratio(row["over_none"]), ""


def _parallel_compilations(result: dict[str, Any]) -> Iterator[Row]:
    for name, row in result["rows"].items():
        value = f"{row['first_step']} in the first step, {row['rest_of_first_epoch']} in the rest of the first epoch, "
        yield name, value + f"{row['after_first_epoch']} in {row['steps']} steps after it", "0 after it"


def _footprint(result: dict[str, Any]) -> Iterator[Row]:
    targets = {"help": "≤ 0.2 s"}
    for name, row in result["start"].items():
        wall, cpu = row["wall_s"]["median"], row["cpu_s"]["median"]
        yield f"{name.replace('_', ' ')}, whole process", f"{wall:.3f} s, CPU {cpu:.3f} s", targets.get(name, "")
    if "install" in result:
        install = result["install"]
        largest = ", ".join(f"{k} {v / 2**20:.0f}" for k, v in list(install["largest_parts_bytes"].items())[:4])
        yield "install beyond torch", f"{install['added_bytes'] / 2**20:.0f} MiB ({largest})", ""
        yield "  of it unisono itself", f"{install['unisono_bytes'] / 2**20:.1f} MiB", ""
        yield "  torch, for comparison", f"{install['torch_bytes'] / 2**20:.0f} MiB", ""
    if "demo" in result:
        demo = result["demo"]
        yield "demo, first start ever", f"{demo['first_s']:.0f} s", ""
        yield "demo, data already prepared", f"{demo['prepared_data_s']:.0f} s", ""
        yield "demo, started again after its end", f"{demo['finished_run_again_s']:.1f} s", ""


def _events(result: dict[str, Any]) -> Iterator[Row]:
    for name, row in result["results"].items():
        if "cpu_us" in row:
            rate = f"{row['events_per_s']:,} events/s, {row['cpu_us']:.0f} µs CPU of the training thread each"
            yield name, rate, ""
        else:
            yield name, f"{row['events_per_cpu_s']:,} events per CPU second", ""


def _order(result: dict[str, Any]) -> Iterator[Row]:
    for name, rates in result.items():
        if isinstance(rates, dict):
            yield name, ", ".join(f"{size}: {rate:g}" for size, rate in rates.items()) + " million positions/s", ""


def _checkpoint(result: dict[str, Any]) -> Iterator[Row]:
    for name, row in result["kinds"].items():
        over = row["extra_over_dcp_sync"]
        low, high = row["interval_over_dcp_sync"]
        note = f"{row['extra_s']:.3f} s, {over:.3f} of DCP's save ({low:.3f} to {high:.3f}, {row['windows']} windows)"
        yield f"extra wall time until committed: {name}", note, "≤ 0.1" if name == "async" else ""
    yield "bytes written / state bytes", f"{result['written_over_state_bytes']:.4f}", ""


def _precision(result: dict[str, Any]) -> Iterator[Row]:
    for name, losses in result["held_out_loss"].items():
        yield f"held-out loss, {name}, one per seed", ", ".join(f"{loss:.3f}" for loss in losses), ""
    apart = result["bf16_minus_fp32"]
    yield "bf16 minus fp32, same seed", f"mean {apart['mean']:+.4f}, largest {apart['largest']:+.4f}", "within noise"
    yield "standard deviation between seeds, fp32", f"{result['between_seeds']:.4f}", ""


def _contest(
    outcome: dict[str, Any], rate: str, unit: str, prefix: str = "", targets: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """A line per contestant of ``benchmarks.data.contest``, and one per contestant that did not run."""
    for name, row in outcome["contestants"].items():
        value = f"{row[rate]:,} {unit}"
        if "time_over_baseline" in row:
            found = row["time_over_baseline"]
            low, high = found["interval"]
            value += (
                f"; {1 / found['ratio']:.2f} ({1 / high:.2f} to {1 / low:.2f}) times the speed of {outcome['baseline']}"
            )
        if "cpu_over_baseline" in row:
            value += f", {row['cpu_over_baseline']['ratio']:.2f} times its CPU time"
        if row.get("unlike"):
            value += f"; not like the others in {', '.join(row['unlike'])}"
        if not row.get("same_records", True):
            value += "; not the same records"
        yield f"{prefix}{name}", value, (targets or {}).get(name, "")
        for other, found in row.get("speed_over", {}).items():
            over = f"{name} / {other}"
            yield f"**{prefix}{over}**", _ratio(found), (targets or {}).get(over, "")
    yield from _not_run(outcome, prefix)


def _data_records(result: dict[str, Any]) -> Iterator[Row]:
    for table, outcome in result.get("tables", {}).items():
        targets = {"unisono": "≥ 0.8 of limit", "unisono always": "≥ 0.8 of limit crc"}
        yield from _contest(outcome, "records_per_s", "records/s", f"{table}: ", targets)
    if "open" in result:
        found = result["open"]
        for name, row in found["contestants"].items():
            value = f"{row['fresh_ms']:,} ms in a fresh process, {row['again_ms']:,} ms again"
            yield f"open {found['records']:,} records: {name}", value, "≤ 50 ms" if name == "unisono" else ""
        for name, why in found["not_run"].items():
            yield f"open {found['records']:,} records: {name}", f"did not run: {why}", ""


def _data_images(result: dict[str, Any]) -> Iterator[Row]:
    least = {"untouched": 1.1, "tiles": 1.5, "packed": 2.1, "cached": 3.3}
    targets = {f"unisono {kind} opencv": f"≥ {times} times the best rival" for kind, times in least.items()}
    yield from _contest(result, "images_per_s", "images/s", targets=targets)


def _data_tokens(result: dict[str, Any]) -> Iterator[Row]:
    targets = {
        "unisono windows ignore / floor rows": "≥ 0.6",
        "unisono offsets ignore / floor offsets": "≥ 0.6",
        "unisono windows ignore / torch 0": "≥ 3",
        "unisono loader ignore 0 / torch 0": "≥ 3",
    }
    yield from _contest(result, "million_tokens_per_s", "million tokens/s", targets=targets)
    packing = result["packing"]
    for name, waste, cut in (
        ("best fit", packing["waste_frac"], packing["cut_documents"]),
        ("side by side", packing["stream_waste_frac"], packing["stream_cut_documents"]),
    ):
        of = packing["documents"]
        yield f"slots whose target does not count, {name}", f"{waste:.4f}; {cut:,} of {of:,} documents cut", ""


def _data_order(result: dict[str, Any]) -> Iterator[Row]:
    for name, row in result["mixing"]["contestants"].items():
        yield f"shards in a batch of 64, of 20: {name}", f"{row['shards_per_batch']}", ""
    for name, worlds in result["resume"]["contestants"].items():
        value = ", ".join(f"{world}: {row['repeated']} / {row['lost']}" for world, row in worlds.items())
        yield f"repeated / lost after a resume on other ranks: {name}", value, "0 / 0" if name == "unisono" else ""
    for name, kinds in result["damage"]["contestants"].items():
        value = f"one bit: {kinds['bit']['verdict']}; cut short: {kinds['cut']['verdict']}"
        yield f"damage: {name}", value, "never silent" if name.startswith("unisono") else ""
    for part in ("mixing", "resume"):
        for name, why in result[part]["not_run"].items():
            yield f"{part}: {name}", f"did not run: {why}", ""


def _data_loader(result: dict[str, Any]) -> Iterator[Row]:
    yield from _contest(result["overhead"], "us_per_batch", "µs per batch", "overhead: ")
    for name, row in result["first"]["contestants"].items():
        yield f"first batch: {name}", f"{row['first_ms']:,} ms", ""
    for name, row in result["memory"]["contestants"].items():
        added = (row["after_bytes"] - row["before_bytes"]) / 2**20
        yield f"memory added, 10^6 objects: {name}", f"{added:,.0f} MiB to {row['before_bytes'] / 2**20:,.0f}", ""
    for name, row in result["tuning"]["contestants"].items():
        value = f"{row['first_3_s']:,.0f} samples/s in the first three seconds, {row['last_3_s']:,.0f} in the last"
        yield f"tuning, samples that are {name}", value, ""


_SPEEDS = {
    "dist_sync_shm than mxnet dist_sync": "≥ 5 at 100 MB, 2 workers, 1 server",
    "all_reduce than dist_sync_shm": "≤ 1.05",
    "dist_async than mxnet dist_async": "≥ 2",
    "dist_async_shm than mxnet dist_async": "≥ 3",
}


def _kvstore_pushpull(result: dict[str, Any]) -> Iterator[Row]:
    for layout, found in result["layouts"].items():
        workers, servers = layout.split("x")
        for size, row in found["sizes"].items():
            prefix = f"{workers} workers, {servers} servers, {size}"
            times = ", ".join(f"{name} {1e3 * each['median']:,.2f}" for name, each in row["seconds"].items())
            yield f"{prefix}: ms", times, ""
            for names, each in row["times_faster"].items():
                yield f"{prefix}: times faster is {names}", _ratio(each), _SPEEDS.get(names, "")
        yield f"{workers} workers, {servers} servers: compression auto", found.get("auto", ""), ""
    yield from _not_run(result)


def _kvstore_step(result: dict[str, Any]) -> Iterator[Row]:
    for name, row in result["models"].items():
        yield f"{name}: bucketed all-reduce / DDP: wall", _ratio(row["wall"]), "≤ 1.02"
        yield f"{name}: CPU time", _ratio(row["cpu"]), "≤ 1.02"
        yield f"{name}: largest loss difference", f"{row['relative_loss_difference']:.1e}", "≤ 1e-4"


def _kvstore_links(result: dict[str, Any]) -> Iterator[Row]:
    for rate, found in result["rates"].items():
        for name, row in found["ways"].items():
            sent = f"{row['sent_bytes'] / 1e6:,.3f} MB sent, {row['theory_bytes'] / 1e6:,.3f} in theory"
            value = f"{1e3 * row['step_s']['median']:,.0f} ms, {_ratio(row['over_none'])} of none; {sent}"
            yield f"{rate}: {name}", value, ""
        yield f"{rate}: auto", found["auto"]["reason"], ""
    yield from _not_run(result)


def _kvstore_convergence(result: dict[str, Any]) -> Iterator[Row]:
    for name, model in result["models"].items():
        for way, row in model["ways"].items():
            value = f"{convergence_table.loss(row)}; beside plain sums {convergence_table.apart(row)}"
            yield f"{name}: {way} ({row['optimizer']}, {row['lr']:g})", value, f"≤ {row['band']:+.3f}"


def _kvstore_faults(result: dict[str, Any]) -> Iterator[Row]:
    for killed, times in result["killed"].items():
        for what, found in times.items():
            low, high = found["interval"]
            value = f"{found['median']:.2f} s ({low:.2f} to {high:.2f}, {found['values']} times)"
            yield f"{killed.replace('_', ' ')}: until {what}", value, ""


BENCHMARKS = (
    Benchmark(
        name="step_time",
        title="Step time against a hand-written loop",
        quick=("--blocks", "6"),
        text="The demo's GPT trained by `Trainer` and by a bare PyTorch loop (fused AdamW, `clip_grad_norm_`, chunked loss) in "
        "alternating blocks of one process, and beside DDP in two. The floor is 1: the loop logs, guards and saves nothing and "
        "finds its batches in memory. Host time is the same difference with a model of 38 tiny parameters and no arithmetic.",
        rows=_step_time,
    ),
    Benchmark(
        name="parallel_axes",
        script="parallel.axes",
        title="Each axis of a plan against torch's primitives by hand",
        quick=("--blocks", "3"),
        text="A GPT 512 wide on two processes of one thread, fp32, both sides in the same processes in turns. The floor is 1 "
        "where both do the same: the hand-written side logs, guards and saves nothing and finds its batches in memory.",
        rows=_parallel_axes,
    ),
    Benchmark(
        name="parallel_start",
        script="parallel.start",
        title="Start of a job on two processes",
        quick=("--rounds", "1"),
        text="From the start of the processes, without a launcher, to the end of their first step. The hand-written script reads "
        "batches and weights from a file; ours reads configuration and prepared data.",
        rows=_parallel_start,
    ),
    Benchmark(
        name="parallel_memory",
        script="parallel.memory",
        title="Memory of a rank where the state is cut",
        quick=("--steps", "3", "--rounds", "1"),
        text="Tensor bytes of one of two ranks by ZeRO stage, from torch's allocator; the larger of the two ranks. The number "
        "is the stage; Accelerate's 2 keeps parameters gathered after the forward pass.",
        rows=_parallel_memory,
    ),
    Benchmark(
        name="parallel_recompute",
        script="parallel.recompute",
        title="What recompute trades",
        quick=("--blocks", "2"),
        text="One process, the GPT of the axes; losses of all three are equal bit for bit.",
        rows=_parallel_recompute,
    ),
    Benchmark(
        name="parallel_compilations",
        script="parallel.compilations",
        title="Compilations after warm-up",
        quick=("--epochs", "2"),
        text="Graphs that torch.compile makes, with accumulation and epochs whose last step is short.",
        rows=_parallel_compilations,
    ),
    Benchmark(
        name="rivals",
        title="The same GPT under other frameworks",
        arguments=("--sizes", "demo", "--rounds", "21", "--steps", "4"),
        quick=("--rounds", "3"),
        text="Every contestant computes the same losses from the same batches, ready in memory for all but unisono, which "
        "reads its data. Ratios are the rival's time over ours, so above 1 means that we are faster. `same`: fp32, "
        "fused kernel and threads; ours as its launcher starts it, theirs as theirs do. `demo` is the demo's GPT, 128 wide. "
        "`default`: nothing set; ours as `unisono train` runs it, with console, "
        "trackers and checkpoints. The launcher's lines are the plain script with one thing more, below 1 where it helps. The "
        "floor of `same` is the plain script: a framework cannot do less arithmetic. The launcher "
        "sets a short spin of waiting threads only where others use the host, which costs time where nobody does.",
        rows=_rivals,
    ),
    Benchmark(
        name="rivals_wide",
        script="rivals",
        title="The same GPT, 768 wide",
        arguments=("--sizes", "wide", "--parts", "same,default", "--rounds", "9"),
        quick=("--rounds", "3"),
        text="As above, where matrix products decide.",
        rows=_rivals,
    ),
    Benchmark(
        name="rivals_wider",
        script="rivals",
        title="The same GPT, 1024 wide",
        arguments=("--sizes", "wider", "--parts", "default", "--rounds", "7"),
        quick=("--rounds", "3"),
        text="Defaults only, as above: how the advantage of bf16 grows with the share of matrix products.",
        rows=_rivals,
    ),
    Benchmark(
        name="precision",
        title="bf16 beside fp32: the curve",
        quick=("--seeds", "2", "--steps", "30"),
        text="Held-out loss of the demo after the same steps. What bf16 changes should be less than what another seed changes.",
        rows=_precision,
    ),
    Benchmark(
        name="checkpoint_stall",
        title="Stall of a save",
        quick=("--rounds", "2"),
        text="Extra wall time of a training window because of a save, until it is durable, beside torch.distributed.checkpoint "
        "on the same state. The floor is 0; bytes cannot go below the state's own.",
        rows=_checkpoint,
    ),
    Benchmark(
        name="events",
        title="Events",
        quick=("--events", "500"),
        text="Step events through the log with each view attached. The floor is the file alone: encoding and one write.",
        rows=_events,
    ),
    Benchmark(
        name="data_records",
        script="data.records",
        title="Records: formats of loaders",
        quick=("--rounds", "1"),
        text="The same payloads in every format, read in order and at random; a contestant that could not run says why. "
        "Speeds are of the median block. Opening is that of a RecordIO file of ten million records.",
        rows=_data_records,
    ),
    Benchmark(
        name="data_images",
        script="data.images",
        title="Images to training batches",
        quick=("--rounds", "1", "--steps", "8", "--photos", "640"),
        text="JPEGs of 500x375 to RandomResizedCrop(224), flip and normalised float32 batches of 64 with two workers each. "
        "Crops and flips of all were measured on their output and agree, or the line says so. `tiles` are lossless restart "
        "markers, `packed` is re-encoded at a short side of 256, `cached` decoded in memory; the last word is what resizes.",
        rows=_data_images,
    ),
    Benchmark(
        name="data_tokens",
        script="data.tokens",
        title="Tokens to training batches",
        quick=("--rounds", "1", "--steps", "20"),
        text="Batches of 16 x 1,024 of 50 million uint16 tokens; the number is that of workers. The floor is one gather and one "
        "conversion. `mask` adds weights, positions and documents, which the others do not give.",
        rows=_data_tokens,
    ),
    Benchmark(
        name="data_order",
        script="data.order",
        title="Mixing, resume, damage",
        text="What loaders do with order and with damaged files; no times. Resume is by world size, after 37 of 156 steps on 2x4 "
        "ranks. unisono's global batch stays; the others keep 8 samples a rank.",
        rows=_data_order,
    ),
    Benchmark(
        name="data_loader",
        script="data.loader",
        title="The loader itself",
        quick=("--rounds", "1", "--steps", "100", "--tuning-s", "12"),
        text="Batches of 64 of a data set that does nothing, so that only the loader is left; its first batch; memory with 8 "
        "workers; what tuning gains when nothing is set.",
        rows=_data_loader,
    ),
    Benchmark(
        name="kvstore_pushpull",
        script="kvstore.pushpull",
        title="Push and pull beside MXNet",
        quick=("--rounds", "1", "--repeats", "2", "--layouts", "2x1", "--sizes", "1KB,10MB"),
        text="Workers and servers on one host, one thread each; every sum of ours was checked. `all_reduce` is torch's on gloo. "
        "`dist_sync` of ours has no servers. The limits are a memcpy and as many bytes through a bare socket, there and back.",
        rows=_kvstore_pushpull,
    ),
    Benchmark(
        name="kvstore_step",
        script="kvstore.step",
        title="A step beside DistributedDataParallel",
        quick=("--blocks", "4", "--steps", "1"),
        text="Two processes of one thread on gloo; both sides in the same processes in turns, with the same weights and batches.",
        rows=_kvstore_step,
    ),
    Benchmark(
        name="kvstore_links",
        script="kvstore.links",
        title="Compression and local steps over slow links",
        quick=("--rounds", "1", "--steps", "1"),
        text="A GPT of 3.4 million parameters, two workers in network namespaces, links limited by a token bucket. Local steps "
        "are amortised over their round. `auto` chooses among bf16 and int8 only.",
        rows=_kvstore_links,
    ),
    Benchmark(
        name="kvstore_convergence",
        script="kvstore.convergence",
        title="What converges how",
        quick=("--seeds", "1", "--steps", "32"),
        text="Held-out loss of small models after the same samples, under every way to keep workers in step: the mean and the "
        "standard deviation over seeds, and the mean difference to plain sums of the same seed and optimizer. The target is two "
        "standard deviations between seeds of plain sums. docs/kvstore.md says what is equal.",
        rows=_kvstore_convergence,
    ),
    Benchmark(
        name="kvstore_faults",
        script="kvstore.faults",
        title="Killed workers and servers",
        quick=("--rounds", "1"),
        text="SIGKILL to what others wait for. A worker's lease ends two seconds after its last connection closed; a server "
        "comes back with its newest snapshot, and most of that time it imports torch.",
        rows=_kvstore_faults,
    ),
    Benchmark(
        name="order",
        title="Order of samples",
        text="Positions per second of the keyed order, which stores nothing, beside numpy's stored permutation.",
        rows=_order,
    ),
    Benchmark(
        name="footprint",
        title="Start-up, size, demo",
        quick=("--repeats", "3", "--no-demo"),
        text="Whole processes, so that nothing is hidden; `python` alone is the floor of the start-up times and `import torch` "
        "what the command line avoids. The size is what pip adds to an environment with torch.",
        rows=_footprint,
    ),
)


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in _read("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory = next((line.split()[1] for line in _read("/proc/meminfo").splitlines() if line.startswith("MemTotal")), "0")
    return {
        "device": "cpu",
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def versions() -> dict[str, str]:
    """Python's and those of the packages in use."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the sources, with -dirty if they differ from it."""
    head = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain", "../src"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return (head.stdout.strip() or "unknown") + ("-dirty" if changed.stdout.strip() else "")


def run_one(benchmark: Benchmark, *, quick: bool, more: tuple[str, ...]) -> None:
    """Run a script and write its record. Raises CalledProcessError."""
    arguments = [*benchmark.arguments, *(benchmark.quick if quick else ()), *more]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE.parent)])}
    before, begin = os.getloadavg()[0], datetime.now(UTC)
    command = [sys.executable, "-m", f"benchmarks.{benchmark.script or benchmark.name}", *arguments]
    answer = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    record = {
        "name": benchmark.name,
        "command": " ".join(["python", *command[1:]]),
        "date": begin.isoformat(timespec="seconds"),
        "wall_s": round((datetime.now(UTC) - begin).total_seconds(), 1),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "load_average": {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)},
        "conventions": CONVENTIONS,
        "result": json.loads(answer.stdout),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{benchmark.name}.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def table() -> str:
    """README.md from the records that exist."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `python -m benchmarks.run` from `results/*.json`; do not edit. Lines with a target are those the project "
        "set itself; where a number misses its target it stays here until it does not.",
        "",
        CONVENTIONS,
    ]
    for benchmark in BENCHMARKS:
        path = RESULTS / f"{benchmark.name}.json"
        lines += ["", f"## {benchmark.title}", "", benchmark.text, ""]
        if not path.exists():
            lines.append("Not run yet.")
            continue
        record = json.loads(path.read_text())
        where, load = record["machine"], record["load_average"]
        lines += ["| what | measured | target |", "|---|---|---|"]
        lines += [f"| {what} | {value} | {target} |" for what, value, target in benchmark.rows(record["result"])]
        lines += [
            "",
            f"`{record['command']}` on {record['date'][:10]}, commit `{record['commit']}`, {where['cpu']}, {where['cores']} "
            f"cores, torch {record['versions'].get('torch', '?')}, Python {record['versions']['python']}; load average "
            f"{load['before']} before and {load['after']} after.",
        ]
        if load["before"] > 1:
            lines += ["", "The host had other work meanwhile, so rates are low and intervals wide."]
        if "not_shown" in record["result"]:
            lines += ["", f"Not shown: {record['result']['not_shown']}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all if none is given")
    parser.add_argument("--quick", action="store_true", help="a tenth of the repeats")
    parser.add_argument("--more", action="append", default=[], help="an argument to hand on to the script")
    parser.add_argument("--table-only", action="store_true", help="write README.md from the results that are there")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(names))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(names)}")
    failed: list[str] = []
    for benchmark in BENCHMARKS:
        if arguments.table_only or (arguments.names and benchmark.name not in arguments.names):
            continue
        print(f"{benchmark.name} …", file=sys.stderr, flush=True)
        try:
            run_one(benchmark, quick=arguments.quick, more=tuple(arguments.more))
        except (subprocess.CalledProcessError, json.JSONDecodeError) as error:
            print(f"{benchmark.name}: {error}", file=sys.stderr)
            failed.append(benchmark.name)
    (HERE / "README.md").write_text(table())
    convergence_table.write()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
