"""A contact sheet shows each image in its place."""

from __future__ import annotations

import numpy as np
import pytest

from unisono.data.image import contact_sheet, decode
from unisono.errors import DataError


def test_images_are_in_their_places() -> None:
    images = [np.full((40, 60, 3), 20 * number, np.uint8) for number in range(5)] + [
        np.full((200, 100, 1), 7, np.uint8)
    ]
    page = decode(contact_sheet(images, columns=4, cell_px=50))
    assert page.shape == (2 * 54 + 4, 4 * 54 + 4, 3)
    for number in range(6):
        row, column = divmod(number, 4)
        middle = page[4 + 54 * row + 25, 4 + 54 * column + 25]
        assert (middle == (7 if number == 5 else 20 * number)).all()
    assert (page[58:108, 58:68] == 255).all()  # beside the tall one, which is shrunk to 50x25
    assert (page[:4] == 255).all()
    assert (page[60:, 115:] == 255).all()  # cells nobody fills


def test_labels_are_written_below() -> None:
    images = [np.full((50, 50, 3), 128, np.uint8)] * 2
    page = decode(contact_sheet(images, ["a dog", ""], cell_px=50))
    below = page[4 + 50 : 4 + 64]
    assert (below[:, 4:54] < 128).any()
    assert (below[:, 58:108] == 255).all()


@pytest.mark.parametrize(("count", "labels"), [(0, None), (1025, None), (2, ["one"])])
def test_what_is_no_sheet(count: int, labels: list[str] | None) -> None:
    with pytest.raises(DataError, match=f"a contact sheet of {count} images"):
        contact_sheet([np.zeros((4, 4, 3), np.uint8)] * count, labels)
