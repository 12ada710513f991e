from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.observe.meters import COMM_AXES, PHASES, GarbageTimer, RateMeter, StepTimers, collecting_every

S = 1_000_000_000


class HandClock:
    """Nanoseconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 5 * S

    def __call__(self) -> int:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += round(seconds * S)


def test_phases_add_up_to_wall_time() -> None:
    clock = HandClock()
    timers = StepTimers(clock)
    clock.pass_s(0.5)
    with timers.phase("data_wait"):
        clock.pass_s(1)
    with timers.phase("forward"):
        clock.pass_s(2)
    with timers.phase("backward"):
        clock.pass_s(3)
        with timers.comm_exposed("tp"):  # inside backward: counted there only
            clock.pass_s(1.5)
        clock.pass_s(0.25)
    with timers.phase("forward"):
        clock.pass_s(1)
    split = timers.take()
    assert split.wall_s == 9.25
    assert split.seconds == {
        "data_wait": 1,
        "h2d": 0,
        "forward": 3,
        "backward": 3.25,
        "bubble": 0,
        "comm_exposed": 1.5,
        "optimizer": 0,
        "ckpt_stall": 0,
        "eval": 0,
        "other": 0.5,
    }
    assert split.comm_exposed_s == {"dp": 0, "cp": 0, "tp": 1.5, "ep": 0, "pp": 0}
    assert (split.fields()["time/forward_frac"], split.fields()["time/window_s"]) == (3 / 9.25, 9.25)
    names = (*PHASES, "other", "comm_exposed_tp")
    assert set(split.fields()) == {"time/window_s", *(f"time/{name}_frac" for name in names)}


def test_take_starts_a_new_window_even_inside_a_phase() -> None:
    clock = HandClock()
    timers = StepTimers(clock)
    with timers.phase("forward"):
        clock.pass_s(1)
        assert timers.take().seconds["forward"] == 1
        clock.pass_s(2)
    assert timers.take().seconds["forward"] == 2
    assert timers.take().fields() == {}  # no time passed: no division by it


def test_phase_survives_exceptions_and_refuses_nonsense() -> None:
    clock = HandClock()
    timers = StepTimers(clock)
    with contextlib.suppress(ZeroDivisionError), timers.phase("forward"):
        clock.pass_s(1)
        raise ZeroDivisionError
    clock.pass_s(2)
    with (
        timers.phase("forward"),
        timers.comm_exposed("tp"),
        timers.phase("forward"),
    ):  # recomputed in a collective's backward
        clock.pass_s(3)
    split = timers.take()
    assert (split.seconds["forward"], split.seconds["other"]) == (4, 2)
    for look_up in (timers.phase, timers.comm_exposed):
        with pytest.raises(KeyError):
            look_up("warp")


@given(
    st.lists(
        st.tuples(st.sampled_from((*(set(PHASES) - {"comm_exposed"}), *COMM_AXES, "other")), st.integers(0, 10 * S)),
        max_size=30,
    )
)
def test_nothing_is_lost_or_counted_twice(parts: list[tuple[str, int]]) -> None:
    clock = HandClock()
    timers = StepTimers(clock)
    for name, nanoseconds in parts:
        if name == "other":
            clock.now += nanoseconds
        else:
            with timers.comm_exposed(name) if name in COMM_AXES else timers.phase(name):
                clock.now += nanoseconds
    split = timers.take()
    assert split.wall_s == pytest.approx(sum(n for _, n in parts) / S)
    assert sum(split.seconds.values()) == pytest.approx(split.wall_s)


def test_a_phase_allocates_nothing() -> None:
    timers = StepTimers()
    assert timers.phase("forward") is timers.phase("forward")


def test_rates_against_a_hand_made_clock() -> None:
    clock = HandClock()
    meter = RateMeter(steps_total=100, devices=4, window_steps=3, warmup_steps=2, clock=clock)
    clock.pass_s(60)  # building the model
    meter.start()
    for n, seconds in enumerate((9.0, 5.0), start=1):  # warm-up
        clock.pass_s(seconds)
        meter.step_done(n, tokens=1000)
        assert meter.rates() is None
    for n, seconds in enumerate((7.0, 1.0, 2.0, 3.0), start=3):  # the first falls out of the window of three
        clock.pass_s(seconds)
        meter.step_done(n, tokens=1200)
    rates = meter.rates()
    assert rates is not None
    assert rates.step_s == 2.0
    assert rates.tokens_per_s == 600.0
    assert rates.tokens_per_s_device == 150.0
    assert rates.eta_s == (100 - 6) * 2.0
    assert rates.fields() == {
        "perf/step_s": 2.0,
        "perf/tokens_per_s": 600.0,
        "perf/tokens_per_s_device": 150.0,
        "eta_s": 188.0,
    }


def test_one_reading_may_cover_several_steps() -> None:
    clock = HandClock()
    meter = RateMeter(steps_total=100, window_steps=20, warmup_steps=2, clock=clock)
    for done, seconds in ((10, 99.0), (20, 20.0), (30, 10.0), (40, 10.0)):  # the first holds the warm-up
        clock.pass_s(seconds)
        meter.step_done(done, tokens=1000, steps=10)
    rates = meter.rates()
    assert rates is not None
    assert (rates.step_s, rates.tokens_per_s, rates.eta_s) == (1.0, 100.0, 60.0)


def test_pauses_count_for_the_eta_only_and_excluded_steps_for_nothing() -> None:
    clock = HandClock()
    meter = RateMeter(steps_total=10, window_steps=10, warmup_steps=0, clock=clock)
    clock.pass_s(1)
    with meter.paused():
        clock.pass_s(3)  # evaluation
    meter.step_done(1, tokens=100)
    clock.pass_s(50)  # compiled
    meter.step_done(2, tokens=100, exclude=True)
    clock.pass_s(1)
    meter.step_done(3, tokens=100)
    rates = meter.rates()
    assert rates is not None
    assert rates.step_s == 1.0
    assert rates.tokens_per_s == 100.0
    assert rates.eta_s == (10 - 3) * (4 + 1) / 2


def test_eta_ends_at_zero_and_counts_from_the_resumed_step() -> None:
    clock = HandClock()
    meter = RateMeter(steps_total=52, warmup_steps=0, clock=clock)
    for n in (51, 52, 53):  # resumed at 50
        clock.pass_s(2)
        meter.step_done(n, tokens=10)
        rates = meter.rates()
        assert rates is not None
        assert rates.eta_s == max(0, 52 - n) * 2.0


def test_real_clock_gives_the_order_of_magnitude() -> None:
    """LitGPT's closing tokens/s divides by a time stamp; ours must come out of real time right."""
    begin = time.perf_counter()
    meter = RateMeter(steps_total=3, warmup_steps=0)
    for n in (1, 2, 3):
        time.sleep(0.02)
        meter.step_done(n, tokens=1000)
    elapsed_s = time.perf_counter() - begin
    rates = meter.rates()
    assert rates is not None
    assert rates.tokens_per_s >= 3000 / elapsed_s  # the steps lie inside what we timed
    assert rates.tokens_per_s <= 50_000  # a sleep is never shorter than asked


def test_garbage_collections_are_timed() -> None:
    ticks = iter([10, 2_000_000_010, 20, 500_000_020])
    gc.disable()
    try:
        with GarbageTimer(lambda: next(ticks)) as timer:
            gc.collect()
            gc.collect()
            assert timer.take_s() == 2.5
            assert timer.take_s() == 0.0
        gc.collect()
        assert timer.take_s() == 0.0
    finally:
        gc.enable()


def test_garbage_is_collected_after_every_tenth_step() -> None:
    collected: list[int] = []

    def observe(event: str, info: Mapping[str, int]) -> None:
        if event == "start":
            collected.append(info["generation"])

    with collecting_every(10) as after_step:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        gc.callbacks.append(observe)
        try:
            for step in range(1, 31):
                after_step(step)
        finally:
            gc.callbacks.remove(observe)
    assert collected == [2, 2, 2]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_without_a_number_of_steps_python_decides() -> None:
    with collecting_every(0) as after_step:
        assert gc.isenabled()
        after_step(1)


def test_phases_can_be_wrapped_for_a_while() -> None:
    clock, entered = HandClock(), list[str]()
    timers = StepTimers(clock)
    plain = timers.phase, timers.comm_exposed

    @contextlib.contextmanager
    def wrap(name: str, phase: contextlib.AbstractContextManager[None]):
        with phase:
            entered.append(name)
            yield

    def wrapper(name: str, phase: contextlib.AbstractContextManager[None]) -> contextlib.AbstractContextManager[None]:
        class Again:
            def __enter__(self) -> None:
                self._inner = wrap(name, phase)
                self._inner.__enter__()

            def __exit__(self, *exc: object) -> None:
                self._inner.__exit__(None, None, None)

        return Again()

    with timers.wrapped(wrapper):
        with timers.phase("forward"), timers.comm_exposed("tp"):
            clock.pass_s(1)
        with timers.phase("forward"):
            clock.pass_s(2)
    assert (timers.phase, timers.comm_exposed) == plain
    assert entered == ["forward", "comm_exposed_tp", "forward"]
    split = timers.take()
    assert (split.seconds["forward"], split.comm_exposed_s["tp"]) == (2, 1)
