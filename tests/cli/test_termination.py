"""SIGTERM ends a command as an interrupt that code in C may have replaced by its own."""

from __future__ import annotations

import signal

import pytest

from unisono.cli.termination import Terminated, sigterm_interrupts


def test_sigterm_interrupts_and_its_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), sigterm_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_in_place_of_the_one_of_sigterm_is_told_apart_from_ctrl_c() -> None:
    """Ray's ``get`` catches KeyboardInterrupt of a signal handler in C++ and raises a new one."""
    with pytest.raises(Terminated), sigterm_interrupts():
        as_ray_gets()
    with pytest.raises(KeyboardInterrupt) as caught, sigterm_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert caught.type is KeyboardInterrupt


def as_ray_gets() -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None
