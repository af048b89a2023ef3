"""Streams at the level of bytes: every cut, every kind of line end."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.gateway import sse
from llmgw.gateway.relay import LAST_CHUNK, Ending, Framing, StreamRelay

from .client import ask
from .conftest import House
from .engine import DONE, Call, chunk

NEWLINES = st.sampled_from(["\n", "\r\n", "\r"])
TEXT = st.text(max_size=20).map(lambda text: text.replace("\r", "").replace("\n", ""))
FIELDS = st.sampled_from(["data:", "data: ", "event: ", "id: ", ": ", ":", "retry: ", ""])
EVENTS = st.lists(st.lists(st.tuples(FIELDS, TEXT), min_size=1, max_size=3), max_size=6)


class Taken:
    """Where a relay writes to."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    @property
    def body(self) -> bytes:
        return b"".join(self.writes[1:])


def relayed(pieces: list[bytes], framing: Framing = Framing.CLOSE) -> tuple[StreamRelay, Taken]:
    taken = Taken()
    relay = StreamRelay(taken, b"HEAD", framing)
    for piece in pieces:
        relay.feed(piece)
    return relay, taken


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({place % (len(data) + 1) for place in at} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places) if b > a]


@settings(deadline=None)
@given(EVENTS, NEWLINES, st.lists(st.integers(0, 10_000), max_size=30))
def test_every_cut_gives_the_same_bytes(events: list[list[tuple[str, str]]], newline: str, places: list[int]) -> None:
    text = (
        "".join("".join(f + t + newline for f, t in event) + newline for event in events) + f"data: [DONE]{newline * 2}"
    )
    stream = text.encode("utf-8", "surrogatepass")
    relay, taken = relayed(cut(stream, places))
    assert relay.end() is Ending.WHOLE
    if b'"error"' not in stream:
        assert taken.body == stream


@settings(deadline=None)
@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=20))
def test_noise_is_passed_on_unchanged(noise: bytes, places: list[int]) -> None:
    stream = noise + b"\n\n" + DONE
    relay, taken = relayed(cut(stream, places))
    relay.end()
    assert taken.body == stream


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([chunk("a"), chunk("京🙂"), b": ping\n\n", b"event: x\ndata: 1\r\n\r\n"]),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 200),
)
def test_only_whole_events_precede_an_error(events: list[bytes], missing: int) -> None:
    stream = b"".join(events)
    kept = stream[: max(0, len(stream) - missing)]
    relay, taken = relayed([kept] if kept else [])
    assert relay.broken("gone", "engine_failed") is Ending.TRUNCATED
    whole, mark, error = taken.body.rpartition(b'data: {"error":')
    assert mark
    assert stream.startswith(whole)
    # A comment may stand right before the error: it is no part of an event.
    _, begun = sse.split(whole)
    assert begun == b""
    assert json.loads(b'{"error":' + error)["error"]["code"] == "engine_failed"


@pytest.mark.parametrize(
    ("data", "whole", "rest"),
    [
        (b"", b"", b""),
        (b"a", b"", b"a"),
        (b"ab\n", b"", b"ab\n"),
        (b"\n\n", b"\n\n", b""),
        (b"\n\nx", b"\n\n", b"x"),
        (b"a\n\nb\n\nc", b"a\n\nb\n\n", b"c"),
        (b"a\r\n\r\nb\r\n", b"a\r\n\r\n", b"b\r\n"),
        (b"a\r\rb", b"a\r\r", b"b"),
        (b"a\n\r\nb", b"a\n\r\n", b"b"),
        (b": ping\n", b": ping\n", b""),
        (b"a\n\n: ping\n: pong\ndata", b"a\n\n: ping\n: pong\n", b"data"),
        (b": ping\r", b": ping\r", b""),
        (b": pi", b"", b": pi"),
    ],
)
def test_where_events_end(data: bytes, whole: bytes, rest: bytes) -> None:
    assert sse.split(data) == (whole, rest)


def test_a_comment_does_not_wait_for_the_next_event() -> None:
    _, taken = relayed([b": ping\n"])
    assert taken.body == b": ping\n"


def test_chunks_are_framed() -> None:
    relay, taken = relayed([chunk("a"), DONE], Framing.CHUNKED)
    relay.end()
    a = chunk("a")
    assert taken.writes == [b"HEAD", b"%x\r\n%b\r\n" % (len(a), a), b"e\r\n" + DONE + b"\r\n", LAST_CHUNK]


async def test_random_cuts_over_real_sockets(house: House) -> None:
    """Both the HTTP chunks and the writes are cut anywhere, so that heads, sizes and events arrive in parts."""
    dice = random.Random(7)
    stream = b"".join(chunk(text) for text in ("京都", "🙂🙃", "a" * 300, '{"error"', "\\n")) + DONE

    async def script(call: Call) -> None:
        places = sorted(dice.sample(range(1, len(stream)), dice.randint(0, 12)))
        pieces = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]
        raw = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        raw += b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        places = sorted(dice.sample(range(1, len(raw)), dice.randint(0, 20)))
        for a, b in zip([0, *places], [*places, len(raw)], strict=True):
            await call.send(raw[a:b])

    await house.serve(script)
    client = await house.client()
    for _ in range(200):
        assert (await client.ask(ask(stream=True))).body == stream
    await house.at_rest()
