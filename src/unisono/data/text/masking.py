"""Masked language modelling (Devlin et al. 2019): some tokens of a text are hidden and become the targets.

Of 20 chosen tokens about 16 become the mask token, 2 a random token and 2 stay, so that the model cannot rely on seeing a mask.
All randomness comes from the given generator. A loader keys it by sample and epoch, independent of rank and resume.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from unisono.data.dataset import Batch
from unisono.data.loading.batch_builder import Transform
from unisono.errors import DataError, Problem

_MASKED, _RANDOM = 0.8, 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskTokens:
    """A loader's transform for masked language models (``BERT``): hides some tokens, which become targets.

    Of a text's n eligible tokens it chooses max(1, round(rate · n)) at random. Of 20 chosen tokens about 16 become
    ``mask_id``, 2 become a random id of the vocabulary, and 2 stay. A sample has ``tokens`` int64 [T] and, if padded,
    ``attention_mask`` int64 [T], 1 at tokens of the text. The result has the sample's other entries, and::

        tokens          int64    [T]  with the chosen ones hidden
        attention_mask  int64    [T]  1 at a token of the text, 0 at padding
        predicted       int64    [P]  positions of the chosen tokens, in order; P = max(1, round(rate · T)) for any text
        targets         int64    [P]  the original tokens
        weights         float32  [P]  1, or 0 where fewer tokens were chosen

    ``mapped(data, MaskTokens(…))`` is a data set for evaluation: it hides the same tokens of a sample each time.

    Attributes:
        mask_id: Id of the mask token.
        vocab_size: Number of ids; a random token is any of 0 to ``vocab_size`` - 1.
        rate: Share of the eligible tokens that is chosen, above 0 and below 1.
        special: Ids that are never chosen, such as separators.
        before: Transform applied to the sample first, such as a ``TextTransform`` that makes ``tokens``; it uses the
            same generator.

    Raises:
        DataError: The rate is out of range, a mask or special id is outside the vocabulary, or a sample has no tokens.

    Source:
        BERT: Devlin et al. 2019, arXiv:1810.04805.
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

    def __call__(self, sample: Batch, rng: np.random.Generator | None = None) -> Batch:
        """Return the sample with some tokens hidden, and their targets. Without ``rng`` they depend on the sample alone."""
        if rng is None:
            rng = np.random.default_rng([xxhash.xxh3_64_intdigest(sample[name].tobytes()) for name in sorted(sample)])
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
        attention_mask = sample["attention_mask"] if "attention_mask" in sample else np.ones(tokens.size, np.int64)
        eligible = np.flatnonzero(attention_mask.astype(np.bool_) & ~np.isin(tokens, self.special))
        max_chosen = self._share(tokens.size)
        chosen = np.sort(rng.permutation(eligible)[: self._share(eligible.size)])
        hidden = tokens.copy()
        uniform = rng.random(chosen.size)
        hidden[chosen[uniform < _MASKED]] = self.mask_id
        randomized = chosen[(uniform >= _MASKED) & (uniform < _MASKED + _RANDOM)]
        hidden[randomized] = rng.integers(0, self.vocab_size, randomized.size)
        predicted, targets = np.zeros(max_chosen, np.int64), np.zeros(max_chosen, np.int64)
        predicted[: chosen.size], targets[: chosen.size] = chosen, tokens[chosen]
        return {
            **sample,
            "tokens": hidden,
            "attention_mask": attention_mask,
            "predicted": predicted,
            "targets": targets,
            "weights": (np.arange(max_chosen) < chosen.size).astype(np.float32),
        }

    def _share(self, tokens: int) -> int:
        return max(1, round(self.rate * tokens))
