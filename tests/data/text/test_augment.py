"""Words change at the rates asked for, by the generator given, and texts arrive encoded to one length."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.dataset import from_map_style
from unisono.data.loading.loader import Loader
from unisono.data.text.augment import TextAugment, TextTransform, load_synonyms
from unisono.data.tokens.tokenizer import ByteTokenizer
from unisono.errors import DataError

WORDS = "The quick brown fox, it's said, jumps over a well-known lazy dog."
LEXICON = {"quick": ["fast", "rapid", "speedy"], "dog": ["hound"], "the": ["this"], "fox": ["vulpine animal"]}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’-]\w+)*", text)


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(alphabet=st.sampled_from("ab é'-_7漢 \n.,!"), max_size=40),
    replace=st.sampled_from([0.0, 0.5, 1.0]),
    swap=st.sampled_from([0.0, 0.5, 1.0]),
    delete=st.sampled_from([0.1, 0.9, 1.0]),
    seed=st.integers(0, 99),
)
def test_a_text_is_never_emptied_and_its_rim_stays(
    text: str, replace: float, swap: float, delete: float, seed: int
) -> None:
    synonyms = {"a": ["one"], "ab": ["two", "three"]} if replace else {}
    augment = TextAugment(replace=replace, swap=swap, delete=delete, synonyms=synonyms)
    got = augment(text, rng(seed))
    assert got == augment(text, rng(seed))
    found = list(re.finditer(r"\w+(?:['’-]\w+)*", text))
    if not found:
        assert got == text
        return
    assert 1 <= len(words(got)) <= len(found)
    assert got.startswith(text[: found[0].start()])
    assert got.endswith(text[found[-1].end() :])


def test_swaps_keep_words_and_gaps() -> None:
    augment = TextAugment(swap=0.2)
    gaps = re.split(r"\w+(?:['’-]\w+)*", WORDS)
    moved: Counter[int] = Counter()
    for seed in range(500):
        got = augment(WORDS, rng(seed))
        assert re.split(r"\w+(?:['’-]\w+)*", got) == gaps
        assert sorted(words(got)) == sorted(words(WORDS))
        moved.update(i for i, (a, b) in enumerate(zip(words(WORDS), words(got), strict=True)) if a != b)
    # 12 words, two swaps: a place changes where it is drawn, 1 - (10/12)², unless the second swap undoes the first
    assert len(moved) == 12
    expected = 500 * (1 - (10 / 12) ** 2 - 1 / 66 * 2 / 12)
    assert all(abs(count - expected) < 5 * np.sqrt(expected * 0.7) for count in moved.values()), moved


def test_deletions_come_at_their_rate_for_every_word() -> None:
    augment = TextAugment(delete=0.25)
    text = " ".join(f"w{n}" for n in range(40))
    generator = rng(1)
    kept = np.zeros(40)
    for _ in range(2000):
        left = augment(text, generator).split(" ")
        assert left == sorted(left, key=lambda word: int(word[1:])), "the order stays"
        kept[[int(word[1:]) for word in left]] += 1
    deviation = np.sqrt(2000 * 0.25 * 0.75)
    assert np.abs(kept - 1500).max() < 4.5 * deviation
    assert abs(kept.sum() - 60_000) < 4.5 * deviation * np.sqrt(40)


def test_when_all_would_go_any_one_word_stays() -> None:
    left = Counter(TextAugment(delete=1.0)("(a, b; c)", rng(seed)) for seed in range(300))
    assert set(left) == {"(a)", "(b)", "(c)"}
    assert all(60 < count < 140 for count in left.values())


def test_what_stands_before_a_deleted_word_goes_with_it() -> None:
    augment = TextAugment(delete=0.5)
    seen = {augment("A, b; c.", rng(seed)) for seed in range(200)}
    assert seen == {"A, b; c.", "A, b.", "A; c.", "b; c.", "A.", "b.", "c."}


def test_synonyms_are_drawn_evenly_and_as_many_as_said() -> None:
    augment = TextAugment(replace=0.1, synonyms=LEXICON)  # of 12 words: one
    changed: Counter[tuple[str, str]] = Counter()
    for seed in range(4000):
        pairs = [(a, b) for a, b in zip(WORDS.split(" "), augment(WORDS, rng(seed)).split(" "), strict=False) if a != b]
        changed[pairs[0]] += 1
        assert len(words(augment(WORDS, rng(seed)))) - len(words(WORDS)) in (0, 1)
    assert set(changed) == {
        ("The", "This"), ("quick", "fast"), ("quick", "rapid"), ("quick", "speedy"), ("fox,", "vulpine"), ("dog.", "hound."),
    }  # fmt: skip
    share = {pair: count / 4000 for pair, count in changed.items()}
    for pair in (("The", "This"), ("fox,", "vulpine"), ("dog.", "hound.")):
        assert share[pair] == pytest.approx(1 / 4, abs=0.03), "each word that has synonyms is as likely"
    for pair in (("quick", "fast"), ("quick", "rapid"), ("quick", "speedy")):
        assert share[pair] == pytest.approx(1 / 12, abs=0.02)
    all_of_them = TextAugment(replace=1.0, synonyms=LEXICON, stopwords=frozenset({"the"}))(WORDS, rng())
    assert re.fullmatch(
        r"The (fast|rapid|speedy) brown vulpine animal, it's said, jumps over a well-known lazy hound\.", all_of_them
    )
    third = TextAugment(replace=0.25, synonyms={word.lower(): ["X"] for word in words(WORDS)})
    assert {words(third(WORDS, rng(seed))).count("X") for seed in range(50)} == {3}


def test_settings_that_are_wrong_or_act_on_nothing() -> None:
    with pytest.raises(DataError) as caught:
        TextAugment(swap=1.5, delete=-1)
    assert str(caught.value) == (
        "2 problems\n"
        "1. swap = 1.5\n"
        "  rule: rates are between 0 and 1\n"
        "  so:   no text can be augmented\n"
        "  try:  swap = 0.1, the value recommended by Wei & Zou\n"
        "2. delete = -1\n"
        "  rule: rates are between 0 and 1\n"
        "  so:   no text can be augmented\n"
        "  try:  delete = 0.1, the value recommended by Wei & Zou"
    )
    with pytest.raises(DataError, match="a TextAugment with replace, swap and delete of 0"):
        TextAugment()
    given = r"replace = {} with {} words that have synonyms and {} stopwords"
    with pytest.raises(DataError, match=given.format(r"0\.3", 0, 0)):
        TextAugment(replace=0.3)
    with pytest.raises(DataError, match=given.format(r"0\.0", 4, 0)):
        TextAugment(swap=0.3, synonyms=LEXICON)
    with pytest.raises(DataError, match=given.format(r"0\.0", 0, 1)):
        TextAugment(swap=0.3, stopwords=frozenset({"a"}))
    with pytest.raises(DataError, match="a TextTransform of length 0"):
        TextTransform(tokenizer=ByteTokenizer(), length=0)


def test_lexicons(tmp_path: Path) -> None:
    want = {"quick": ["fast", "rapid"], "dog": ["hound"]}
    tsv, json = tmp_path / "a.tsv", tmp_path / "a.json"
    tsv.write_text("Quick\tfast\tquick\r\n\ndog\thound\nquick\tfast\trapid\nsame\tSame\n")
    json.write_text('{"quick": ["fast", "rapid", "Quick"], "Dog": ["hound", "hound"], "alone": []}')
    assert load_synonyms(tsv) == load_synonyms(str(json)) == want


@pytest.mark.parametrize(
    ("name", "content", "given"),
    [
        ("a.tsv", b"dog\thound\nquick fast\n", "line 2 is 'quick fast'"),
        ("a.tsv", b"dog\t\n", r"line 1 is 'dog\t'"),
        ("a.tsv", b"dog\t\xff\n", "'utf-8' codec can't decode byte 0xff in position 4: invalid start byte"),
        ("a.json", b'{"dog": "hound"}', "Expected `array`, got `str` - at `$[...]`"),
        ("a.json", b"{", "Input data was truncated"),
        ("a.txt", b"", "a lexicon with the suffix '.txt'"),
    ],
)
def test_lexicons_that_are_not_understood(tmp_path: Path, name: str, content: bytes, given: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_synonyms(path)
    assert str(caught.value) == (
        f"{path}: {given}\n"
        "  rule: a lexicon is .json ({word: [synonym, …]}) or .tsv (word, tab, synonym, tab, …), in UTF-8\n"
        "  so:   no word has a synonym\n"
        "  try:  repair that place; a word without synonyms needs no line"
    )
    path.unlink()
    with pytest.raises(DataError, match=r"cannot be read: No such file or directory|a lexicon with the suffix"):
        load_synonyms(path)


def encoded(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def test_texts_become_tokens_of_one_length() -> None:
    transform = TextTransform(tokenizer=ByteTokenizer(), length=5)
    short = transform({"text": encoded("Aé"), "label": np.array(3)}, rng())
    assert {name: (v.dtype.name, v.tolist()) for name, v in short.items()} == {
        "label": ("int64", 3),
        "tokens": ("int64", [65, 195, 169, 256, 256]),
        "attention_mask": ("int64", [1, 1, 1, 0, 0]),
    }
    assert transform({"text": encoded("abcdefgh")}, rng())["tokens"].tolist() == list(b"abcde")
    assert not transform({"text": encoded("")}, rng())["attention_mask"].any()
    augmented = TextTransform(tokenizer=ByteTokenizer(), length=5, augment=TextAugment(delete=1.0))
    assert augmented({"text": encoded("abc abc")}, rng())["tokens"].tolist() == [*b"abc", 256, 256]


@pytest.mark.parametrize(
    ("sample", "given"),
    [
        ({"x": np.zeros(2), "text": np.zeros(3, np.int64)}, "a sample with x float64[2], text int64[3]"),
        ({"label": np.zeros((), np.int64)}, "a sample with label int64[]"),
        ({"text": np.array([65, 255], np.uint8)}, "a text of 2 bytes of which byte 1 is not UTF-8"),
    ],
)
def test_samples_that_are_no_text(sample: dict[str, np.ndarray], given: str) -> None:
    with pytest.raises(DataError) as caught:
        TextTransform(tokenizer=ByteTokenizer(), length=5)(sample, rng())
    assert str(caught.value) == (
        f"{given}\n"
        "  rule: a sample has its text under 'text' as uint8 [bytes] of UTF-8\n"
        "  so:   it cannot be encoded\n"
        '  try:  "text": np.frombuffer(text.encode(), np.uint8)'
    )


def test_a_loader_augments_texts_of_any_length_alike_on_any_rank() -> None:
    texts = [f"some words number {n} " * (n % 4 + 1) for n in range(20)]
    data = from_map_style([{"text": encoded(text), "targets": n % 2} for n, text in enumerate(texts)])
    transform = TextTransform(tokenizer=ByteTokenizer(), length=40, augment=TextAugment(swap=0.3, delete=0.2))

    def tokens(rank: int, world: int, step: int) -> list[list[int]]:
        loader = Loader(data, seed=1, global_batch=10, micro_batch=10, rank=rank, world_size=world, transform=transform)
        (micro_batch,) = loader.batch(step).micro_batches
        assert micro_batch["attention_mask"].shape == (10 // world, 40)
        return micro_batch["tokens"].tolist()

    for step in (0, 1, 2):
        assert tokens(0, 2, step) + tokens(1, 2, step) == tokens(0, 1, step)
    first, again = tokens(0, 1, 0) + tokens(0, 1, 1), tokens(0, 1, 2) + tokens(0, 1, 3)
    assert sorted(first) != sorted(again), "the next epoch draws anew"
