"""A stop is noticed at once, wherever the main thread is, and by the process it was meant for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from procs import wait_until

from unisono.dist import StopNotice, World
from unisono.dist.stop_notice import INTERRUPTED

# The main thread waits in C for a mutex it holds itself: no signal interrupts that, and no Python handler can run.
BLOCKED = """
import ctypes, os, signal, sys, threading
from unisono.dist import StopNotice
with StopNotice() as notice:
    def tell():
        notice.wait(30)
        print(notice.signal_name, flush=True)
    threading.Thread(target=tell, daemon=True).start()
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    print("blocked", flush=True)
    libc.pthread_mutex_lock(mutex)
"""


@contextmanager
def start_blocked() -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", BLOCKED],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "blocked\n"
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_noticed_while_the_main_thread_is_blocked_in_c(number: signal.Signals) -> None:
    with start_blocked() as child:
        assert child.stdout is not None
        child.send_signal(number)
        assert child.stdout.readline() == f"{number.name}\n"
        assert child.poll() is None


def test_a_third_interrupt_ends_a_blocked_process_at_once() -> None:
    with start_blocked() as child:
        assert child.stdout is not None
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "SIGINT\n"
        for _ in range(2):
            child.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert child.wait(timeout=20) == -signal.SIGINT


def test_a_second_interrupt_raises_keyboard_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt_twice() -> None:
        with StopNotice(announce=True) as notice:
            os.kill(os.getpid(), signal.SIGINT)
            assert notice.wait(20)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert capsys.readouterr().err == f"{INTERRUPTED}\n"


def test_repeated_terms_do_not_end_the_process() -> None:
    with start_blocked() as child:
        assert child.stdout is not None
        for _ in range(3):
            child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "SIGTERM\n"
        child.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=0.5)


def freed_by_notice(world: World) -> str | None:
    """Rank 1 stops; rank 0 is blocked in all_reduce, gets SIGTERM there, and frees rank 1 once it has noticed."""
    import torch

    peer = world.all_gather_json(os.getpid())[1]
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        world.all_reduce(torch.ones(4))
        return None
    with StopNotice() as notice:

        def act() -> None:
            wait_until(lambda: state(peer) == "T", "rank 1 is stopped")
            os.kill(os.getpid(), signal.SIGTERM)
            if notice.wait(25):
                os.kill(peer, signal.SIGCONT)

        thread = threading.Thread(target=act)
        thread.start()
        # ends well only if the notice came while this was blocked: the collective's own timeout would be an error
        world.all_reduce(torch.ones(4))
        thread.join()
        return notice.signal_name


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_noticed_during_a_blocked_collective(pool: Any) -> None:
    assert pool.run(freed_by_notice, ranks=2, comm_timeout_s=30) == ["SIGTERM", None]


def test_everything_is_put_back() -> None:
    def previous(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, previous)
    try:
        threads = threading.active_count()
        with StopNotice() as notice:
            assert not notice.requested
            assert not notice.wait(0)
            assert threading.active_count() == threads + 1
        assert signal.getsignal(signal.SIGTERM) is previous
        assert signal.set_wakeup_fd(-1) == -1
        assert threading.active_count() == threads
        assert notice.signal_name is None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_can_be_chosen_and_others_keep_their_meaning() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        with StopNotice([signal.SIGUSR1]) as notice:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert not notice.requested
            os.kill(os.getpid(), signal.SIGUSR1)
            assert notice.wait(20)
            assert notice.signal_name == "SIGUSR1"
            assert notice.at_monotonic_s is not None
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert seen == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_one_notice_at_a_time_and_only_on_the_main_thread() -> None:
    def enter() -> None:
        with StopNotice():
            pass

    with StopNotice(), pytest.raises(RuntimeError, match="already active"):
        enter()
    assert "main thread" in str(raised_in_thread(enter))
    enter()


def test_a_shared_notice_lasts_until_all_have_left_it_in_any_order() -> None:
    before = signal.getsignal(signal.SIGTERM)
    first = StopNotice.shared()
    first.__enter__()
    second = StopNotice.shared()
    second.__enter__()
    first.__exit__(None, None, None)
    os.kill(os.getpid(), signal.SIGTERM)
    assert second.wait(5)
    assert second is first
    second.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) == before
    with StopNotice.shared() as third:
        assert not third.requested


def raised_in_thread(action: Callable[[], None]) -> Exception | None:
    errors: list[Exception] = []

    def run() -> None:
        try:
            action()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def fork_pausing() -> int:
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return child


def end_of(child: int) -> int:
    """The signal that ended ``child``; it is killed if nothing else has."""
    try:
        wait_until(lambda: state(child) == "Z", "the child has ended")
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status)


def test_a_forked_child_has_its_own_fate() -> None:
    # often, because the window between the fork and the child's own settings is what is looked at
    with StopNotice() as notice:
        for _ in range(20):
            child = fork_pausing()
            os.kill(child, signal.SIGTERM)
            assert end_of(child) == signal.SIGTERM
        assert not notice.wait(0.2)


def test_a_living_child_does_not_hold_up_the_end() -> None:
    with StopNotice():
        child = fork_pausing()
    os.kill(child, signal.SIGKILL)
    assert end_of(child) == signal.SIGKILL
