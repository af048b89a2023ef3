"""What waits to be sent."""

from __future__ import annotations

import asyncio

from llmgw.link.messages import Desired, LogsCancel, Routes, ToPeer
from llmgw.link.notices import Notices
from llmgw.link.outbox import Outbox


async def test_a_newer_whole_state_replaces_an_unsent_one():
    box: Outbox[ToPeer] = Outbox()
    box.put(Desired(epoch=1, session=1, revision=1))
    box.put(Routes(epoch=1, session=1, version=1))
    box.put(LogsCancel(id="x"))
    box.put(Desired(epoch=1, session=1, revision=2))
    sent = [await box.get() for _ in range(3)]
    assert sent == [
        Routes(epoch=1, session=1, version=1),
        LogsCancel(id="x"),
        Desired(epoch=1, session=1, revision=2),
    ]


async def test_it_is_bounded_but_a_replacement_always_fits():
    box: Outbox[ToPeer] = Outbox(limit=2)
    assert box.put(Desired(epoch=1, session=1, revision=1))
    assert box.put(LogsCancel(id="1"))
    assert not box.put(LogsCancel(id="2"))
    assert box.put(Desired(epoch=1, session=1, revision=2))
    assert len(box) == 2


async def test_sent_waits_for_the_last_frame_to_have_been_sent():
    box: Outbox[ToPeer] = Outbox()
    await box.sent()
    box.put(LogsCancel(id="1"))
    await box.get()
    waiting = asyncio.ensure_future(box.sent())
    await asyncio.sleep(0)
    assert not waiting.done(), "it was taken out, but is not known to be sent"
    asking = asyncio.ensure_future(box.get())
    await asyncio.wait_for(waiting, 5)
    asking.cancel()


def test_notices_say_a_thing_once_and_news_at_once():
    notices = Notices(window_s=10.0)
    assert notices.due("a", "down", 0.0) == 0
    assert notices.due("a", "down", 5.0) is None
    assert notices.due("b", "down", 5.0) == 0
    assert notices.due("a", "down", 10.0) == 1
    assert notices.due("a", "refused", 10.1) == 0
    notices.forget("a")
    assert notices.due("a", "refused", 10.2) == 0
    notices.forget_all()
    assert notices.due("b", "down", 10.3) == 0


def test_notices_do_not_grow_without_bound():
    notices = Notices()
    for number in range(10_000):
        notices.due(number, "x", 0.0)
    assert len(notices._seen) <= 4096
