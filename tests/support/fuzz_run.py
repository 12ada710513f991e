"""Read mutations in a confined child and check what comes out.

    python tests/support/fuzz_run.py FORMAT|all FIRST_SEED [COUNT] [--keep FOLDER] [--record FILE]

counts what was read and refused, and prints every failure with its seed. ``--keep`` writes the mutated file of a failure into
a folder, which is made for it, and prints its path. ``--record`` adds the counts of each format to a JSON file
(``tests/data/mutations.json``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from fuzz import FORMATS, Format, copy, make, mutate
from untrusted import Confined, Outcome

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # several times quicker than a disk
MAX_GROWN_MIB = 300  # of resident memory, by a file of few KiB: batches of 64 MiB and their Python objects at most


@dataclass
class Counts:
    """Outcomes of mutations."""

    read: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    most_mib: float = 0.0


def check(case: Format, whole: Outcome, outcome: Outcome) -> str:
    """What is wrong with the outcome of a mutated file; empty if it is right rows or a good error."""
    if outcome.bad:
        return outcome.bad
    if outcome.grown_mib > MAX_GROWN_MIB:
        return f"it took {outcome.grown_mib} MiB"
    if outcome.rows is not None and case.rows == "same" and outcome.rows != whole.rows:
        return f"other rows came out: {len(outcome.rows)} in place of {len(whole.rows or ())}"
    if outcome.rows is not None and case.rows == "some" and not set(outcome.rows) <= set(whole.rows or ()):
        return "rows came out that the whole file does not have"
    return ""


def read_whole(name: str, folder: Path, child: Confined) -> Outcome:
    """Make the whole files of a format in ``folder / "whole"``, and read a copy of them."""
    make(name, folder / "whole")
    copy(folder / "whole", folder / "mutated")
    whole = child.read(FORMATS[name].reader, folder / "mutated" / FORMATS[name].file)
    assert whole.rows, whole
    return whole


def keep(name: str, seed: int, folder: Path, kept: Path) -> list[Path]:
    """Write the mutated files of ``folder``, compressed, into the folder ``kept``, as ``tests/data/crashes`` has them."""
    kept.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for target in FORMATS[name].mutated:
        # the reader may have moved, deleted or written files: the seed makes them again
        mutate(name, folder / "whole", folder / "mutated", seed)
        data = (folder / "mutated" / target).read_bytes()
        if data != (folder / "whole" / target).read_bytes():
            paths.append(kept / f"{name}-{seed}-{Path(target).name}.bin.z")
            paths[-1].write_bytes(zlib.compress(data, 9))
    return paths


def fuzz(name: str, folder: Path, seeds: Iterable[int], child: Confined) -> Counts:
    """Read the mutations of a format with these seeds. Raises AssertionError that names format and seed."""
    case, counts = FORMATS[name], Counts()
    whole = read_whole(name, folder, child)
    for seed in seeds:
        mutate(name, folder / "whole", folder / "mutated", seed)
        outcome = child.read(case.reader, folder / "mutated" / case.file)
        fault = check(case, whole, outcome)
        assert not fault, f"{name} {seed}: {fault} (python tests/support/fuzz_run.py {name} {seed})"
        counts.read += outcome.rows is not None
        counts.refused += outcome.rows is None
        counts.slowest_s = max(counts.slowest_s, outcome.seconds)
        counts.most_mib = max(counts.most_mib, outcome.grown_mib)
    return counts


def _main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[*FORMATS, "all"])
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="for each format")
    options = parser.parse_args()
    faults = 0
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    for name in FORMATS if options.name == "all" else [options.name]:
        case, counts, done, faults_before = FORMATS[name], Counts(), 0, faults
        with tempfile.TemporaryDirectory(dir=MEMORY) as root, Confined() as child:
            folder = Path(root)
            whole = read_whole(name, folder, child)
            begin = time.monotonic()
            for seed in range(options.first, options.first + options.count):
                if time.monotonic() - begin > options.seconds:
                    break
                mutate(name, folder / "whole", folder / "mutated", seed)
                outcome = child.read(case.reader, folder / "mutated" / case.file)
                done += 1
                counts.read += outcome.rows is not None
                counts.refused += bool(outcome.problems)
                counts.slowest_s = max(counts.slowest_s, outcome.seconds)
                counts.most_mib = max(counts.most_mib, outcome.grown_mib)
                if options.count == 1:
                    print(outcome)
                if fault := check(case, whole, outcome):
                    faults += 1
                    print(f"{name} {seed}: {fault[-600:]}", flush=True)
                    for path in keep(name, seed, folder, options.keep) if options.keep else ():
                        print(f"{name} {seed}: the mutated file is kept in {path}", flush=True)
        print(f"{name}: {done} mutations, {counts}", flush=True)
        if options.record:
            recorded = json.loads(options.record.read_text()) if options.record.exists() else {}
            recorded[name] = {"commit": commit, "first_seed": options.first, "mutations": done, **asdict(counts)}
            recorded[name] |= {"slowest_s": round(counts.slowest_s, 2), "failures": faults - faults_before}
            options.record.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(_main())
