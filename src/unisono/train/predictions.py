"""What the outputs of a model mean, by task: the values of a prediction, and their names and types in a file.

    task                                values                                           number(s) of a record
    class                               class, class_number, probability                 class_number
    several labels (BCEWithLogitsLoss)  labels, label_numbers, probabilities             label_numbers
    number                              number, or numbers                               number, or numbers
    label of each word                  words, labels, label_numbers, probabilities      label_numbers
    language model                      loss, perplexity, bits_per_byte, tokens          loss
    masked language model               fillings, filling_tokens, probabilities          filling_tokens
    own data with an own objective      outputs, shape                                   outputs

Losses are in nats for each token, numbers in the units of the target. Several likeliest classes or fillings are in ``top_…``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from unisono.data.dataset import Batch as Sample
from unisono.data.tokens.tokenizer import Tokenizer
from unisono.errors import ConfigError, DataError
from unisono.models.loss import LazyLogits
from unisono.tasks.targets import split_words, text_of
from unisono.train.build import find_objective, has_own_data
from unisono.train.config import AUTO, RunConfig
from unisono.train.metric_kinds import CLASSES, NUMBERS, objective_kind
from unisono.train.objectives import Batch, dense_logits, find_logits, find_targets, next_token
from unisono.train.settings import function_name

ValueType = Literal["text", "int", "float", "texts", "ints", "floats", "texts of each", "floats of each"]
Values = dict[str, Any]  # as JSON types, by the names of ``OutputKind.fields``

_THRESHOLD: Final = 0.5
_SEVERAL_LABELS: Final = ("BCEWithLogitsLoss", "BCELoss")
_TOKEN_OBJECTIVES: Final = ("next_token", "masked_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputKind:
    """How outputs of a model become predictions.

    Attributes:
        fields: The values of a prediction, in order, and their types.
        label: The value that a record holds as its number or numbers.
        read: ``(outputs, batch)`` of a micro-batch → what is said of each of its samples, as JSON types.
        finish: ``(parts, sample)`` → the values, of what is said of the parts of a sample, and of the sample as it was read.
        classes: Names of the classes, if the numbers of ``label`` are theirs.
    """

    fields: dict[str, ValueType]
    label: str
    read: Callable[[Any, Batch], list[Values]]
    finish: Callable[[Sequence[Values], Sample], Values] = lambda parts, _sample: parts[0]
    classes: tuple[str, ...] = ()


def output_kind(
    config: RunConfig, tokenizer: Tokenizer | None, *, top_k: int | None, threshold: float | None
) -> OutputKind:
    """What the outputs of a run's model mean: by its objective where that decides, else by its task.

    Args:
        config: Of the run, with a resolved task.
        tokenizer: Of its texts, or None.
        top_k: How many of the likeliest classes, or fillings of a mask, predictions have; None: the likeliest alone.
        threshold: Probability from which on a sample has a label, where it may have several; None: 0.5.

    Raises:
        ConfigError: ``top_k`` or ``threshold`` is given, and predictions of this kind have none.
    """
    kind = _kind_of(config, tokenizer, top_k or 1, _THRESHOLD if threshold is None else threshold)
    unread: dict[str, float] = {}
    if (top_k or 1) > 1 and not any(name.startswith("top_") for name in kind.fields):
        unread["--top-k"] = top_k or 1
    if threshold is not None and next(iter(kind.fields)) != "labels":
        unread["--threshold"] = threshold
    for option, value in unread.items():
        raise ConfigError(
            given=f"{option} {value} for predictions of {', '.join(kind.fields)}",
            rule="--top-k is for one of several classes and for masks, --threshold for labels of which a sample may have several",
            consequence="it would have no effect, and nothing was predicted",
            nearest=f"leave {option} out",
        )
    return kind


def _kind_of(config: RunConfig, tokenizer: Tokenizer | None, top_k: int, threshold: float) -> OutputKind:
    task, objective = config.task, config.components.objective
    if objective == AUTO:
        objective = find_objective(config)
    name = objective if isinstance(objective, str) else function_name(objective)
    if name in _SEVERAL_LABELS:
        classes = task.classes if task.has_classes and not has_own_data(config) else ()
        return _several_labels(classes, threshold, are_logits=name != "BCELoss")
    if has_own_data(config):
        if name in _TOKEN_OBJECTIVES:
            return _language_model()
        own = {CLASSES: _one_class((), top_k), NUMBERS: _numbers(None, None)}
        return own.get(objective_kind(name)) or _outputs()
    if task.kind == "language_model":
        return _language_model()
    if task.kind == "masked_language_model":
        assert tokenizer is not None
        return _masked(tokenizer, top_k)
    if task.kind == "sequence_labelling":
        return _words(task.classes)
    return _numbers(task.target_mean, task.target_std) if task.has_numbers else _one_class(task.classes, top_k)


def _one_class(classes: tuple[str, ...], top_k: int) -> OutputKind:
    fields: dict[str, ValueType] = {"class": "text", "class_number": "int", "probability": "float"}
    if top_k > 1:
        fields |= {"top_classes": "texts", "top_probabilities": "floats"}

    def read(outputs: Any, _batch: Batch) -> list[Values]:
        logits = _rows(outputs, 2)
        _check_count(logits, classes)
        chances, numbers = torch.softmax(logits.float(), -1).topk(min(max(1, top_k), logits.shape[-1]), -1)
        found: list[Values] = []
        for of_sample, best in zip(chances.tolist(), numbers.tolist(), strict=True):
            names = [_name(classes, number) for number in best]
            values: Values = {"class": names[0], "class_number": best[0], "probability": of_sample[0]}
            found.append(values | ({"top_classes": names, "top_probabilities": of_sample} if top_k > 1 else {}))
        return found

    return OutputKind(fields=fields, label="class_number", read=read, classes=classes)


def _several_labels(classes: tuple[str, ...], threshold: float, *, are_logits: bool) -> OutputKind:
    def read(outputs: Any, _batch: Batch) -> list[Values]:
        logits = dense_logits(outputs).float()
        logits = logits.reshape(len(logits), -1)
        _check_count(logits, classes)
        found: list[Values] = []
        for chances in (logits.sigmoid() if are_logits else logits).tolist():
            above = [number for number, chance in enumerate(chances) if chance >= threshold]
            found.append(
                {
                    "labels": [_name(classes, number) for number in above],
                    "label_numbers": above,
                    "probabilities": [chances[number] for number in above],
                }
            )
        return found

    fields: dict[str, ValueType] = {"labels": "texts", "label_numbers": "ints", "probabilities": "floats"}
    return OutputKind(fields=fields, label="label_numbers", read=read, classes=classes)


def _numbers(mean: float | tuple[float, ...] | None, std: float | tuple[float, ...] | None) -> OutputKind:
    """Numbers that the model gives as (number - mean) / std; None of data of one's own, which are as the model gives them."""
    several = mean is None or isinstance(mean, tuple)

    def read(outputs: Any, _batch: Batch) -> list[Values]:
        predicted = dense_logits(outputs).double().cpu()
        predicted = predicted.reshape(len(predicted), -1)
        expected = predicted.shape[1] if mean is None else len(mean) if isinstance(mean, tuple) else 1
        if predicted.shape[1] != expected:
            raise _unfit(f"outputs {list(predicted.shape)}", f"{expected} numbers a sample")
        if mean is not None:
            predicted = predicted * torch.tensor(std, dtype=torch.float64) + torch.tensor(mean, dtype=torch.float64)
        return [{"numbers": row} if several else {"number": row[0]} for row in predicted.tolist()]

    fields: dict[str, ValueType] = {"numbers": "floats"} if several else {"number": "float"}
    return OutputKind(fields=fields, label="numbers" if several else "number", read=read)


def _words(classes: tuple[str, ...]) -> OutputKind:
    """A label for each word: that of its first token, whose target is the number of the word; None for words cut off."""

    def read(outputs: Any, batch: Batch) -> list[Values]:
        logits = _rows(outputs, 3)
        _check_count(logits, classes)
        chances, numbers = torch.softmax(logits.float(), -1).max(-1)
        found: list[Values] = []
        for of_tokens, labels, word_of in zip(
            chances.tolist(), numbers.tolist(), batch["targets"].tolist(), strict=True
        ):
            firsts = [token for token, word in enumerate(word_of) if word >= 0]
            found.append({"numbers": [labels[at] for at in firsts], "chances": [of_tokens[at] for at in firsts]})
        return found

    def finish(parts: Sequence[Values], sample: Sample) -> Values:
        words, numbers = split_words(text_of(sample["words"])), parts[0]["numbers"]
        cut = len(words) - len(numbers)
        return {
            "words": words,
            "labels": [*(classes[number] for number in numbers), *[None] * cut],
            "label_numbers": [*numbers, *[None] * cut],
            "probabilities": [*parts[0]["chances"], *[None] * cut],
        }

    fields: dict[str, ValueType] = {
        "words": "texts",
        "labels": "texts",
        "label_numbers": "ints",
        "probabilities": "floats",
    }
    return OutputKind(fields=fields, label="label_numbers", read=read, finish=finish, classes=classes)


def _language_model() -> OutputKind:
    """The loss of a text, of all of its windows together, as ``next_token`` has it."""

    def read(outputs: Any, batch: Batch) -> list[Values]:
        logits, found = find_logits(outputs), list[Values]()
        for row in range(len(find_targets(batch))):
            part = slice(row, row + 1)
            own = {name: batch[name][part] for name in ("targets", "weights") if name in batch}
            of_row = logits._replace(hidden=logits.hidden[part]) if isinstance(logits, LazyLogits) else logits[part]
            loss, weight = next_token(of_row, own)
            sizes = batch.get("target_bytes")
            num_bytes = 0.0 if sizes is None else float(sizes[row].sum())
            found.append({"loss": float(loss), "tokens": float(weight), "bytes": num_bytes})
        return found

    def finish(parts: Sequence[Values], _sample: Sample) -> Values:
        loss, tokens, num_bytes = (sum(part[name] for part in parts) for name in ("loss", "tokens", "bytes"))
        mean = loss / tokens if tokens else None
        return {
            "loss": mean,
            "perplexity": None if mean is None else math.exp(min(mean, 700.0)),
            "bits_per_byte": loss / math.log(2) / num_bytes if num_bytes else None,
            "tokens": round(tokens),
        }

    fields: dict[str, ValueType] = {"loss": "float", "perplexity": "float", "bits_per_byte": "float", "tokens": "int"}
    return OutputKind(fields=fields, label="loss", read=read, finish=finish)


def _masked(tokenizer: Tokenizer, top_k: int) -> OutputKind:
    """The likeliest token in place of each one that is hidden."""
    fields: dict[str, ValueType] = {"fillings": "texts", "filling_tokens": "ints", "probabilities": "floats"}
    if top_k > 1:
        fields |= {"top_fillings": "texts of each", "top_probabilities": "floats of each"}

    def read(outputs: Any, batch: Batch) -> list[Values]:
        logits, found = find_logits(outputs), list[Values]()
        for row, hidden in enumerate(batch["tokens"] == tokenizer.mask):
            if isinstance(logits, LazyLogits):
                chosen = logits._replace(hidden=logits.hidden[row, hidden]).logits()
            else:
                chosen = logits[row, hidden]
            # the table of a model may have more rows than there are tokens, and no text has the mark itself
            chances = torch.softmax(chosen.float(), -1)[:, : tokenizer.vocab_size]
            best, tokens = chances.topk(min(max(1, top_k), chances.shape[-1]), -1)
            texts = [[tokenizer.decode([token]) for token in of_mask] for of_mask in tokens.tolist()]
            values: Values = {
                "fillings": [of_mask[0] for of_mask in texts],
                "filling_tokens": tokens[:, 0].tolist(),
                "probabilities": best[:, 0].tolist(),
            }
            found.append(values | ({"top_fillings": texts, "top_probabilities": best.tolist()} if top_k > 1 else {}))
        return found

    return OutputKind(fields=fields, label="filling_tokens", read=read)


def _outputs() -> OutputKind:
    """What the model returned, as it is: of data and an objective of one's own it is not known what it means."""

    def read(outputs: Any, _batch: Batch) -> list[Values]:
        given = dense_logits(outputs).double()
        given = given[:, None] if given.dim() == 1 else given
        return [{"outputs": row.flatten().tolist(), "shape": list(row.shape)} for row in given]

    return OutputKind(fields={"outputs": "floats", "shape": "ints"}, label="outputs", read=read)


def _rows(outputs: Any, dims: int) -> Tensor:
    logits = dense_logits(outputs)
    if logits.dim() != dims:
        raise _unfit(f"outputs {list(logits.shape)}", f"logits of {dims} dims, the last of them the classes")
    return logits


def _check_count(logits: Tensor, classes: tuple[str, ...]) -> None:
    if classes and logits.shape[-1] != len(classes):
        raise _unfit(f"outputs {list(logits.shape)} for {len(classes)} classes", f"{len(classes)} logits a sample")


def _name(classes: tuple[str, ...], number: int) -> str:
    return classes[number] if classes else str(number)


def _unfit(given: str, nearest: str) -> DataError:
    return DataError(
        given=f"a model with {given}",
        rule="its outputs are read as the task and the objective of the run say",
        consequence="nothing was predicted",
        nearest=f"a model with {nearest}",
    )
