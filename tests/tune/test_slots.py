"""Places for trials at the same time: their shares of devices or cores."""

from __future__ import annotations

import pytest

from unisono.errors import ConfigError
from unisono.launch import resources
from unisono.launch.resources import Core
from unisono.tune import slots
from unisono.tune.slots import divide_into_slots


def test_each_place_has_devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,GPU-a,7,8")
    found = divide_into_slots(2, 2, has_num_threads=False)
    assert [slot.variables for slot in found] == [{"CUDA_VISIBLE_DEVICES": "0,2"}, {"CUDA_VISIBLE_DEVICES": "GPU-a,7"}]
    assert all(slot.cpus is None and not slot.settings and slot.num_processes == 2 for slot in found)
    assert [slot.num_processes for slot in divide_into_slots(2, 0, has_num_threads=False)] == [
        2,
        2,
    ]  # one for each device
    with pytest.raises(ConfigError, match="3 trials of 2 processes at a time on 5 devices"):
        divide_into_slots(3, 2, has_num_threads=False)


def test_each_place_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cores = [Core(node=0, cpus=(index, index + 8)) for index in range(8)]
    monkeypatch.setattr(slots, "allowed_cores", lambda: cores)
    found = divide_into_slots(2, 2, has_num_threads=False)
    assert [slot.cpus for slot in found] == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    # the number of threads is part of the configuration: sums depend on it
    assert [slot.settings for slot in found] == [{"launch.num_threads": "2"}] * 2
    assert divide_into_slots(2, 0, has_num_threads=True)[0].settings == {}
    with pytest.raises(ConfigError, match="9 trials at a time on 8 cores"):
        divide_into_slots(9, 0, has_num_threads=False)


def test_one_place_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    (slot,) = divide_into_slots(1, 4, has_num_threads=False)
    assert (slot.num_processes, slot.cpus, slot.settings, slot.variables) == (4, None, {}, {})


def test_the_variable_of_ascend_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "accelerator_files", lambda: ["/dev/davinci0", "/dev/davinci1"])
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5")
    assert [slot.variables for slot in divide_into_slots(2, 1, has_num_threads=False)] == [
        {"ASCEND_RT_VISIBLE_DEVICES": "4"},
        {"ASCEND_RT_VISIBLE_DEVICES": "5"},
    ]
