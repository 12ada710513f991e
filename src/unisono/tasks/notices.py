"""Notices at the start of a run: what was found in the training data, and doubts about it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from unisono.data.dataset import Batch, Dataset, read_samples
from unisono.data.tokens.tokenizer import Tokenizer
from unisono.tasks.columns import number_columns
from unisono.tasks.options import TaskOptions
from unisono.tasks.targets import ClassNumbers, first_names, split_words, text_of

_MANY_CLASSES = 50
_FEW_SAMPLES = 3  # of a class
_TEXTS = 256
_UNCUT = 1 << 30


def found_notices(task: TaskOptions, train: Dataset) -> Iterator[dict[str, str]]:
    """What ``resolve_task`` found: columns, classes, and whether there are many classes for the samples of ``train``."""
    target = (
        f"{task.target} of {len(task.classes)} classes ({first_names(task.classes)})"
        if task.has_classes
        else task.target
    )
    found = [f"inputs {', '.join(task.inputs)}"]
    if task.kind == "table":
        groups = {"numbers": number_columns(task), "categories": task.categories}
        found = [f"{name} {', '.join(columns)}" for name, columns in groups.items() if columns]
    yield {
        "code": "columns",
        "what": "; ".join([f"target {target}", *found]),
        "why": "what task leaves open is taken from the training data",
        "cost": "another choice is another model",
        "fix": "task.target, task.inputs, task.categories or task.classes, with another run.dir",
    }
    if len(task.classes) >= _MANY_CLASSES and len(train) < _FEW_SAMPLES * len(task.classes):
        numbers = ClassNumbers(names=task.classes).has_integers
        yield {
            "code": "many_classes",
            "what": f"{len(task.classes)} classes for {len(train)} training samples",
            "why": f"each {'integer' if numbers else 'text'} of the column {task.target!r} is a class",
            "cost": "a class of one or two samples cannot be learned",
            "fix": f"{'task.predicts=number' if numbers else 'task.target=COLUMN of the classes'}, with another run.dir",
        }


def cut_notice(task: TaskOptions, train: Dataset, tokenizer: Tokenizer, seq_len: int) -> dict[str, str] | None:
    """How many of the first texts of ``train`` have more than ``seq_len`` tokens; None if none has, or for windows of tokens."""
    samples = read_samples(train, np.arange(min(_TEXTS, len(train))))
    samples = [sample for sample in samples if "text" in sample or "words" in sample]
    sizes = [_num_tokens(task, sample, tokenizer) for sample in samples]
    num_cut = sum(size > seq_len for size in sizes)
    if not num_cut:
        return None
    cost = "the model does not see the rest of them"
    if task.kind == "sequence_labelling":
        words = [split_words(text_of(sample["words"])) for sample in samples]
        kept, every = (
            sum(len({word for word in tokenizer.encode_words(row, length)[1] if word >= 0}) for row in words)
            for length in (seq_len, _UNCUT)
        )
        cost = "their last words are cut short"
        if kept < every:
            cost = f"{100 * (every - kept) / every:.3g} % of the words are cut off, neither learned nor scored"
    return {
        "code": "texts_cut",
        "what": f"{num_cut} of the first {len(samples)} training texts have more than {seq_len} tokens",
        "why": "texts are cut to data.seq_len tokens",
        "cost": cost,
        "fix": f"data.seq_len={max(sizes)}, the longest of them, with another run.dir",
    }


def _num_tokens(task: TaskOptions, sample: Batch, tokenizer: Tokenizer) -> int:
    """Tokens of a sample that is not cut."""
    if task.kind == "sequence_labelling":
        return len(tokenizer.encode_words(split_words(text_of(sample["words"])), _UNCUT)[0])
    texts = [text_of(sample[name]) for name in ("text", "text_pair") if name in sample]
    if task.kind == "language_model":  # its last token is only predicted, the end of the document
        return tokenizer.encode(texts)[0].ids.size
    return len(tokenizer.encode_marked(texts, _UNCUT)[0])
