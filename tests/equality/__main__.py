"""``python -m tests.equality --before DIR --after DIR``: one line for each case, equal, DIFFERENT or FAILED; exit code 1 unless
all are equal."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path

from .cases import CASES, Case
from .side import CaseError, Results, Side

_SHOWN = 4


def main() -> int:
    options = _options()
    chosen = [case for case in CASES if any(fnmatch(case.name, pattern) for pattern in options.only or ["*"])]
    if not chosen:
        print(f"no case is called {' or '.join(options.only)}; there are {', '.join(case.name for case in CASES)}")
        return 2
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    work = Path(tempfile.mkdtemp(prefix="equality-", dir=options.work))
    began, compared, unequal = time.monotonic(), 0, 0
    without = frozenset(options.without)
    before, after = (
        Side(getattr(options, name), work, options.cache.absolute(), name=name, without=without)
        for name in ("before", "after")
    )
    try:
        with before, after, ThreadPoolExecutor(options.jobs) as pool:
            comparison = Comparison(before, after, options.cache, fresh=options.fresh)
            for lines in pool.map(comparison.lines, chosen):
                for verdict, name, words in lines:
                    compared += 1
                    unequal += verdict != "equal"
                    print(f"{verdict:<9} {name:<28} {words}", flush=True)
        wall = time.monotonic() - began
        print(
            f"{len(chosen)} cases, {compared} comparisons, {unequal} unequal, {wall:.0f} s; CPU: before {before.cpu_s:.0f} s, "
            f"after {after.cpu_s:.0f} s"
        )
    finally:
        if options.keep:
            print(f"working folders are in {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
    return 1 if unequal else 0


class Comparison:
    """Runs cases on both sides; those of ``before`` only where the cache does not have them."""

    def __init__(self, before: Side, after: Side, cache: Path, *, fresh: bool) -> None:
        self._before, self._after = before, after
        self._cache, self._fresh = cache, fresh
        self._cache.mkdir(parents=True, exist_ok=True)

    def lines(self, case: Case) -> list[tuple[str, str, str]]:
        """(verdict, name, words) of the case, of its second half after the other's first, and of mixed pairs."""
        try:
            expected, carried = self._expected(case)
        except CaseError as error:
            return [("FAILED", case.name, str(error))]
        lines = [_line(case.name, expected, lambda: self._after.run(case))]
        if case.carry:
            later = {name: value for name, value in expected.items() if not _of_stage_before(case.carry, name)}
            lines.append(_line(f"{case.name} carried over", later, lambda: self._after.resume(case, carried)))
        if case.wire:
            before, after = self._before, self._after
            lines.append(_mixed("wire, server before", expected, lambda: after.wire(case, server=before)))
            lines.append(_mixed("wire, server after", expected, lambda: before.wire(case, server=after)))
        return lines

    def _expected(self, case: Case) -> tuple[Results, Path]:
        """Results of the side before, and the folder with its first stages."""
        key = self._before.key(case)
        path = self._cache / f"{key}.json"
        folder = path.with_suffix("")
        if key is not None and path.exists() and not self._fresh:
            return json.loads(path.read_text()), folder
        own = (
            self._cache / f"tmp-{secrets.token_hex(4)}" if key is not None else self._before.work / f"{case.name}-kept"
        )
        results = self._before.run(case, carried=own if case.carry else None)
        if key is None:
            return results, own
        if case.carry:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                own.rename(folder)
            except OSError:  # another comparison was quicker
                shutil.rmtree(own, ignore_errors=True)
        written = path.with_suffix(f".{secrets.token_hex(4)}")
        written.write_text(json.dumps(results, indent=0))
        os.replace(written, path)
        return results, folder


def _of_stage_before(carry: int, name: str) -> bool:
    return any(name == f"stage {number} prints" for number in range(carry))


def _line(name: str, expected: Results, run: Callable[[], Results]) -> tuple[str, str, str]:
    try:
        began = time.monotonic()
        results = run()
    except CaseError as error:
        return "FAILED", name, str(error)
    different = list(differences(expected, results))
    if not different:
        return "equal", name, f"{len(expected)} values, {time.monotonic() - began:.1f} s"
    more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
    return "DIFFERENT", name, f"{len(different)} of {len(expected)}: {'; '.join(different[:_SHOWN])}{more}"


def _mixed(name: str, expected: Results, run: Callable[[], Results]) -> tuple[str, str, str]:
    """Two releases talk to each other, or one refuses the other by the version of its frames."""
    line = _line(name, expected, run)
    if line[0] == "FAILED" and "frame whose version" in line[2]:
        return "equal", name, "refused by the version of the frames"
    return line


def differences(before: Results, after: Results) -> Iterator[str]:
    """``name: this != that``, in the order of the first."""
    before, after = _comparable(before), _comparable(after)
    for name, value in before.items():
        if name not in after:
            yield f"{name} is missing"
        elif after[name] != value:
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(value, after[name], strict=False)))
            yield f"{name}: {_short(value, common)} != {_short(after[name], common)}"
    yield from (f"{name} is new" for name in after if name not in before)


def _comparable(results: Results) -> Results:
    """The results that both sides have: a setting of before said how long the text at the end of a run is, and the fields of a
    plan, in what a resume says of them, have other names in another order."""
    kept = {name: value for name, value in results.items() if not re.search(r"\bsample \d+ text$", name)}
    for name, value in kept.items():
        if name.endswith(" differences"):
            kept[name] = json.dumps(sorted(re.sub(r"\bplan\.[\w.]+", "plan", text) for text in json.loads(value)))
    return kept


def _short(text: str, common: int) -> str:
    """At most 60 characters, from shortly before the first that differs."""
    begin = max(0, common - 30) if len(text) > 60 else 0
    return f"{'...' if begin else ''}{text[begin : begin + 60]}{'...' if len(text) > begin + 60 else ''}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.equality", description=__doc__)
    parser.add_argument("--before", type=Path, required=True, metavar="DIR", help="checkout with its own .venv")
    parser.add_argument("--after", type=Path, required=True, metavar="DIR", help="the same")
    parser.add_argument("--only", action="append", metavar="NAME", help="this case or pattern; again for each")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cases at a time")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--fresh", action="store_true", help="run the side before again even where it is cached")
    parser.add_argument("--without", action="append", default=[], metavar="KEY", help="leave this setting out")
    parser.add_argument("--keep", action="store_true", help="leave the working folders, and say where they are")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where they are made")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unisono-equality"
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help=f"results kept; default {cache}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
