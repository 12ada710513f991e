"""Settings of the preparation of data sets: the sections of a recipe, ``clean.toml``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from unisono.config import option
from unisono.config.fields import options_repr
from unisono.config.values import encode, toml_value
from unisono.errors import ConfigError, Problem, inert_problem

MASK_KINDS: tuple[str, ...] = ("secret", "email", "iban", "card", "phone", "ip")


@dataclass(frozen=True, kw_only=True, slots=True)
class NormalizeOptions:
    """Text normalization."""

    __repr__ = options_repr

    enabled: bool = option(
        True, "Composed characters, one kind of line end, no control characters, no blanks at line ends."
    )
    repairs_encoding: bool = option(
        False, "Mend UTF-8 that was decoded as another encoding, by ftfy.", applies_with="normalize.enabled"
    )

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Settings of a step that is off."""
        if not self.enabled:
            yield from _inert(self, _changed(self), "with enabled = false")


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterOptions:
    """Limits of text that is kept (Gopher, Rae et al. 2021); 0 = no limit."""

    __repr__ = options_repr

    enabled: bool = option(True, "Drop documents that fail a limit below.")
    min_words: int = option(
        50,
        "Minimum number of words; a character of a script without spaces, such as Chinese, is one. 0 = no limit, here and below.",
        ge=0,
    )
    max_words: int = option(100_000, "Maximum number of words.", ge=0)
    min_mean_word_chars: float = option(
        3.0,
        "Minimum mean word length in characters; not checked where most words are in scripts without spaces.",
        ge=0,
    )
    max_mean_word_chars: float = option(10.0, "Maximum mean word length in characters.", ge=0)
    max_symbol_ratio: float = option(0.1, "Number of # and of ellipses over the number of words.", ge=0)
    max_bullet_line_frac: float = option(0.9, "Share of lines that begin with a bullet.", ge=0, le=1)
    max_ellipsis_line_frac: float = option(0.3, "Share of lines that end with an ellipsis.", ge=0, le=1)
    min_alphabetic_word_frac: float = option(0.8, "Share of words that have a letter.", ge=0, le=1)
    max_duplicate_line_frac: float = option(0.3, "Share of lines that are the same as one before them.", ge=0, le=1)
    max_top_bigram_frac: float = option(
        0.2, "Share of characters covered by the repeated word pair that covers the most.", ge=0, le=1
    )
    max_duplicate_5gram_frac: float = option(
        0.15, "Share of characters in sequences of five words that occurred before.", ge=0, le=1
    )
    languages: tuple[str, ...] = option((), "Codes of the languages that are kept, as en; empty = all.")
    min_language_prob: float = option(
        0.5,
        "Minimum probability of the detected language.",
        applies_with="filter.languages",
        ge=0,
        le=1,
    )

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Settings of a step that is off, or of languages that are not looked for."""
        if not self.enabled:
            yield from _inert(self, _changed(self), "with enabled = false")
        elif not self.languages:
            yield from _inert(self, _changed(self) & {"min_language_prob"}, "without languages")


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskOptions:
    """Personal data and secret keys, replaced by their kind: ``<EMAIL>``."""

    __repr__ = options_repr

    kinds: tuple[str, ...] = option((), "Kinds that are replaced; empty = none.", choices=MASK_KINDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecontaminateOptions:
    """Documents that quote a benchmark."""

    __repr__ = options_repr

    against: tuple[str, ...] = option(
        (),
        "Files and folders of benchmarks, with their text in the field of the data's; relative to the recipe's file, of --set to "
        "the current folder; empty = none.",
    )
    columns: tuple[str, ...] = option(
        (),
        "Fields of the benchmarks' texts, as question and answer, each of which is compared by itself; empty = the data's.",
        applies_with="decontaminate.against",
    )
    ngram: int = option(
        13, "Words in a row that a document may not share with them.", applies_with="decontaminate.against", ge=5, le=50
    )

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Settings without benchmarks."""
        if not self.against:
            yield from _inert(self, _changed(self), "without against")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions:
    """Limits of images that are kept; 0 = no limit."""

    __repr__ = options_repr

    enabled: bool = option(True, "Drop images that cannot be read or fail a limit below.")
    checks_format: bool = option(True, "Drop images whose file name has the suffix of another format.")
    min_side_px: int = option(32, "Pixels of the shorter side.", ge=0)
    min_contrast: float = option(4.0, "Standard deviation of the grey values, of 0 to 255.", ge=0, le=255)
    max_blur: float = option(
        0.65,
        "Blur (Crete et al. 2007) at 256 px: 0 sharp, 1 blurred.",
        ge=0,
        le=1,
    )

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Settings of a step that is off."""
        if not self.enabled:
            yield from _inert(self, _changed(self), "with enabled = false")


@dataclass(frozen=True, kw_only=True, slots=True)
class DuplicateOptions:
    """Duplicate detection."""

    __repr__ = options_repr

    enabled: bool = option(True, "Drop documents that are the same as one before them.")
    near: float = option(0.8, "Minimum Jaccard similarity of two duplicates; 0 compares exact text only.", ge=0, le=1)
    ngram: int = option(5, "Words per shingle.", applies_with="dedup.near above 0", ge=1, le=50)
    num_perm: int = option(128, "Number of MinHash permutations.", applies_with="dedup.near above 0", ge=16, le=1024)
    seed: int = option(0, "Seed of the MinHash hash functions.", applies_with="dedup.near above 0", ge=0)
    image_near: float = option(
        0.85,
        "Correlation of the gradients of thumbnails from which on images are the same; 0 = only the same file.",
        applies_with="images",
        ge=0,
        le=1,
    )
    crops: bool | None = option(
        None,
        "Whether a part of an image counts as the image; none = yes for leak and split, else no.",
        applies_with="images and dedup.image_near above 0",
    )

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Settings of a step that is off, or of a comparison that is not made."""
        if not self.enabled:
            yield from _inert(self, _changed(self), "with enabled = false")
            return
        if self.near == 0:
            yield from _inert(self, _changed(self) & {"ngram", "num_perm", "seed"}, "with near = 0")
        if self.image_near == 0:
            yield from _inert(self, _changed(self) & {"crops"}, "with image_near = 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanRecipe:
    """Steps in the order in which they are taken; each sees what the step before it left.

    Attributes:
        normalize: Text normalization.
        filter: Limits of text that is kept.
        mask: Personal data and secrets.
        decontaminate: Benchmarks that documents may not quote.
        images: Limits of images that are kept.
        dedup: Duplicates and near-duplicates.
    """

    normalize: NormalizeOptions = field(default_factory=NormalizeOptions)
    filter: FilterOptions = field(default_factory=FilterOptions)
    mask: MaskOptions = field(default_factory=MaskOptions)
    decontaminate: DecontaminateOptions = field(default_factory=DecontaminateOptions)
    images: ImageOptions = field(default_factory=ImageOptions)
    dedup: DuplicateOptions = field(default_factory=DuplicateOptions)


def _changed(options: Any) -> set[str]:
    """Names of settings that have another value than by default."""
    return {each.name for each in fields(options) if getattr(options, each.name) != each.default} - {"enabled"}


def _inert(options: Any, names: set[str], beside: str) -> Iterator[tuple[str, Problem]]:
    for name in sorted(names):
        value = getattr(options, name)
        yield name, inert_problem(f"{name} = {value} {beside}", "each setting of a recipe acts", f"without {name}")


def only_dedup(options: DuplicateOptions) -> CleanRecipe:
    """The recipe that removes duplicates and changes nothing else."""
    return CleanRecipe(
        normalize=NormalizeOptions(enabled=False),
        filter=FilterOptions(enabled=False),
        images=ImageOptions(enabled=False),
        dedup=options,
    )


def with_crops(options: DuplicateOptions, content: str) -> DuplicateOptions:
    """The options of a comparison that looks for parts of images, unless ``crops`` says otherwise."""
    return replace(options, crops=True) if content == "images" and options.crops is None else options


def require_settings_of(recipe: CleanRecipe, content: str, *, draws: bool = False) -> None:
    """Raise ConfigError if a recipe for texts or images sets what is only for the other.

    Args:
        recipe: The recipe. That of ``only_dedup`` turns off the steps of both.
        content: ``text`` or ``images``.
        draws: Whether ``dedup.seed`` draws documents, too, and is not of the signatures of texts alone.
    """
    unset = CleanRecipe()
    is_dedup_alone = recipe == only_dedup(recipe.dedup)
    given: list[str] = []
    for section in fields(recipe):
        options, defaults = getattr(recipe, section.name), getattr(unset, section.name)
        for setting in fields(options):
            is_of_images = section.name == "images" or setting.name in ("image_near", "crops")
            is_of_both = section.name == "dedup" and (setting.name == "enabled" or (draws and setting.name == "seed"))
            value = getattr(options, setting.name)
            # without near and image_near only exact copies, of texts and images alike
            is_off = not value and (
                setting.name in ("near", "image_near") or (is_dedup_alone and setting.name == "enabled")
            )
            is_default = value == getattr(defaults, setting.name)
            if not (is_default or is_off or is_of_both) and is_of_images != (content == "images"):
                given.append(
                    _flag(setting.name, value)
                    if is_dedup_alone
                    else f"{section.name}.{setting.name} = {toml_value(encode(value))}"
                )
    if given and is_dedup_alone:
        raise ConfigError(
            given=f"{', '.join(given)}, for {content}",
            rule=f"--near, --ngram, --num-perm{'' if draws else ', --seed'} are for texts; --image-near, --crops for images",
            consequence="nothing was read",
            nearest="without these options",
        )
    if given:
        raise ConfigError(
            given=f"{', '.join(given)}, for {content}",
            rule="normalize, filter, mask, decontaminate and most of dedup are for texts; images, dedup.image_near and"
            " dedup.crops for images",
            consequence="nothing was read",
            nearest="without these settings",
        )


def _flag(name: str, value: Any) -> str:
    """A setting of ``DuplicateOptions`` as the option of a command."""
    if name == "crops":
        return "--crops" if value else "--no-crops"
    return f"--{name.replace('_', '-')} {value}"
