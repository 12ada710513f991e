"""Settings of a recipe on the command line of ``unisono data clean``."""

from __future__ import annotations

import pytest
from commands import Desk


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("mask.kinds=email,phone", """--set 'mask.kinds=["email", "phone"]'"""),
        ("mask.kinds=email", """--set 'mask.kinds=["email"]'"""),
        ("mask.kinds=emial", "did you mean 'email'?"),
        ("filter.languages=en,de", """--set 'filter.languages=["en", "de"]'"""),
    ],
)
def test_a_list_without_brackets(desk: Desk, given: str, nearest: str) -> None:
    (desk.folder / "a.jsonl").write_text('{"text": "one two"}\n')
    done = desk.here("data", "clean", "a.jsonl", "--out", "out", "--set", given)
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith(f"  try:  {nearest}")
