"""Masked language modelling (Devlin et al. 2019): some tokens of a text are hidden and become its targets.

Of 20 chosen tokens about 16 become the mask token, 2 a random token and 2 stay, so that the model cannot rely on seeing a mask.
All randomness comes from the given generator. A loader keys it by sample and epoch, independent of rank and resume.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unisono.data.dataset import Batch
from unisono.data.loading.batch_builder import Transform
from unisono.errors import DataError, Problem

_MASKED, _RANDOM = 0.8, 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskTokens:
    """A transform for ``BERT``. Of a text's n eligible tokens it chooses max(1, round(rate · n)).

    A sample has ``tokens`` int64 [T] and, if padded, ``mask`` bool [T], true for tokens of the text; ``before`` may be a
    ``TextTransform`` that makes them. The result has

        tokens     int64    [T]  with the chosen ones hidden
        padding    bool     [T]  true for a token of the text, false for padding
        predicted  int64    [P]  positions of the chosen tokens, in order; P = max(1, round(rate · T)) for any text
        targets    int64    [P]  the original tokens
        weights    float32  [P]  1, or 0 where fewer tokens were chosen

    and other entries of the sample. ``special`` ids are never chosen. A random token is any of ``vocab_size``.
    Raises DataError for a rate outside (0, 1), a mask or special id outside the vocabulary, a sample without tokens.
    """

    mask_id: int
    vocab_size: int
    rate: float = 0.15
    special: tuple[int, ...] = ()
    before: Transform | None = None

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        if not 0 < self.rate < 1:
            problems.append(
                Problem(
                    given=f"rate = {self.rate}",
                    rule="some tokens are hidden, and the others are left to predict them from",
                    consequence="there would be nothing to learn",
                    nearest="rate=0.15",
                )
            )
        outside = [token for token in (self.mask_id, *self.special) if not 0 <= token < self.vocab_size]
        if outside:
            problems.append(
                Problem(
                    given=f"token ids {', '.join(map(str, outside))} with vocab_size {self.vocab_size}",
                    rule="mask_id and special are ids of the vocabulary",
                    consequence="a token would have no embedding",
                    nearest=f"vocab_size={max(outside) + 1}, in the model too"
                    if max(outside) >= self.vocab_size
                    else f"ids of 0..{self.vocab_size - 1}",
                )
            )
        if problems:
            raise DataError(*problems)

    def __call__(self, sample: Batch, rng: np.random.Generator) -> Batch:
        """The sample with some tokens hidden, and their targets."""
        if self.before is not None:
            sample = self.before(sample, rng)
        tokens = sample.get("tokens")
        if tokens is None or tokens.ndim != 1:
            raise DataError(
                given=f"a sample with {', '.join(f'{name} {a.dtype}{list(a.shape)}' for name, a in sample.items())}",
                rule="a sample has its tokens under 'tokens' as int64 [T]",
                consequence="there is nothing to hide",
                nearest="before=TextTransform(…) for samples with 'text'",
            )
        padding = sample["mask"] if "mask" in sample else np.ones(tokens.size, np.bool_)
        eligible = np.flatnonzero(padding & ~np.isin(tokens, self.special))
        most = self._share(tokens.size)
        chosen = np.sort(rng.permutation(eligible)[: self._share(eligible.size)])
        hidden = tokens.copy()
        draw = rng.random(chosen.size)
        hidden[chosen[draw < _MASKED]] = self.mask_id
        randomized = chosen[(draw >= _MASKED) & (draw < _MASKED + _RANDOM)]
        hidden[randomized] = rng.integers(0, self.vocab_size, randomized.size)
        predicted, targets = np.zeros(most, np.int64), np.zeros(most, np.int64)
        predicted[: chosen.size], targets[: chosen.size] = chosen, tokens[chosen]
        rest = {name: value for name, value in sample.items() if name != "mask"}
        return {
            **rest,
            "tokens": hidden,
            "padding": padding,
            "predicted": predicted,
            "targets": targets,
            "weights": (np.arange(most) < chosen.size).astype(np.float32),
        }

    def _share(self, tokens: int) -> int:
        return max(1, round(self.rate * tokens))
