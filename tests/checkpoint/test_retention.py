from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.checkpoint.folder import expired_checkpoints
from unisono.checkpoint.options import CheckpointOptions

SCORES = st.dictionaries(
    st.integers(0, 10**6), st.none() | st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=40
)
OPTIONS = st.builds(
    CheckpointOptions, keep_last=st.integers(1, 5), keep_every_steps=st.integers(0, 50), keep_best=st.integers(0, 4)
)


@settings(max_examples=300, deadline=None)
@given(scores=SCORES, options=OPTIONS)
def test_what_stays_is_what_was_asked_for_and_nothing_else(scores, options):
    gone = expired_checkpoints(scores, options)
    stays = set(scores) - set(gone)
    assert len(set(gone)) == len(gone) <= len(scores)
    assert gone == sorted(gone)
    assert max(scores) in stays
    newest = sorted(scores)[-options.keep_last :]
    periodic = [step for step in scores if options.keep_every_steps and step % options.keep_every_steps == 0]
    assert stays >= {*newest, *periodic}
    others = stays - {*newest, *periodic}
    assert len(others) <= options.keep_best
    finite = {step: score for step, score in scores.items() if score is not None and math.isfinite(score)}
    if finite and options.keep_best:
        assert any(finite.get(step) == min(finite.values()) for step in stays)
    assert all(step in finite for step in others)


@settings(max_examples=100, deadline=None)
@given(scores=SCORES, options=OPTIONS)
def test_a_second_pass_deletes_nothing(scores, options):
    left = {step: score for step, score in scores.items() if step not in expired_checkpoints(scores, options)}
    assert expired_checkpoints(left, options) == []


def test_steps_are_numbers_and_not_texts():
    scores = dict.fromkeys((10, 100, 1000, 9), None)
    assert expired_checkpoints(scores, CheckpointOptions(keep_last=2, keep_best=0)) == [9, 10]


def test_of_equal_scores_the_newer_stays():
    scores = {1: 0.5, 2: 0.5, 3: 0.7, 4: math.nan}
    assert expired_checkpoints(scores, CheckpointOptions(keep_last=1, keep_best=1)) == [1, 3]
