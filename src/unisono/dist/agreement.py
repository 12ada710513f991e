"""A check at start-up that all ranks hold the same thing: configuration, plan, table of parameters."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, cast

from unisono.dist.world import World
from unisono.errors import CommError

_SHOWN_CHARS = 120


def agree(world: World, name: str, value: Any) -> None:
    """Returns if ``value`` (JSON types) is equal on all ranks, else raises CommError naming the ranks that differ,
    and of objects the entries.

    A collective. For large values pass a hash.
    """
    texts = [json.dumps(each, sort_keys=True) for each in world.gather_json(value)]
    counts = Counter(texts)
    if len(counts) == 1:
        return
    # a tie goes to the value of the lowest rank, so that all ranks name the same culprit
    usual = max(counts, key=lambda text: (counts[text], -texts.index(text)))
    odd = [rank for rank, text in enumerate(texts) if text != usual]
    those = ", ".join(str(rank) for rank, text in enumerate(texts) if text == usual)
    other, usual = _apart(texts[odd[0]], usual)
    raise CommError(
        given=f"{name} is {_short(other)} on rank {', '.join(map(str, odd))} and {_short(usual)} on rank {those}",
            rule=f"{name} is the same on all {world.world_size} ranks",
            consequence="the ranks would train different things, so no step was made",
            nearest=f"start rank {odd[0]} with the same code, configuration and environment as the others"
    )


def _apart(one: str, other: str) -> tuple[str, str]:
    """Of two objects only the entries that differ; anything else as it is."""
    mine, theirs = json.loads(one), json.loads(other)
    if not (isinstance(mine, dict) and isinstance(theirs, dict)):
        return one, other
    return _without(cast("dict[str, Any]", mine), theirs), _without(cast("dict[str, Any]", theirs), mine)


def _without(mine: dict[str, Any], theirs: Any) -> str:
    return json.dumps({name: each for name, each in mine.items() if name not in theirs or theirs[name] != each})


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
