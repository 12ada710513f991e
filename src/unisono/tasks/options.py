"""Sections of a configuration that choose a task: what is predicted from what. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from unisono.config import option
from unisono.config.fields import options_repr
from unisono.errors import Problem, inert_problem

Kind = Literal["language_model", "masked_language_model", "image", "text", "table", "sequence_labelling"]
LANGUAGE_MODELS = ("language_model", "masked_language_model")
PREDICTORS = ("image", "text", "table")

_CLASSES = "task.kind image, text or table with task.predicts class, or sequence_labelling"
_NUMBER = "task.predicts number"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """What a run learns to predict, and from which columns of its data."""

    __repr__ = options_repr

    kind: Kind = option(
        "language_model",
        "language_model, masked_language_model, sequence_labelling (a label for each word), or what a target is predicted "
        "from: image, text or table.",
    )
    predicts: Literal["class", "number"] = option(
        "class",
        "The target of a sample: one of several classes, or a number (or several).",
        applies_with="task.kind image, text or table",
    )
    inputs: tuple[str, ...] = option(
        (),
        "Columns that the model sees; empty = image, text or words, and for tables all but the target.",
        applies_with="data.train",
    )
    target: str = option(
        "",
        "Column to predict; empty = the first of targets, target, label, labels, tags, ner_tags and cls.",
        applies_with="task.kind image, text, table or sequence_labelling",
    )
    classes: tuple[str, ...] = option(
        (),
        "Names of the classes in the order of their numbers; empty = those of the training data, sorted.",
        applies_with=_CLASSES,
    )
    target_mean: float | tuple[float, ...] | None = option(
        None,
        "Mean of the number to predict, or of each of several, which the model learns standardised; none = of the training data.",
        applies_with=_NUMBER,
    )
    target_std: float | tuple[float, ...] | None = option(
        None,
        "Standard deviation of the number to predict, or of each of several; none = of the training data.",
        applies_with=_NUMBER,
        gt=0.0,
    )
    categories: tuple[str, ...] = option(
        (), "Columns of inputs that are categories; empty = those with text.", applies_with="task.kind table"
    )
    input_mean: tuple[float, ...] = option(
        (), "Mean of each input column of numbers; empty = of the training data.", applies_with="task.kind table"
    )
    input_std: tuple[float, ...] = option(
        (),
        "Standard deviation of each input column of numbers; empty = of the training data.",
        applies_with="task.kind table",
        gt=0.0,
    )
    balance: bool = option(False, "Read each class equally often.", applies_with="task.predicts class")
    mask_frac: float = option(
        0.15, "Share of the tokens that are hidden.", applies_with="task.kind masked_language_model", gt=0.0, lt=1.0
    )

    @property
    def has_classes(self) -> bool:
        """Whether the model chooses among classes other than tokens."""
        return self.kind == "sequence_labelling" or (self.kind in PREDICTORS and self.predicts == "class")

    @property
    def num_numbers(self) -> int:
        """How many numbers a sample of a resolved task has as its target; 1 where it has no numbers."""
        return len(self.target_mean) if isinstance(self.target_mean, tuple) else 1

    @property
    def has_numbers(self) -> bool:
        """Whether the model predicts numbers."""
        return self.kind in PREDICTORS and self.predicts == "number"

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Settings that the kind of task does not read, and unusable ones, by field name."""
        acts = {
            "predicts": self.kind in PREDICTORS,
            "target": self.kind not in LANGUAGE_MODELS,
            "classes": self.has_classes,
            "target_mean": self.has_numbers,
            "target_std": self.has_numbers,
            "categories": self.kind == "table",
            "input_mean": self.kind == "table",
            "input_std": self.kind == "table",
            "balance": self.kind in PREDICTORS and self.predicts == "class",
            "mask_frac": self.kind == "masked_language_model",
        }
        what = f"task.kind {self.kind!r}" + (" and predicts 'number'" if self.has_numbers else "")
        yield from inert_settings(self, TaskOptions(), acts, what)
        repeated = sorted({name for name in self.classes if self.classes.count(name) > 1})
        if repeated:
            yield (
                "classes",
                Problem(
                    given=f"classes with {repeated[0]!r} twice",
                    rule="each class has one name and one number",
                    consequence="the class could have two numbers",
                    nearest="each name once",
                ),
            )
        one_alone = [("target", _count(self.target_mean) != _count(self.target_std))]
        one_alone += [("input", len(self.input_mean) != len(self.input_std))]
        for what in (name for name, wrong in one_alone if wrong):
            mean, std = getattr(self, f"{what}_mean"), getattr(self, f"{what}_std")
            yield (
                f"{what}_mean",
                Problem(
                    given=f"{what}_mean {mean} with {what}_std {std}",
                    rule="numbers are standardised by a mean and a standard deviation each, or by those of the training data",
                    consequence="some of them would have no effect",
                    nearest="as many of both, or neither",
                ),
            )


def _count(numbers: float | tuple[float, ...] | None) -> int | None:
    """Of how many numbers a mean or standard deviation is, None for none: 0 stands for a single number."""
    return len(numbers) if isinstance(numbers, tuple) else None if numbers is None else 0


def updated_task(task: TaskOptions, found: Mapping[str, Any]) -> TaskOptions:
    """``task`` with the fields ``found``, as JSON has them."""
    values: dict[str, Any] = dict(found)
    return replace(task, **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions:
    """How images are decoded and augmented (``task.kind`` image)."""

    __repr__ = options_repr

    size: int = option(224, "Height and width of the model's images in pixels.", applies_with="task.kind image", ge=8)
    color: Literal["rgb", "gray"] = option("rgb", "rgb = 3 channels, gray = 1.", applies_with="task.kind image")
    crop: Literal["random", "center"] = option(
        "random",
        "Training images: random = a box of random size and place, center = as in evaluation.",
        applies_with="task.kind image",
    )
    min_crop_frac: float = option(
        0.08,
        "Smallest area of a random crop, as a share of the image.",
        applies_with="task.kind image with image.crop random",
        gt=0.0,
        le=1.0,
    )
    center_frac: float = option(
        0.875,
        "Side of the centre crop, as a share of the image's shorter side.",
        applies_with="task.kind image",
        gt=0.0,
        le=1.0,
    )
    flip: float = option(0.5, "Probability of a left-right flip.", applies_with="task.kind image", ge=0.0, le=1.0)
    rotate_degrees: float = option(
        0.0, "Largest random rotation in degrees; 0 = none.", applies_with="task.kind image", ge=0.0, le=180.0
    )
    jitter: float = option(
        0.0,
        "Largest random change of brightness, contrast and saturation; 0 = none.",
        applies_with="task.kind image",
        ge=0.0,
        le=1.0,
    )
    erase: float = option(
        0.0, "Probability that a random box is set to the mean colour.", applies_with="task.kind image", ge=0.0, le=1.0
    )
    mixup_alpha: float = option(
        0.0,
        "Mixup of two images and their classes with this alpha; 0 = none.",
        applies_with="task.kind image with task.predicts class",
        ge=0.0,
    )
    cutmix_alpha: float = option(
        0.0,
        "CutMix of two images and their classes with this alpha; 0 = none.",
        applies_with="task.kind image with task.predicts class",
        ge=0.0,
    )
    mean: tuple[float, ...] = option(
        (), "Mean of each channel, of 0 to 1; empty = ImageNet's.", applies_with="task.kind image"
    )
    std: tuple[float, ...] = option(
        (), "Standard deviation of each channel; empty = ImageNet's.", applies_with="task.kind image", gt=0.0
    )

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Problems between two fields, by field name."""
        yield from inert_settings(self, ImageOptions(), {"min_crop_frac": self.crop == "random"}, "image.crop 'center'")
        channels = 3 if self.color == "rgb" else 1
        if {len(self.mean), len(self.std)} not in ({0}, {channels}):
            yield (
                "mean",
                Problem(
                    given=f"mean of {len(self.mean)} and std of {len(self.std)} values with color {self.color!r}",
                    rule=f"each has a value for each of the {channels} channels, or both are empty",
                    consequence="the images cannot be normalised",
                    nearest=f"{channels} values each",
                ),
            )
        if self.mixup_alpha and self.cutmix_alpha:
            yield (
                "mixup_alpha",
                Problem(
                    given=f"mixup_alpha {self.mixup_alpha} with cutmix_alpha {self.cutmix_alpha}",
                    rule="two images are blended or exchange a box, not both",
                    consequence="it is unclear which of them to do",
                    nearest="one of them",
                ),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """Random edits of training texts (``task.kind`` text), after EDA (Wei and Zou 2019)."""

    __repr__ = options_repr

    synonyms: str = option(
        "", "A .json or .tsv file of synonyms; empty = none.", applies_with="task.kind text with text.replace above 0"
    )
    replace: float = option(
        0.0, "Share of the words that are replaced by a synonym.", applies_with="task.kind text", ge=0.0, le=1.0
    )
    swap: float = option(0.0, "Share of the words that change places.", applies_with="task.kind text", ge=0.0, le=1.0)
    delete: float = option(0.0, "Probability that a word is deleted.", applies_with="task.kind text", ge=0.0, lt=1.0)

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Problems between two fields, by field name."""
        if bool(self.synonyms) != bool(self.replace):
            yield (
                "synonyms",
                Problem(
                    given=f"synonyms {self.synonyms!r} with replace {self.replace}",
                    rule="words are replaced by those of a file of synonyms",
                    consequence="nothing would be replaced",
                    nearest="text.synonyms=synonyms.tsv and text.replace=0.1, or neither",
                ),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraOptions:
    """Low-rank adapters of a model that is fine-tuned (Hu et al. 2021), by the package peft."""

    __repr__ = options_repr

    rank: int = option(
        0, "Rank of the adapters; 0 = none, all weights are trained.", applies_with="model.pretrained", ge=0
    )
    alpha: float = option(
        16.0, "The adapters are multiplied by alpha / rank.", applies_with="lora.rank above 0", gt=0.0
    )
    dropout: float = option(
        0.0, "Dropout probability before each adapter.", applies_with="lora.rank above 0", ge=0.0, lt=1.0
    )
    modules: tuple[str, ...] = option(
        (),
        "Names of the linear layers that get adapters; empty = peft's choice for the model.",
        applies_with="lora.rank above 0",
    )

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Settings of adapters where there are none, by field name."""
        acts: dict[str, bool] = {name: self.rank > 0 for name in ("alpha", "dropout", "modules")}
        yield from inert_settings(self, LoraOptions(), acts, "lora.rank 0")


def inert_settings(options: Any, unset: Any, acts: Mapping[str, bool], beside: str) -> Iterator[tuple[str, Problem]]:
    """A problem for each field of ``options`` that differs from ``unset`` where ``acts`` says that nothing reads it."""
    for name, is_read in acts.items():
        value = getattr(options, name)
        if not is_read and value != getattr(unset, name):
            yield (
                name,
                inert_problem(f"{name} {value!r} with {beside}", "nothing reads it there", f"leave {name} out"),
            )
