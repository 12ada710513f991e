"""Options of the data: the corpus and its windows, and the loader."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from unisono.config import option
from unisono.config.fields import options_repr
from unisono.errors import Problem, inert_problem

Boundaries = Literal["mask", "ignore"]
LastBatch = Literal["rollover", "keep", "drop", "pad", "wrap", "discard", "roll_over"]

# values of data.eval_split: the last one is followed by the name of a column
EVAL_RANDOM: Final = "random"
EVAL_STRATIFIED: Final = "stratified"
EVAL_GROUP: Final = "group:"

# more than any machine's cores, fewer than the threads that systems allow
MOST_WORKERS: Final = 1024
_FOLDERS_OF_ROWS: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """The data a run reads. Seed, batch sizes and number of steps belong to other sections."""

    __repr__ = options_repr

    train: str | tuple[str, ...] = option(
        "",
        "Training samples: files, folders or addresses of .bin token shards, .rec, .mindrecord, .parquet, .csv, .jsonl, .tar,"
        " image folders or Hugging Face datasets. Empty = corpus.",
    )
    eval: str | tuple[str, ...] = option(
        "", "Held-out samples, like train; empty = eval_frac of them.", applies_with="data.train"
    )
    weights: tuple[float, ...] = option(
        (),
        "Shares in which several data.train are mixed; empty = all samples of all of them.",
        applies_with="data.train",
        gt=0.0,
    )
    sample_weights: str = option(
        "",
        "How often each sample is read: the folder of 'unisono data balance', or an .npy file with a weight for each; empty = all"
        " alike.",
        applies_with="data.train",
    )
    kept_rows: str | tuple[str, ...] = option(
        "",
        "Folder of kept rows ('unisono data clean', 'dedup', 'split', 'leak' or 'relabel'): only these rows of train or corpus"
        " are read; a second folder is for eval. Empty = all rows.",
        applies_with="data.train, or data.corpus other than stdlib",
    )
    cache_gib: float = option(
        0.0, "Samples kept on the local disk, in GiB; 0 = none.", applies_with="data.train", ge=0.0
    )
    bucket_batches: int = option(
        0,
        "Global batches whose texts are regrouped by length, for less padding; 0 = none.",
        applies_with="data.train of texts",
        ge=0,
    )
    corpus: str = option(
        "stdlib",
        "stdlib = the running Python's own library source; or a folder, file or address of text, or of tables with text_column.",
        applies_with="a language model without data.train",
    )
    text_column: str = option(
        "",
        "Column of the corpus' tables (.jsonl, .csv, .parquet …) whose text in each row is a document; empty = plain text.",
        applies_with="data.corpus of tables",
    )
    tokenizer: str = option(
        "bytes",
        "bytes = one token per UTF-8 byte; or a Hugging Face tokenizer.json or its folder, or the address of one.",
        applies_with="tasks of text",
    )
    seq_len: int = option(256, "Tokens of one sample.", applies_with="tasks of text", ge=2)
    eval_frac: float = option(
        0.05,
        "Share held out: files of a corpus by hash of their path, samples of data.train at random.",
        applies_with="data.eval empty",
        gt=0.0,
        le=0.5,
    )
    eval_fold: int = option(
        0,
        "Which share is held out, for cross-validation: with eval_frac=0.2, 0 to 4 are five folds without a sample in common.",
        applies_with="samples of data.train, and data.eval empty",
        ge=0,
    )
    eval_split: str = option(
        EVAL_RANDOM,
        "How the samples held out are drawn: random; stratified = each class in its proportion; group:COLUMN = samples with one"
        " value of a column stay together.",
        applies_with="samples of data.train, and data.eval empty",
    )
    boundaries: Literal["mask", "ignore"] = option(
        "mask",
        "Several documents in one sample: mask = never predict or attend across them; ignore = one stream.",
        applies_with="task.kind language_model",
    )
    packing: Literal["stream", "sliding", "best_fit"] = option(
        "stream",
        "Training samples: stream = windows side by side; sliding = a window begins at each token, so they overlap; best_fit ="
        " whole documents, some padding.",
        applies_with="task.kind language_model or masked_language_model",
    )
    cache_dir: str = option("", "Where prepared data is kept; empty = unisono/ in the user's cache folder.")

    @property
    def train_kept_rows(self) -> str | None:
        """Folder of the kept rows of ``train`` or ``corpus``; None: all rows are read."""
        return self._kept_rows_of(0)

    @property
    def eval_kept_rows(self) -> str | None:
        """Folder of the kept rows of ``eval``; None: all rows are read."""
        return self._kept_rows_of(1)

    def _kept_rows_of(self, place: int) -> str | None:
        folders = (self.kept_rows,) if isinstance(self.kept_rows, str) else self.kept_rows
        return folders[place] or None if place < len(folders) else None

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Settings of samples where a corpus is read, by field name."""
        unset = DataOptions()
        of_samples = ("eval", "weights", "sample_weights", "cache_gib", "bucket_batches", "eval_fold", "eval_split")
        for name in of_samples if not self.train else ():
            if getattr(self, name) != getattr(unset, name):
                yield (
                    name,
                    inert_problem(
                        f"{name} {getattr(self, name)!r} without data.train",
                        "a corpus is text that is tokenized and cached by itself",
                        f"data.train=ADDRESS, or leave data.{name} out",
                    ),
                )
        is_grouped = self.eval_split.startswith(EVAL_GROUP) and self.eval_split != EVAL_GROUP
        if self.eval_split not in (EVAL_RANDOM, EVAL_STRATIFIED) and not is_grouped:
            yield (
                "eval_split",
                Problem(
                    given=f"eval_split {self.eval_split!r}",
                    rule=f"it is {EVAL_RANDOM}, {EVAL_STRATIFIED}, or {EVAL_GROUP}COLUMN",
                    consequence="it is unknown which samples are held out",
                    nearest=f"{EVAL_STRATIFIED}, or {EVAL_GROUP} with the name of a column",
                ),
            )
        yield from (("kept_rows", problem) for problem in self._rows_problems())
        if (self.eval_fold + 1) * self.eval_frac > 1 + 1e-9:
            yield (
                "eval_fold",
                Problem(
                    given=f"eval_fold {self.eval_fold} with eval_frac {self.eval_frac:g}",
                    rule="the parts of eval_frac of the samples are numbered from 0, and are at most all samples",
                    consequence="there is nothing to evaluate on",
                    nearest=f"data.eval_fold={max(0, math.floor(1 / self.eval_frac + 1e-9) - 1)} or less",
                ),
            )
        if self.train and self.corpus != unset.corpus:
            yield (
                "corpus",
                inert_problem(
                    f"corpus {self.corpus!r} with train {self.train!r}",
                    "a run reads samples, or the text of a corpus",
                    "one of them",
                ),
            )
        if self.text_column and (self.train or self.corpus == unset.corpus):
            beside = f"train {self.train!r}" if self.train else f"corpus {self.corpus!r}"
            yield (
                "text_column",
                inert_problem(
                    f"text_column {self.text_column!r} with {beside}",
                    "it is read from the tables of a corpus; task.inputs names columns of data.train",
                    "data.corpus=FILE of a table format, or leave data.text_column out",
                ),
            )
        sources = 1 if isinstance(self.train, str) else len(self.train)
        if self.weights and len(self.weights) != sources:
            yield (
                "weights",
                Problem(
                    given=f"weights of {len(self.weights)} values for {sources} addresses",
                    rule="each address of data.train has one share",
                    consequence="the mixture is not defined",
                    nearest=f"{sources} values",
                ),
            )

    def _rows_problems(self) -> Iterator[Problem]:
        """Folders of kept rows of data that are not read."""
        if self.train_kept_rows and not self.train and self.corpus == DataOptions().corpus:
            yield inert_problem(
                f"kept_rows {self.kept_rows!r} with corpus {self.corpus!r}",
                "they are rows of the files that a data command was given",
                "data.train or data.corpus with these files, or leave data.kept_rows out",
            )
        if self.eval_kept_rows and not self.eval:
            yield inert_problem(
                f"kept_rows {self.kept_rows!r} without data.eval",
                "the second folder has rows of the held-out samples",
                "data.eval=ADDRESS, or data.kept_rows with one folder",
            )
        if not isinstance(self.kept_rows, str) and len(self.kept_rows) > _FOLDERS_OF_ROWS:
            yield Problem(
                given=f"rows of {len(self.kept_rows)} folders",
                rule="the first has rows of data.train or data.corpus, the second of data.eval",
                consequence="it is not known which rows are read",
                nearest="one folder or two; files that were cleaned together have one",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """How batches are built. Only ``last_batch`` and ``max_bad_sample_frac`` affect their content."""

    __repr__ = options_repr

    num_workers: int = option(
        -1,
        "Threads or processes that make batches ready ahead; -1 = tuned while running, 0 = the training's own thread.",
        ge=-1,
        le=MOST_WORKERS,
    )
    worker_kind: Literal["auto", "thread", "process"] = option(
        "auto",
        "thread suits decoders that release the interpreter lock; process suits Python code; auto = by trial, in a"
        " notebook threads.",
        applies_with="loader.num_workers other than 0",
    )
    last_batch: LastBatch = option(
        "rollover",
        "An epoch's remainder: rollover = goes into the next epoch, keep = a smaller step, drop (MXNet: discard) = left"
        " out, pad = filled up with weight 0, wrap = filled up with the epoch's first samples.",
    )
    max_bad_sample_frac: float = option(
        0.0, "Share of samples that may be unreadable and then weigh 0; 0 = the first one ends the run.", ge=0.0, lt=1.0
    )
    timeout_s: float = option(
        600.0,
        "How long a step may wait for its data before the sample is named.",
        applies_with="loader.num_workers other than 0",
        gt=0.0,
    )

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Settings of workers where there are none, by field name."""
        unset = LoaderOptions()
        for name in ("worker_kind", "timeout_s") if self.num_workers == 0 else ():
            if getattr(self, name) != getattr(unset, name):
                yield (
                    name,
                    inert_problem(
                        f"{name} {getattr(self, name)!r} with num_workers 0",
                        "it is a setting of workers, and the training's own thread reads the data",
                        f"loader.num_workers=-1, or leave loader.{name} out",
                    ),
                )


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """``unisono`` in the user's cache folder: ``$XDG_CACHE_HOME``, else ``~/.cache``."""
    root = environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "unisono"
