"""Each limit drops what it says, and text of a book keeps them all."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import planted
import pytest

from unisono.quality.cleaning.languages import LANGUAGE_LIMITS
from unisono.quality.cleaning.text_quality import LIMITS, MEASURES, check_text
from unisono.quality.options import FilterOptions

PROSE = (
    "The ship lay at anchor in the bay, and the men on deck were waiting for the tide. Nobody spoke. From the shore came the "
    "sound of a bell, then of another, and a boat with two lanterns put off from the pier. It moved slowly, as if those who "
    "rowed it had no wish to arrive. The captain watched it through his glass for a while and went below without a word."
)

CHINESE = (
    "清晨的海湾里停着一条旧船，水手们坐在甲板上等待涨潮，谁也没有说话。岸上先传来一阵钟声，随后又是一阵；不久，两盏灯笼从码头那边慢慢靠近，"
    "划桨的人好像并不想到达。船长举起望远镜看了一会儿，便默默走下船舱，把门关上，只留下年轻的舵手望着远方。2024年的春天就这样开始了。"
)
JAPANESE = (
    "朝の湾に古い船が泊まり、水夫たちは甲板に座って潮が満ちるのを待っていた。岸から鐘の音が聞こえ、しばらくしてもう一度鳴った。"
    "やがて二つの灯りが桟橋を離れ、ゆっくりと近づいてきた。漕ぐ人は着きたくないようだった。船長は望遠鏡で眺め、黙って船室へ降りた。"
)
THAI = (
    "เช้าวันนั้นเรือเก่าลำหนึ่งจอดอยู่ในอ่าว ลูกเรือนั่งรอน้ำขึ้นโดยไม่มีใครพูดอะไร เสียงระฆังดังมาจากฝั่ง แล้วเรือเล็กที่มีโคมไฟสองดวงก็ออกจากท่า "
    "มันแล่นช้าเหมือนคนพายไม่อยากไปถึง กัปตันยกกล้องขึ้นส่องครู่หนึ่งแล้วเดินลงไปข้างล่างเงียบๆ"
)


def failed_limit(text: str, options: FilterOptions) -> tuple[str, float] | None:
    checked = check_text(text, options)
    return (checked.failed, checked.value) if checked.failed else None


def test_values_up_to_the_limit_that_is_not_kept() -> None:
    assert tuple(check_text(PROSE, FilterOptions()).measured) == MEASURES
    checked = check_text("internationalization " * 60, FilterOptions())
    assert checked.failed == "max_mean_word_chars"
    assert checked.measured == {"words": 60, "mean_word_chars": 20}


def test_prose_keeps_all_limits() -> None:
    assert failed_limit(PROSE, FilterOptions()) is None


@pytest.mark.parametrize(
    ("text", "least", "most"), [(CHINESE, 110, 125), (JAPANESE, 110, 125), (THAI, 130, 190)], ids=["zh", "ja", "th"]
)
def test_scripts_without_spaces(text: str, least: int, most: int) -> None:
    """Their characters are words, and have no length that says anything."""
    checked = check_text(text, FilterOptions())
    assert checked.failed == ""
    assert least <= checked.measured["words"] <= most
    assert "mean_word_chars" not in checked.measured
    assert checked.measured["alphabetic_word_frac"] > 0.95
    assert failed_limit(text[:30], FilterOptions()) is not None
    assert failed_limit(f"{text}\n" * 3, FilterOptions()) is not None


def test_some_words_of_a_script_without_spaces() -> None:
    mixed = check_text(f"{PROSE} 中文，和「日本語」。", FilterOptions())
    assert mixed.measured["words"] == len(PROSE.split()) + 6
    assert mixed.measured["mean_word_chars"] == pytest.approx(
        check_text(PROSE, FilterOptions()).measured["mean_word_chars"]
    )


def test_words_of_a_huge_text_are_counted_without_a_list() -> None:
    checked = check_text("中" * (1 << 20) + " a", FilterOptions())
    assert (checked.failed, checked.value, checked.measured) == ("max_words", (1 << 20) + 1, {"words": (1 << 20) + 1})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("min_words", "too short", 2),
        ("min_words", "", 0),
        ("max_words", PROSE * 2000, len((PROSE * 2000).split())),
        ("min_mean_word_chars", "a b " * 40, 1),
        ("max_mean_word_chars", "internationalization " * 60, 20),
        ("max_symbol_ratio", "#tag word " * 40, 0.5),
        ("max_bullet_line_frac", "\n".join(f"- point {n} of many" for n in range(20)), 1),
        (
            "max_ellipsis_line_frac",
            "\n".join(["read on here ..."] + [f"line {n} of prose goes on" for n in range(12)]),
            1 / 13,
        ),
        ("min_alphabetic_word_frac", "word 1234 5678 " * 30, 1 / 3),
        ("max_duplicate_line_frac", "the same line of words\n" * 15 + PROSE, 14 / 16),
    ],
)
def test_limits(name: str, text: str, value: float) -> None:
    only = FilterOptions(**{limit: 0 for limit in LIMITS if limit != name})
    if name == "max_ellipsis_line_frac":
        only = replace(only, max_ellipsis_line_frac=0.05)
    failed = failed_limit(text, only)
    assert failed is not None
    assert failed[0] == name
    assert failed[1] == pytest.approx(value, rel=0.02)
    assert failed_limit(text, FilterOptions(**dict.fromkeys(LIMITS, 0))) is None


def test_repetition() -> None:
    words = [f"word{number}" for number in range(100)]
    off = dict.fromkeys(LIMITS, 0)
    repeated = " ".join(words + words[:30])
    failed = failed_limit(repeated, FilterOptions(**off | {"max_duplicate_5gram_frac": 0.15}))
    assert failed is not None
    assert failed[1] == pytest.approx(sum(map(len, words[:30])) / sum(map(len, words + words[:30])))
    assert failed_limit(" ".join(words), FilterOptions(**off | {"max_duplicate_5gram_frac": 0.01})) is None
    pairs = " ".join(["buy now", *words[:10], "buy now", *words[10:15], "buy now"])
    failed = failed_limit(pairs, FilterOptions(**off | {"max_top_bigram_frac": 0.05}))
    assert failed is not None
    assert failed[1] == pytest.approx(18 / len(pairs.replace(" ", "")))
    assert failed_limit("one two three four", FilterOptions(**off | {"max_top_bigram_frac": 0.01})) is None
    # a longer pair that occurs once does not hide a repeated one
    failed = failed_limit(
        "a b a b extraordinarily incomprehensibly", FilterOptions(**off | {"max_top_bigram_frac": 0.01})
    )
    assert failed == ("max_top_bigram_frac", 4 / 35)


def test_one_word_a_million_times() -> None:
    assert failed_limit("spam " * 1_000_000, FilterOptions()) == ("max_words", 1_000_000)
    failed = failed_limit("spam " * 90_000, FilterOptions())
    assert failed is not None
    assert failed[0] == "max_top_bigram_frac"


def test_order_of_limits_is_that_of_the_options() -> None:
    assert tuple(field.name for field in fields(FilterOptions)) == ("enabled", *LIMITS, *LANGUAGE_LIMITS)
    # each text breaks a limit and one behind it: the first is named
    assert failed_limit("1234567890123 " * 3, FilterOptions(min_words=5)) == ("min_words", 3)
    limit, _ = failed_limit("# ### #### 55 " * 40, FilterOptions(max_symbol_ratio=0.1)) or ("", 0.0)
    assert limit == "min_mean_word_chars"
    limit, _ = failed_limit("- same line of text here\n" * 40, FilterOptions()) or ("", 0.0)
    assert limit == "max_bullet_line_frac"
    texts = planted.documents(200, np.random.default_rng(0))
    assert all(
        failed_limit(text, FilterOptions(min_mean_word_chars=0)) is None for text in texts if len(text.split()) > 60
    )
