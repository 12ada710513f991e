"""Masked tokens: shares, places, targets, and that only the key of a sample decides."""

from __future__ import annotations

import numpy as np
import pytest

from unisono.data import Loader, MaskTokens, TextTransform, from_map_style, mapped
from unisono.data.tokens.tokenizer import ByteTokenizer
from unisono.errors import DataError

MASKING = MaskTokens(mask_id=257, vocab_size=260, special=(256,))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_chosen_tokens_are_the_targets_and_the_rest_stays() -> None:
    tokens = rng().integers(0, 256, 40)
    tokens[[0, 5]] = 256
    sample = {"tokens": tokens, "attention_mask": (np.arange(40) < 30).astype(np.int64), "label": np.array(3)}
    out = MASKING(sample, rng(1))
    assert {name: (v.dtype.name, v.shape) for name, v in out.items()} == {
        "tokens": ("int64", (40,)),
        "attention_mask": ("int64", (40,)),
        "predicted": ("int64", (6,)),
        "targets": ("int64", (6,)),
        "weights": ("float32", (6,)),
        "label": ("int64", ()),
    }
    assert out["weights"].tolist() == [1, 1, 1, 1, 0, 0]  # round(0.15 * 28)
    chosen = out["predicted"][:4]
    assert sorted(set(chosen.tolist())) == chosen.tolist()
    assert chosen.max() < 30
    assert not np.isin(chosen, [0, 5]).any()
    assert (out["targets"][:4] == tokens[chosen]).all()
    assert (np.delete(out["tokens"], chosen) == np.delete(tokens, chosen)).all()
    assert (tokens < 257).all(), "the sample given is left as it was"
    assert (out["attention_mask"] == sample["attention_mask"]).all()


def test_shares_are_the_papers() -> None:
    generator, kinds, places = rng(2), np.zeros(3), np.zeros(100)
    for _ in range(600):
        tokens = generator.integers(0, 256, 100)
        out = MASKING({"tokens": tokens}, generator)
        assert out["weights"].sum() == 15
        now = out["tokens"][out["predicted"]]
        places[out["predicted"]] += 1
        kinds += [(now == 257).sum(), ((now != 257) & (now != out["targets"])).sum(), (now == out["targets"]).sum()]
    assert kinds / 9000 == pytest.approx([0.8, 0.1, 0.1], abs=0.015)  # five standard deviations
    assert abs(places / 600 - 0.15).max() < 0.075


def test_a_short_text_has_one_target_and_an_empty_one_none() -> None:
    one = MASKING({"tokens": np.array([256, 7, 256]), "attention_mask": np.array([True, True, False])}, rng())
    assert (one["predicted"].tolist(), one["targets"].tolist(), one["weights"].tolist()) == ([1], [7], [1])
    none = MASKING({"tokens": np.array([256, 7]), "attention_mask": np.array([True, False])}, rng())
    assert none["weights"].tolist() == [0]
    assert none["tokens"].tolist() == [256, 7]


def test_texts_are_masked_alike_on_any_rank_and_anew_in_each_epoch() -> None:
    data = from_map_style([{"text": np.frombuffer(f"text {n} of ten".encode(), np.uint8)} for n in range(10)])
    masking = MaskTokens(mask_id=257, vocab_size=258, before=TextTransform(tokenizer=ByteTokenizer(), length=20))

    def micro(rank: int, world: int, step: int) -> dict[str, list]:
        loader = Loader(data, seed=1, global_batch=10, micro_batch=10, rank=rank, world_size=world, transform=masking)
        return {name: tensor.tolist() for name, tensor in loader.batch(step).micro_batches[0].items()}

    for name, rows in micro(0, 1, 0).items():
        assert micro(0, 2, 0)[name] + micro(1, 2, 0)[name] == rows, name
    first, second = micro(0, 1, 0), micro(0, 1, 1)
    assert sorted(first["predicted"]) != sorted(second["predicted"])
    assert sum(map(sum, first["attention_mask"])) == 10 * len("text 0 of ten")


def test_settings_and_samples_that_make_no_sense() -> None:
    with pytest.raises(DataError) as caught:
        MaskTokens(mask_id=257, vocab_size=257, rate=1.0)
    assert str(caught.value) == (
        "2 problems\n"
        "1. rate = 1.0\n"
        "  rule: some tokens are hidden, and the others are left to predict them from\n"
        "  so:   there would be nothing to learn\n"
        "  try:  rate=0.15\n"
        "2. token ids 257 with vocab_size 257\n"
        "  rule: mask_id and special are ids of the vocabulary\n"
        "  so:   a token would have no embedding\n"
        "  try:  vocab_size=258, in the model too"
    )
    with pytest.raises(DataError, match=r"ids of 0\.\.9"):
        MaskTokens(mask_id=3, vocab_size=10, special=(-1,))
    with pytest.raises(DataError, match=r"a sample with text uint8\[3\]"):
        MASKING({"text": np.zeros(3, np.uint8)}, rng())


def test_a_mapped_data_set_hides_the_same_tokens_each_time() -> None:
    samples = [{"tokens": np.random.default_rng(number).integers(0, 256, 40)} for number in range(6)]
    first, again = (mapped(samples, MASKING).read(np.arange(6)) for _ in range(2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    turned = mapped(samples[::-1], MASKING).read(np.arange(6))
    assert np.array_equal(turned["predicted"][::-1], first["predicted"])
    # samples differ in what they hide
    assert len({tuple(row) for row in first["predicted"].tolist()}) == 6
    texts = MaskTokens(mask_id=257, vocab_size=258, before=TextTransform(tokenizer=ByteTokenizer(), length=20))
    rows = mapped([{"text": np.frombuffer(b"a text of some bytes", np.uint8)}], texts).read(np.arange(1))
    assert int(rows["weights"].sum()) == 3
