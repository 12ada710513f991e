"""Memory comes again only when nobody could see it change."""

from __future__ import annotations

import threading

import numpy as np
import torch

from unisono.data.image.transform import reusable_empty


def place(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_what_is_in_use_is_never_given_out_again() -> None:
    held: list[object] = []
    places: set[int] = set()
    for number in range(30):
        array = reusable_empty((7, 5), np.float32)
        assert place(array) not in places
        array[:] = number
        places.add(place(array))
        # an array, a tensor of it, a slice, a tensor's slice: each alone keeps it
        tensor = torch.as_tensor(array)
        held.append([array, tensor, array[2:], tensor[3:]][number % 4])
        del array, tensor
    for number, each in enumerate(held):
        assert np.unique(np.asarray(each)).tolist() == [number]


def test_what_is_free_is_used_again_by_its_thread() -> None:
    first = reusable_empty((11, 3), np.float32)
    where = place(first)
    del first
    assert place(reusable_empty((11, 3), np.float32)) == where
    kept = torch.as_tensor(reusable_empty((11, 3), np.float32))
    assert place(reusable_empty((11, 3), np.float32)) != where
    del kept
    assert reusable_empty((11, 3), np.float64).dtype == np.float64
    elsewhere: list[int] = []
    thread = threading.Thread(target=lambda: elsewhere.append(place(reusable_empty((11, 3), np.float32))))
    thread.start()
    thread.join()
    assert elsewhere != [where]
