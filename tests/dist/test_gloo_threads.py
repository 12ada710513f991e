"""The end of a process that took part in collectives: gloo's threads have let go of everything before the interpreter ends."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
import time

import pytest

from unisono.dist.world import wait_for_gloo_threads

_PR_SET_NAME = 15

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_it_waits_for_threads_of_gloo_that_are_at_work() -> None:
    ended_s: list[float] = []
    begun = threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"pt_gloo_runloop", 0, 0, 0)
        begun.set()
        data = bytes(20_000_000)
        for _ in range(10):
            hashlib.sha256(data)  # without the interpreter's lock, as gloo works
        ended_s.append(time.monotonic())

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    wait_for_gloo_threads(longest_s=60.0)
    assert ended_s
    thread.join()
    started = time.monotonic()
    wait_for_gloo_threads(longest_s=60.0)
    assert time.monotonic() - started < 30.0


def test_it_does_not_wait_for_ever() -> None:
    ended = threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"pt_gloo_runloop", 0, 0, 0)
        data = bytes(20_000_000)
        while not ended.is_set():
            hashlib.sha256(data)

    thread = threading.Thread(target=work)
    thread.start()
    wait_for_gloo_threads(longest_s=0.05)
    assert thread.is_alive()
    ended.set()
    thread.join()
