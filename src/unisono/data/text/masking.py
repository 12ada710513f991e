"""Masked tokens to be predicted (Devlin et al. 2019): some of a text's tokens are hidden, and are its targets.

Of 20 chosen tokens about 16 become the mask, 2 a random token and 2 stay, so that the model cannot rely on seeing a mask. What is
random comes from the generator given, which a loader keys by sample: alike on any rank and after any resume, anew in each epoch.
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
    """A transform for ``BERT``. Of a text with n tokens that may be chosen max(1, round(rate · n)) are.

    A sample has ``tokens`` int64 [T] and, where it is filled up, ``mask`` bool [T], true for what is text; ``before`` may be a
    ``TextTransform`` that makes them. The result has

        tokens     int64    [T]  with the chosen ones hidden
        padding    bool     [T]  true for a real token, false for filling
        predicted  int64    [P]  places of the chosen tokens, in order; P = max(1, round(rate · T)) whatever the text
        targets    int64    [P]  what was there
        weights    float32  [P]  1, or 0 where fewer were chosen

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
                    rule="some tokens are hidden, and some are left to tell what they were",
                    consequence="there would be nothing to learn",
                    nearest="rate=0.15",
                )
            )
        strange = [each for each in (self.mask_id, *self.special) if not 0 <= each < self.vocab_size]
        if strange:
            problems.append(
                Problem(
                    given=f"token ids {', '.join(map(str, strange))} with vocab_size {self.vocab_size}",
                    rule="mask_id and special are ids of the vocabulary",
                    consequence="a token would have no embedding",
                    nearest=f"vocab_size={max(strange) + 1}, in the model too"
                    if max(strange) >= self.vocab_size
                    else f"ids of 0..{self.vocab_size - 1}",
                )
            )
        if problems:
            raise DataError(*problems)

    def __call__(self, sample: Batch, rng: np.random.Generator) -> Batch:
        """The sample with tokens hidden, and what they were."""
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
        able = np.flatnonzero(padding & ~np.isin(tokens, self.special))
        most = self._share(tokens.size)
        chosen = np.sort(rng.permutation(able)[: self._share(able.size)])
        hidden = tokens.copy()
        draw = rng.random(chosen.size)
        hidden[chosen[draw < _MASKED]] = self.mask_id
        strange = chosen[(draw >= _MASKED) & (draw < _MASKED + _RANDOM)]
        hidden[strange] = rng.integers(0, self.vocab_size, strange.size)
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
