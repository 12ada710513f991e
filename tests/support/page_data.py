"""What the pages say that their reader has: small files, and settings that make the runs of a page short."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import mindspore_strategies
from event_streams import write_events
from pages import environment
from pictures import write_photographs
from traces import TraceBuilder

TRAIN = """
import os
import time

import torch

from unisono import PlanOptions, Trainer, TrainOptions


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, inputs):
        time.sleep(0.05)
        return self.layer(inputs)


asynchronous = "UNISONO_SERVER_ADDRESSES" in os.environ
points = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
data = [(x, int(x[0] > 0)) for x in points]
with Trainer(
    Net(),
    data,
    PlanOptions(global_batch=8, sync="dist_async" if asynchronous else "dist_sync"),
    objective=torch.nn.CrossEntropyLoss(),
    options=TrainOptions(steps=200 if asynchronous else 10, eval_every_steps=0),
    run_dir="runs/train",
) as run:
    print(run.fit().reason)
"""
MINE = """
import torch

from unisono import PlanOptions, Trainer, TrainOptions

loss = torch.nn.CrossEntropyLoss()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, inputs):
        return self.layer(inputs)


def held_out():
    return [(x, int(x[0] > 0)) for x in torch.randn(32, 2, generator=torch.Generator().manual_seed(1))]


if __name__ == "__main__":
    with Trainer(
        Net(),
        held_out(),
        PlanOptions(global_batch=8),
        objective=loss,
        options=TrainOptions(steps=4, eval_every_steps=0),
        run_dir="runs/mine",
    ) as run:
        run.fit()
"""
SLOW = """
import time

from unisono import Components, RunConfig


def read_slowly(sample, rng):
    time.sleep(0.003)
    return sample


def config():
    return RunConfig(components=Components(transform=read_slowly))
"""
# the demo's run, small
SMALL = {
    "UNISONO__DATA__CORPUS": "corpus",
    "UNISONO__DATA__SEQ_LEN": "32",
    "UNISONO__MODEL__NUM_LAYERS": "2",
    "UNISONO__MODEL__DIM": "32",
    "UNISONO__MODEL__NUM_HEADS": "4",
    "UNISONO__MODEL__NUM_KV_HEADS": "2",
    "UNISONO__TRAIN__STEPS": "4",
    "UNISONO__TRAIN__NUM_EVAL_SAMPLES": "8",
}
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def corpus(folder: Path) -> None:
    (folder / "corpus").mkdir()
    for number in range(12):
        lines = [f"def f{number}_{i}(x):\n    return x + {(number * 37 + i * 11) % 100}\n" for i in range(24)]
        (folder / f"corpus/m{number}.py").write_text("\n".join(lines))


def small_run(folder: Path) -> dict[str, str]:
    corpus(folder)
    return SMALL


def compressed(folder: Path) -> dict[str, str]:
    """A corpus, and a script that has trained. Sizes of models in the environment would win over those of a pruned run."""
    corpus(folder)
    (folder / "mine.py").write_text(MINE)
    subprocess.run([sys.executable, "mine.py"], cwd=folder, check=True, capture_output=True)
    return {name: value for name, value in SMALL.items() if not name.startswith("UNISONO__MODEL__")}


def guide(folder: Path) -> dict[str, str]:
    """Records, photos and a list of them, a table, texts, a tokenizer, and a script that has trained."""
    import numpy as np
    from PIL import Image
    from tokenizers import Tokenizer, models

    from unisono.data.convert import Table, write_table
    from unisono.data.recordio import RecordWriter

    corpus(folder)
    for name in ("a.rec", "b.rec"):
        with RecordWriter(folder / name) as writer:
            for number in range(12):
                writer.write(bytes([65 + number]) * 3, side={"label": number})
    entries: list[str] = []
    pixels = np.random.default_rng(0)
    for number in range(20):
        path = folder / f"photos/{('cat', 'dog')[number % 2]}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.integers(0, 255, (48, 64, 3), dtype=np.uint8)).save(path)
        entries.append(f"{number}\t{number % 2}\t{path.relative_to(folder)}\n")
    (folder / "list.lst").write_text("".join(entries))
    write_table(folder / "rows.parquet", Table(rows=[{"id": n, "text": f"line {n}"} for n in range(8)]))
    (folder / "texts").mkdir()
    words = ["the", "cat", "sat", "[UNK]", "<|endoftext|>"]
    for number in range(3):
        (folder / f"texts/{number}.txt").write_text(" ".join(random.Random(number).choices(words[:3], k=50)))
    Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "mine.py").write_text(MINE)
    subprocess.run([sys.executable, "mine.py"], cwd=folder, check=True, capture_output=True)
    return SMALL


def launching(folder: Path) -> dict[str, str]:
    corpus(folder)
    (folder / "train.py").write_text(TRAIN)
    return SMALL | AS_ROOT


def kvstore(folder: Path) -> dict[str, str]:
    """A folder ``tls`` made as the page says, for one host."""
    corpus(folder)
    commands = """
umask 077; mkdir tls authority
new="openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
$new -subj /CN=jobs -keyout authority/key.pem -out tls/authority.pem
$new -subj /CN=n1 -CA tls/authority.pem -CAkey authority/key.pem -addext basicConstraints=CA:FALSE \
    -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout tls/key.pem -out tls/certificate.pem
"""
    subprocess.run(["bash", "-euc", commands], cwd=folder, check=True, capture_output=True)
    return SMALL


def diagnosis(folder: Path) -> dict[str, str]:
    """A run whose loader is slow."""
    corpus(folder)
    (folder / "slow.py").write_text(SLOW)
    settings = ["run.dir=runs/mine", "train.steps=16", "train.eval_every_steps=0", "loader.num_workers=0"]
    command = [sys.executable, "-m", "unisono", "train", "slow.py", *(f"--set={setting}" for setting in settings)]
    subprocess.run(command, cwd=folder, env=environment(folder) | SMALL, check=True, capture_output=True)
    return SMALL


def compare(folder: Path) -> dict[str, str]:
    """Four runs that differ in nothing."""
    fields = {"train/loss": 2.0, "mem/peak_bytes": 1e9}
    for name in ("main", "mine", "baseline", "this"):
        write_events(folder / "runs" / name, lambda rank, step: {"forward": 0.05}, fields=fields)
    return {}


def profile(folder: Path) -> dict[str, str]:
    """A configuration of a small run of some more steps than the page profiles, and a trace of another program."""
    corpus(folder)
    (folder / "run.toml").write_text('[run]\ndir = "runs/mine"\n[train]\neval_every_steps = 0\n')
    trace = TraceBuilder().step(1, 0, 1000).op("aten::mm", 0, 900)
    trace.write(folder / "trace.json.gz")
    return SMALL | {"UNISONO__TRAIN__STEPS": "104"}


def tuning(folder: Path) -> dict[str, str]:
    """A small run, and a table of numbers."""
    settings = {name: value for name, value in small_run(folder).items() if "MODEL" not in name}
    (folder / "run.toml").write_text(
        '[data]\ncorpus = "corpus"\nseq_len = 32\n\n'
        "[model]\nnum_layers = 1\ndim = 32\nnum_heads = 4\nnum_kv_heads = 2\n"
    )
    draw = random.Random(0)
    rows = [(draw.random(), draw.random()) for _ in range(60)]
    (folder / "table.csv").write_text("\n".join(["a,b,price", *(f"{a},{b},{2 * a + b}" for a, b in rows)]) + "\n")
    (folder / "table.toml").write_text(
        '[task]\nkind = "table"\npredicts = "number"\ntarget = "price"\n\n[data]\ntrain = "table.csv"\n'
    )
    return {name: value for name, value in settings.items() if name.startswith("UNISONO__TRAIN")} | {
        "UNISONO__PLAN__GLOBAL_BATCH": "8"
    }


def quality(folder: Path) -> dict[str, str]:
    """A corpus with duplicates, whose rows have a class and a user, three sets without leaks, photographs, readings of two
    sensors, and labelled texts with marks."""
    draw = random.Random(0)
    texts = [" ".join(f"word{draw.randrange(1000)}" for _ in range(80)) for _ in range(60)]
    rows = [{"text": text, "label": number % 2, "user": number // 2} for number, text in enumerate(texts + texts[:6])]
    parts = {"corpus": rows, "training": rows[:40], "validation": rows[40:50], "test": rows[50:60]}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    write_photographs(folder / "photos", range(8))
    write_photographs(folder / "held-out-photos", range(100, 104))
    write_photographs(folder / "animals" / "cat", range(200, 203))
    write_photographs(folder / "animals" / "dog", range(202, 205))
    readings = [f"{number // 2},{'ab'[number % 2]},{draw.gauss(20, 1)}" for number in range(200)]
    (folder / "tables").mkdir()
    (folder / "tables" / "readings.csv").write_text("\n".join(["t,sensor,x", *readings]) + "\n")
    return reviews(folder)


def reviews(folder: Path) -> dict[str, str]:
    """Labelled texts, a small model of them, and what the page of labels saves when somebody marks one."""
    from unisono.quality.documents import find_documents
    from unisono.quality.duplicates.sketch_folder import sketch_all
    from unisono.quality.labels.values import data_set_digest, read_labels
    from unisono.quality.options import DuplicateOptions, only_dedup

    texts = [("good fine nice", "bad poor sad")[number % 2] + f" number {number}" for number in range(48)]
    rows = [{"text": text, "label": ("good", "bad")[number % 2 if number else 1]} for number, text in enumerate(texts)]
    path = folder / "reviews.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reviews.toml").write_text(
        '[task]\nkind = "text"\n\n[data]\ntrain = "reviews.jsonl"\nseq_len = 24\n\n'
        "[model]\nnum_layers = 1\ndim = 16\nnum_heads = 2\nnum_kv_heads = 2\n"
    )
    documents = find_documents([path])
    with tempfile.TemporaryDirectory() as sketched:
        sketches = sketch_all(documents, Path(sketched), only_dedup(DuplicateOptions(near=0.0)))
        digest = data_set_digest(documents, sketches, read_labels(documents, "label", sketches))
    about = {"version": 1, "data_set_digest": digest, "label": "label", "text_column": None, "whole_rows": False}
    marks = [{"file": "reviews.jsonl", "row": 0, "label": "bad", "action": "change", "to": "good"}]
    (folder / "marks.json").write_text(json.dumps({**about, "marks": marks}))
    return {"UNISONO__TRAIN__STEPS": "4", "UNISONO__PLAN__GLOBAL_BATCH": "8", "UNISONO__TRAIN__EVAL_EVERY_STEPS": "0"}


def other_frameworks(folder: Path) -> dict[str, str]:
    """Files of weights of MXNet and MindSpore, the run of a small program, and a strategy file of four devices."""
    corpus(folder)
    mindspore_strategies.write(folder / "strategy.json", mindspore_strategies.strategy(dp=2, tp=2, shard=2))
    interop = Path(__file__).parents[1] / "interop"
    for source, name in (
        ("fixtures/named.params", "net-0010.params"),
        ("models/gluon_resnet_bottleneck.params", "resnet.params"),
        ("models/models_bert.ckpt", "bert.ckpt"),
    ):
        shutil.copyfile(interop / source, folder / name)
    (folder / "mine.py").write_text(MINE)
    subprocess.run([sys.executable, "mine.py"], cwd=folder, check=True, capture_output=True)
    return SMALL


PREPARE: dict[str, Callable[[Path], dict[str, str]]] = {
    "compare.md": compare,
    "diagnosis.md": diagnosis,
    "from-mxnet-mindspore.md": other_frameworks,
    "guide.md": guide,
    "kvstore.md": kvstore,
    "launching.md": launching,
    "plans.md": small_run,
    "profile.md": profile,
    "quality.md": quality,
    "smaller-models.md": compressed,
    "trackers.md": small_run,
    "tuning.md": tuning,
}
