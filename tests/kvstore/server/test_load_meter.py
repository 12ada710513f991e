from __future__ import annotations

from unisono.kvstore.server.load_meter import LoadMeter


def test_requests_at_once_are_busy_once_and_served_twice() -> None:
    clock = [0.0]
    meter = LoadMeter(lambda: clock[0], lambda: 3.5)
    clock[0] = 10.0
    first = meter.serving()
    first.__enter__()
    clock[0] = 12.0
    with meter.serving():
        clock[0] = 13.0
    clock[0] = 14.0
    assert meter.stats() == {"busy_s": 4.0, "served_s": 5.0, "cpu_s": 3.5}
    first.__exit__(None, None, None)
    clock[0] = 20.0
    assert meter.stats() == {"busy_s": 4.0, "served_s": 5.0, "cpu_s": 3.5}


def test_a_request_that_fails_has_ended() -> None:
    clock = [0.0]
    meter = LoadMeter(lambda: clock[0], lambda: 0.0)
    try:
        with meter.serving():
            clock[0] = 1.0
            raise ValueError
    except ValueError:
        clock[0] = 9.0
    assert meter.stats()["busy_s"] == 1.0
