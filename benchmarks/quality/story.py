"""From raw text to a tuned training, step by step: what each step changes of the held-out bits per byte.

    python -m benchmarks.quality.story [--seeds 3] [--steps 400] [--stdlib FOLDER ...]

The corpus is real: source files of the standard library of every Python beside this one, as a crawl finds the same files in
several releases, and their documentation: the docstrings of each file, and pydoc's topics. One of ``SHARE`` names is taken.

clean, dedup and split are ``unisono data`` commands, each on the output of the one before; the part ``test`` of the split is the
test set T. A small GPT is trained on what each step leaves, without what leaks into T (``unisono data leak``), the same number
of steps, and evaluated on T. Before that the usual way: rows of the raw corpus held out at random, of which those that leak from
the training rows, nearly all, are evaluated. Last, the same with the learning rate that ``unisono tune lr`` proposes.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from unisono.observe.events import events_path, number, read_events

SHARE = 6
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
SETTINGS = (
    "model.num_layers=2",
    "model.dim=64",
    "data.seq_len=256",
    "plan.global_batch=16",
    "plan.device=cpu",
    "plan.precision=fp32",
    "train.num_eval_samples=0",
    "checkpoint.every_steps=0",
    "observe.monitor_every_s=0",
    "observe.report=false",
)
WARMUP = "schedule.warmup_steps=50"  # without it, seeds of one set lie 0.3 to 0.6 bits apart after 400 steps
# limits of prose that source code does not keep
RECIPE = """\
[filter]
min_words = 30
min_mean_word_chars = 0
max_mean_word_chars = 30
max_symbol_ratio = 0.5
min_alphabetic_word_frac = 0.4
max_duplicate_line_frac = 0.4
max_duplicate_5gram_frac = 0.4

[mask]
kinds = ["secret", "email"]
"""


# --- corpus -----------------------------------------------------------------------------------------------------------


def documents(library: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of source files, pages of docstrings and topics of a standard library."""
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if LEFT_OUT & set(name.parts) or path.name == "topics.py" or not _is_taken(str(name)):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        yield str(name), text
        page = "\n\n".join(_docstrings(text))
        if page:
            yield f"{name}.txt", page
    spec = spec_from_file_location("topics", library / "pydoc_data" / "topics.py")
    if spec is not None and spec.loader is not None and (library / "pydoc_data" / "topics.py").exists():
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        for topic, text in sorted(module.topics.items()):
            if _is_taken(topic):
                yield f"topics/{topic}", text


def _is_taken(name: str) -> bool:
    return zlib.crc32(name.encode()) % SHARE == 0


def _docstrings(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text if isinstance(node, ast.Module) else f"{node.name}\n{text}"


def write_corpus(folder: Path, libraries: Sequence[Path]) -> Path:
    """corpus.jsonl with all documents in a random order."""
    rows = [
        {"name": name, "library": library.name, "text": text}
        for library in libraries
        for name, text in documents(library)
    ]
    random.Random(0).shuffle(rows)
    return _write_rows(folder / "corpus.jsonl", rows)


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- steps ------------------------------------------------------------------------------------------------------------


def unisono(*arguments: object, codes: Sequence[int] = (0,)) -> None:
    command = [sys.executable, "-m", "unisono", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in codes:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")


def prepared(folder: Path, libraries: Sequence[Path]) -> tuple[dict[str, Path], dict[str, Any]]:
    """Sets of rows by name, and facts of them."""
    corpus = write_corpus(folder, libraries)
    recipe = folder / "clean.toml"
    recipe.write_text(RECIPE)
    unisono("data", "clean", corpus, f"--recipe={recipe}", "--set=dedup.enabled=false", f"--out={folder / 'clean'}")
    cleaned = folder / "clean" / "data" / corpus.name
    unisono("data", "dedup", cleaned, f"--out={folder / 'unique'}")
    unique = folder / "unique" / "data" / corpus.name
    unisono("data", "split", unique, "--part=train=0.9", "--part=test=0.1", f"--out={folder / 'parts'}")
    train, test = (folder / "parts" / part / "data" / corpus.name for part in ("train", "test"))
    raw = _rows(corpus)
    naive = _write_rows(folder / "naive" / "train.jsonl", raw[len(raw) // 10 :])
    held_out = _write_rows(folder / "naive" / "held-out.jsonl", raw[: len(raw) // 10])
    unisono("data", "leak", naive, held_out, f"--out={folder / 'leaks-of-rows'}", codes=(0, 1))
    sets = {
        "at random": naive,
        "at random: rows that leak": _write_rows(
            folder / "leaking.jsonl", _leaking(folder / "leaks-of-rows", held_out)
        ),
        "raw": _apart(test, corpus, folder / "raw-apart", folder / "raw-apart.jsonl"),
        "clean": _apart(test, cleaned, folder / "clean-apart", folder / "clean-apart.jsonl"),
        "unique": train,
        "test": test,
    }
    size = {name: {"rows": len(_rows(path)), "mib": round(_text_bytes(path) / 2**20, 2)} for name, path in sets.items()}
    unisono("data", "leak", train, test, f"--out={folder / 'leaks'}", codes=(0, 1))
    leaks = len(_rows(folder / "leaks" / "pairs.jsonl"))
    facts = {"libraries": [library.name for library in libraries], "sets": size, "leaks_after_split": leaks}
    return sets, facts


def _apart(train: Path, rows: Path, out: Path, target: Path) -> Path:
    """Rows that do not leak from ``train``, as the file ``target``."""
    unisono("data", "leak", train, rows, f"--out={out}", codes=(0, 1))
    unisono("data", "convert", rows, target, f"--kept-rows={out}")
    return target


def _leaking(leaks: Path, rows: Path) -> list[dict[str, Any]]:
    """The rows that leak, by the pairs in the folder ``leaks``."""
    pairs = [json.loads(line) for line in (leaks / "pairs.jsonl").read_text().splitlines()]
    of_rows = _rows(rows)
    return [of_rows[pair["row"]] for pair in sorted(pairs, key=lambda pair: pair["row"])]


def _text_bytes(path: Path) -> int:
    return sum(len(row["text"].encode()) for row in _rows(path))


# --- trainings --------------------------------------------------------------------------------------------------------


def packed(path: Path) -> Path:
    """The rows as token shards, in a folder."""
    folder = path.with_name(f"{path.parent.name}-{path.stem}-tokens")
    if not folder.exists():
        folder.mkdir()
        unisono("data", "pack", path, folder / "texts.bin", "--text-column=text")
    return folder


def bits_per_byte(folder: Path, train: Path, held_out: Path, steps: int, seed: int, *more: str) -> float:
    run = folder / "runs" / f"{train.parent.name}-{train.stem}-{held_out.stem}-{seed}{'-'.join(('', *more))}"
    given = [f"data.train={packed(train)}", f"data.eval={packed(held_out)}", f"run.dir={run}", f"run.seed={seed}"]
    given += [f"train.steps={steps}", f"train.eval_every_steps={steps}", WARMUP, *SETTINGS, *more]
    unisono("train", *(f"--set={each}" for each in given))
    values = [number(event.get("eval/loss")) for event in read_events(events_path(run, 0)).events]
    return [value for value in values if value is not None][-1] / math.log(2)  # a token is a byte


def proposed_rate(folder: Path, train: Path) -> float:
    out = folder / "range"
    given = [f"data.train={packed(train)}", f"data.eval={packed(train)}", *SETTINGS]
    command = [
        sys.executable,
        "-m",
        "unisono",
        "tune",
        "lr",
        *(f"--set={each}" for each in given),
        f"--out={out}",
        "--json",
    ]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(json.loads(answer)["suggested_lr"])


def story(folder: Path, libraries: Sequence[Path], steps: int, seeds: int) -> dict[str, Any]:
    sets, facts = prepared(folder, libraries)
    print(json.dumps(facts), file=sys.stderr)
    rate = proposed_rate(folder, sets["unique"])
    pairs = {
        "rows at random, on those that leak": ("at random", "at random: rows that leak", ()),
        "raw": ("raw", "test", ()),
        "clean": ("clean", "test", ()),
        "dedup and split": ("unique", "test", ()),
        "tune lr": ("unique", "test", (f"optim.lr={rate!r}",)),
    }
    found: dict[str, Any] = {}
    for name, (train, held_out, more) in pairs.items():
        values = [bits_per_byte(folder, sets[train], sets[held_out], steps, seed, *more) for seed in range(seeds)]
        found[name] = {"bits_per_byte": values, "median": statistics.median(values)}
        print(f"{name}: {values}", file=sys.stderr)
    return {**facts, "steps": steps, "proposed_lr": rate, "trainings": found}


def siblings() -> list[Path]:
    """Standard libraries of the Pythons that lie beside this one, or this one's."""
    own = Path(sys.base_prefix)
    return sorted(path for path in own.parent.glob("*/lib/python3.*") if (path / "os.py").exists()) or [
        Path(ast.__file__).parent
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--stdlib", type=Path, nargs="*", help="standard libraries (default: of all Pythons beside this one)"
    )
    arguments = parser.parse_args()
    libraries = arguments.stdlib or siblings()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(story(Path(name), libraries, arguments.steps, arguments.seeds)))


if __name__ == "__main__":
    main()
