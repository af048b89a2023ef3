from __future__ import annotations

import threading

import pytest

from llmgw.agent.discovery.bounded import Gate, StillHanging


def test_what_returns_in_time_is_given_back() -> None:
    gate = Gate("reading")
    assert gate.call(lambda: 7, 5) == 7
    with pytest.raises(ZeroDivisionError):
        gate.call(lambda: 1 // 0, 5)


async def test_also_off_the_event_loop() -> None:
    assert await Gate("reading").call_async(lambda: "text", 5) == "text"


def test_a_hanging_call_costs_one_thread_however_often_it_is_asked() -> None:
    release, calls = threading.Event(), []

    def hang() -> None:
        calls.append(threading.current_thread())
        release.wait(30)

    gate = Gate("statvfs")
    before = threading.active_count()
    with pytest.raises(StillHanging, match=r"statvfs has not returned in 0\.05 s"):
        gate.call(hang, 0.05)
    for _ in range(20):
        with pytest.raises(StillHanging, match="earlier call"):
            gate.call(hang, 0.05)
    assert len(calls) == 1
    assert threading.active_count() == before + 1
    release.set()
    calls[0].join(10)
    assert gate.call(lambda: "again", 5) == "again"
    assert threading.active_count() == before
