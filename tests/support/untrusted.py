"""Reads files that mean harm in a child process with a limit of memory, and of time for each file.

    with Confined() as child:
        outcome = child.read("csv", path)

An outcome has ``rows`` (a digest of each), or ``problems`` (of a UnisonoError), or ``bad``: another exception, a crash, or no
answer in time. The child lives on; after a crash the next read starts another.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

MEMORY_MIB = 512  # of address space that reading one file may take, besides what the imports have


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What reading a file came to."""

    rows: tuple[str, ...] | None = None
    problems: tuple[tuple[str, str, str, str], ...] = ()
    bad: str = ""
    seconds: float = 0.0
    grown_mib: float = 0.0  # peak of resident memory during the read, less what there was before

    @property
    def text(self) -> str:
        """The first parts of all problems."""
        return "\n".join(" | ".join(parts) for parts in self.problems)


@dataclass
class Confined:
    """The child. ``time_s`` is the limit for one file."""

    time_s: float = 20.0
    memory_mib: int = MEMORY_MIB
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def read(self, kind: str, path: Path, **options: Any) -> Outcome:
        """Read ``path`` with the reader ``kind``, one of ``READERS``."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        begin = time.monotonic()
        process.stdin.write(json.dumps([kind, str(path), options]).encode() + b"\n")
        process.stdin.flush()
        line = _line(process.stdout.fileno(), begin + self.time_s)
        if not line.endswith(b"\n"):
            late = time.monotonic() - begin >= self.time_s
            process.kill()
            code = process.wait()
            self._end()
            return Outcome(bad=f"no answer in {self.time_s:g} s" if late else f"the process ended with {code}")
        answer = json.loads(line)
        return Outcome(
            rows=None if answer["rows"] is None else tuple(answer["rows"]),
            problems=tuple(map(tuple, answer["problems"])),
            bad=answer["bad"],
            seconds=time.monotonic() - begin,
            grown_mib=answer["grown_mib"],
        )

    def _start(self) -> subprocess.Popen[bytes]:
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "ARROW_DEFAULT_MEMORY_POOL": "system",  # others reserve addresses, which the limit counts
            "MALLOC_ARENA_MAX": "1",
            "XDG_CACHE_HOME": "/nowhere",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self.memory_mib)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        ready = _line(self._process.stdout.fileno(), time.monotonic() + 120)
        assert ready == b"ready\n", ready
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()


def _line(fd: int, deadline: float) -> bytes:
    line = b""
    while (
        not line.endswith(b"\n") and (left := deadline - time.monotonic()) > 0 and select.select([fd], [], [], left)[0]
    ):
        piece = os.read(fd, 1 << 16)
        if not piece:
            break
        line += piece
    return line


# the child


def _rows_of_table(path: Path, columns: list[str] | None = None) -> Iterable[Any]:
    from unisono.data.convert import open_table

    return open_table(path, columns=columns).rows


def _recordio(path: Path) -> Iterable[Any]:
    from unisono.data.recordio import RecordFile

    file = RecordFile(path)
    side = file.side
    for number, payload in enumerate(file):
        yield [payload, {name: column[number] for name, column in side.items()}]


def _recordio_verified(path: Path) -> Iterable[Any]:
    """The records of a file in which ``data verify`` finds no damage."""
    from unisono.data.recordio.maintenance import verify
    from unisono.errors import DataError

    if findings := verify(path).findings:
        raise DataError(given=str(findings[0]), rule="what verify says", consequence="not read", nearest="repair")
    return _recordio(path)


def _recordio_repaired(path: Path) -> Iterable[Any]:
    from unisono.data.recordio import RecordFile
    from unisono.data.recordio.maintenance import repair

    repair(path, path.with_name("new.rec"))
    return RecordFile(path.with_name("new.rec"))


def _mindrecord(path: Path) -> Iterable[Any]:
    from unisono.data.mindrecord import MindRecordFile

    return MindRecordFile(path)


def _tokens(path: Path) -> Iterable[Any]:
    from unisono.data.tokens.shards import open_tokens
    from unisono.data.tokens.windows import TokenWindows
    from unisono.errors import DataError

    tokens = open_tokens([path])
    if problems := tokens.verify():
        raise DataError(*problems)
    windows = TokenWindows(tokens, seq_len=8)
    import numpy as np

    yield [tokens.vocab_size, tokens.num_documents, tokens.text_bytes]
    for number in range(len(windows)):
        yield windows.read(np.array([number]))


def _checkpoint(path: Path) -> Iterable[Any]:
    from unisono.checkpoint import open_checkpoint
    from unisono.checkpoint.integrity import verify
    from unisono.errors import CheckpointError

    reader = open_checkpoint(path)
    yield reader.meta
    for name in reader.names():
        tensor = reader.tensor(name)
        yield [name, list(tensor.shape), str(tensor.dtype), bytes(tensor.reshape(-1).view(_bytes()).numpy())]
    if problems := verify(path):
        raise CheckpointError(*problems)


def _bytes() -> Any:
    import torch

    return torch.uint8


def _header(path: Path) -> Iterable[Any]:
    """Only the header of a safetensors file, as a checkpoint's shard has it."""
    from unisono.checkpoint.manifest import FileEntry
    from unisono.checkpoint.reader import CheckpointDamage, read_header, unreadable_error

    try:
        extents = read_header(path.parent, path.name, FileEntry(bytes=path.stat().st_size, digest=""))
    except (OSError, CheckpointDamage) as error:
        raise unreadable_error(path, error) from error
    return [[name, str(extent)] for name, extent in extents.items()]


def _events(path: Path) -> Iterable[Any]:
    from unisono.observe.events import next_attempt, read_events
    from unisono.observe.history import read_history

    next_attempt(path)
    events, history = read_events(path), read_history(path)
    assert events.notes() == history.notes
    return [*events.events, *history.events, *history.points("train/loss")[1].tolist()]


def _findings(facts: Any) -> list[Any]:
    """As ``diagnose``, without the search for rules of other packages, which takes longer than all of it."""
    import numpy as np

    from unisono.diagnose.rules import RULES

    with np.errstate(over="ignore", invalid="ignore"):
        return [finding.to_json() for rule in RULES for finding in rule(facts)]


def _run_folder(path: Path) -> Iterable[Any]:
    """What all readers of a run's folder say of it, the page of its report aside."""
    from unisono.compare import compare_runs, read_figures
    from unisono.diagnose import read_run
    from unisono.measure.calibration import read_calibration
    from unisono.observe.goodput import read_goodput
    from unisono.observe.rank_status import rank_statuses

    facts = read_run(path)
    yield _findings(facts)
    figures = read_figures(path)
    yield [str(compare_runs(figures, figures)), str(read_goodput(path)), str(rank_statuses(path))]
    yield [str(read_calibration(path.parent / "calibration.json")), str(facts.ending)]


def _trace(path: Path) -> Iterable[Any]:
    from unisono.diagnose import read_trace_facts
    from unisono.profile.text import profile_text

    facts = read_trace_facts(path)
    yield _findings(facts)
    yield list(profile_text(facts.profiles))


def _strategy(path: Path) -> Iterable[Any]:
    from unisono.errors import PlanError
    from unisono.plan.plan import Plan, load_fields
    from unisono.plan.rules import match_modules, module_patterns

    try:
        plan = Plan.load(path)
    except PlanError:
        return [load_fields(path)]
    names = [f"model.layers.{n}.attention.{part}" for n in range(20) for part in ("query", "key")]
    patterns = [pattern for rule in plan.tensor_parallel.rules for pattern in module_patterns(rule)]
    patterns += plan.fsdp.ignored_modules
    return [plan.to_json(), plan.hash, plan.describe(), [match_modules(pattern, names) for pattern in patterns]]


def _mindspore_strategy(path: Path) -> Iterable[Any]:
    from dataclasses import asdict

    from unisono.interop.mindspore_plan import imported_plan, parse_settings
    from unisono.interop.mindspore_strategy import read_strategies

    found = read_strategies(path)
    plan = imported_plan([found], parse_settings(["optimizer_level=level3"]))
    return [asdict(found), plan.fields, plan.notes]


def _arrow(path: Path) -> Iterable[Any]:
    from unisono.data.sources.arrow_folder import arrow_classes, arrow_files, arrow_rows, is_arrow_folder

    yield is_arrow_folder(path)
    files = arrow_files(path)
    yield arrow_classes(path)
    yield from arrow_rows(files)


def _toml(path: Path) -> Iterable[Any]:
    from unisono.config import load_config
    from unisono.train.config import RunConfig

    resolved = load_config(RunConfig, [path])
    yield resolved.to_toml()


def _tokenizer(path: Path) -> Iterable[Any]:
    from unisono.data.tokens.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(path))
    yield [tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.padding, tokenizer.mask]
    for encoded in tokenizer.encode(["the cat, the hat", "", "\u00fc [PAD]<|endoftext|>"]):
        yield [encoded.ids, encoded.token_bytes, tokenizer.decode(encoded.ids.tolist())]
    yield tokenizer.encode_marked(["the cat", "a hat"], 8)


MAX_PIXELS = 1 << 20  # as a user of small images sets it: the pixels of the usual limit alone take 192 MiB


def _image(path: Path) -> Iterable[Any]:
    import numpy as np

    from unisono.data.image import Augment, ImageTransform, decode, decode_region, probe, tile_grid

    data = path.read_bytes()
    info = probe(data)
    yield [info.format, info.mode, decode(data, max_pixels=MAX_PIXELS)]
    yield decode(data, color="gray", min_size=(8, 8), max_pixels=MAX_PIXELS)
    box = (info.height // 2, info.width // 2, 1, 1)
    yield decode_region(data, box, tile_grid(data), max_pixels=MAX_PIXELS)
    transform = ImageTransform(augment=Augment(size=(8, 8), max_pixels=MAX_PIXELS))
    yield transform({"image": np.frombuffer(data, np.uint8)})["image"]


def _image_record(path: Path) -> Iterable[Any]:
    """Records as training opens them, decoded to pixels."""
    import numpy as np

    from unisono.data.image import decode
    from unisono.data.sources import open_source

    data: Any = open_source(path, classes=False, cache_dir=path.parent / "cache")
    for number in range(len(data)):
        (sample,) = data.samples(np.array([number]))
        yield sample | ({"image": decode(sample["image"], max_pixels=MAX_PIXELS)} if "image" in sample else {})


def _class_names(path: Path) -> Iterable[Any]:
    from unisono.data.sources import open_source

    data: Any = open_source(path, cache_dir=path.parent / "cache")
    return [data.class_names]


def _packed_sample(path: Path) -> Iterable[Any]:
    """Samples as the copies of tables are read."""
    import numpy as np

    from unisono.data.packed_sample import unpack_sample
    from unisono.data.recordio import RecordDataset, RecordFile

    data = RecordDataset([RecordFile(path)], unpack_sample)
    for number in range(len(data)):
        yield data.samples(np.array([number]))


def _image_list(path: Path) -> Iterable[Any]:
    from unisono.data.convert.pack.image_listing import list_images

    listing = list_images(path)
    yield [listing.classes, [[bad.path.replace(str(path.parent), ""), bad.reason] for bad in listing.bad]]
    for sample in listing.samples:
        yield [sample.name, sample.labels, sample.key]


def _pretrained(path: Path) -> Iterable[Any]:
    """The checks of a folder, without transformers."""
    from unisono.tasks.pretrained_folder import read_folder, refuse_other_tokenizer

    contents = read_folder(str(path))
    refuse_other_tokenizer(str(path))
    yield [contents.config, contents.generation, sorted(contents.weights), contents.weight_map]
    yield [contents.num_values, contents.tensor_names]
    with contents.checked_files() as files:
        yield sorted(file.name for file in files.iterdir())


def _pretrained_model(path: Path) -> Iterable[Any]:
    from unisono.tasks.options import LoraOptions, TaskOptions
    from unisono.tasks.pretrained import load_pretrained

    task = TaskOptions(kind="text", classes=("neg", "pos"))
    model: Any = load_pretrained(str(path), task, LoraOptions(), padding=None, cache=path.parent / "cache")
    for name, tensor in model.base_model.state_dict().items():  # not the new head, which is random
        yield [name, tensor.numpy()]


def _bert(path: Path) -> Iterable[Any]:
    from unisono.interop.bert import load_bert

    for name, tensor in load_bert(path).state_dict().items():
        yield [name, tensor.numpy()]


def _snapshot(path: Path) -> Iterable[Any]:
    from unisono.kvstore.server.snapshot import read_newest_snapshot

    newest = read_newest_snapshot(path)
    if newest is not None:
        yield [newest.number, newest.facts]
        for name, tensor in newest.tensors.items():
            yield [name, tensor.numpy()]


def _optimizer_states(path: Path) -> Iterable[Any]:
    from unisono.kvstore.optimizer_file import read_optimizer_file

    for name, tensor in read_optimizer_file(path, "sgd").items():
        yield [name, list(tensor.shape), str(tensor.dtype), bytes(tensor.reshape(-1).view(_bytes()).numpy())]


def _mindrecord_encrypted(path: Path) -> Iterable[Any]:
    from fuzz_files import KEY

    from unisono.data.mindrecord import MindRecordFile

    return MindRecordFile(path, key=KEY)


def _weights(path: Path) -> Iterable[Any]:
    """Weights of MXNet or MindSpore."""
    from unisono.interop.weight_file import open_weights

    with open_weights(path) as weights:
        return [[name, str(tensor.dtype), list(tensor.load().shape)] for name, tensor in weights.tensors.items()]


def _packing(path: Path) -> Iterable[Any]:
    """A packing job that is continued."""
    from fuzz_files import run_packing_job

    return run_packing_job(path)


READERS: dict[str, Callable[..., Iterable[Any]]] = {
    "table": _rows_of_table,
    "recordio": _recordio,
    "recordio_verified": _recordio_verified,
    "recordio_repaired": _recordio_repaired,
    "mindrecord": _mindrecord,
    "tokens": _tokens,
    "checkpoint": _checkpoint,
    "header": _header,
    "events": _events,
    "run_folder": _run_folder,
    "trace": _trace,
    "strategy": _strategy,
    "mindspore_strategy": _mindspore_strategy,
    "arrow": _arrow,
    "toml": _toml,
    "tokenizer": _tokenizer,
    "image": _image,
    "image_record": _image_record,
    "class_names": _class_names,
    "packed_sample": _packed_sample,
    "image_list": _image_list,
    "pretrained": _pretrained,
    "pretrained_model": _pretrained_model,
    "bert": _bert,
    "snapshot": _snapshot,
    "weights": _weights,
    "optimizer_states": _optimizer_states,
    "mindrecord_encrypted": _mindrecord_encrypted,
    "packing": _packing,
}


def told(value: Any) -> str:
    """Digest of a value: of bytes, arrays and their dtypes and shapes too."""
    import numpy as np
    import xxhash

    digest = xxhash.xxh3_64()

    def add(part: Any) -> None:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part))
        elif isinstance(part, dict):
            for name, inner in part.items():
                digest.update(f"{name!r}:".encode(errors="surrogatepass"))
                add(inner)
        elif isinstance(part, list | tuple):
            digest.update(b"[%d" % len(part))
            for inner in part:
                add(inner)
        elif isinstance(part, bytes | memoryview):
            digest.update(part)
        else:
            digest.update(f"{type(part).__name__}{part!r}".encode(errors="surrogatepass"))

    add(value)
    return digest.hexdigest()


_SHOWN_ROWS = 4096


def _answer(kind: str, path: str, options: dict[str, Any]) -> dict[str, Any]:
    from unisono.errors import UnisonoError

    answer: dict[str, Any] = {"rows": None, "problems": [], "bad": ""}
    try:
        rows: list[str] = []
        for row in READERS[kind](Path(path), **options):
            if len(rows) < _SHOWN_ROWS:
                rows.append(told(row))
        answer["rows"] = rows
    except UnisonoError as error:
        answer["problems"] = [[p.given, p.rule, p.consequence, p.nearest] for p in error.problems]
        if not error.problems or not all(all(parts) for parts in answer["problems"]):
            answer["bad"] = f"an error without four parts: {error}"
        elif len(str(error)) > 1 << 16:
            answer["bad"] = f"an error of {len(str(error)):,} characters: {str(error)[:200]}"
    except BaseException as error:
        frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)[-6:]
        traceback.clear_frames(error.__traceback__)  # what it was about to read may fill the memory
        places = " ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
        answer["bad"] = f"{type(error).__name__}: {str(error)[:500]} at {places}"
    return answer


def _memory_kib(name: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))


def _main(memory_mib: int) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import logging
    import warnings

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    import pyarrow.parquet
    import torch

    import unisono.checkpoint.integrity  # what a reader imports is not what its file takes
    import unisono.data.convert.pack
    import unisono.data.image
    import unisono.data.mindrecord
    import unisono.data.recordio
    import unisono.data.sources
    import unisono.data.tokens.windows
    import unisono.kvstore.server.snapshot
    import unisono.plan.rules
    import unisono.train.config

    del unisono
    torch.set_num_threads(1)
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    limit = (_memory_kib("VmSize") << 10) + (memory_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers.write(b"ready\n")
    answers.flush()
    while line := sys.stdin.buffer.readline():
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts anew
        before = _memory_kib("VmRSS")
        answer = _answer(*json.loads(line))
        answer["grown_mib"] = round((_memory_kib("VmHWM") - before) / 1024, 1)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
