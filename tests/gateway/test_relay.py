"""Answers reach the client as the engine sent them."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import random

import pytest

from .client import Client, ask, request
from .conftest import House, settled
from .engine import COMPLETION, DONE, SSE_HEAD, Call, chunk


async def test_a_plain_answer_comes_as_it_is(house: House) -> None:
    await house.serve(lambda call: call.json(200, COMPLETION, b"X-Engine: yes"))
    answer = await house.ask()
    assert answer.status == 200
    assert answer.json() == COMPLETION
    assert answer.headers["x-engine"] == "yes"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req-")
    await house.at_rest()


async def test_a_stream_comes_as_it_is_and_chunked(house: House) -> None:
    events = [chunk("a"), chunk("b", finish="stop"), DONE]

    async def script(call: Call) -> None:
        await call.stream()
        for event in events:
            await call.piece(event)
        await call.end()

    await house.serve(script)
    answer = await house.ask(ask(stream=True))
    assert answer.body == b"".join(events)
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    await house.at_rest()


async def test_each_event_is_passed_on_before_the_next_is_sent(house: House) -> None:
    passed = asyncio.Semaphore(0)

    async def script(call: Call) -> None:
        await call.stream()
        for number in range(10):
            await call.piece(chunk(str(number)))
            await passed.acquire()
        await call.piece(DONE)
        await call.end()

    await house.serve(script)
    client = await house.client()
    await client.send(request(ask(stream=True)))
    await client.head()
    for number in range(10):
        assert await client.piece() == chunk(str(number))
        passed.release()
    assert await client.piece() == DONE
    assert await client.piece() == b""


async def test_the_head_goes_with_the_first_byte(house: House) -> None:
    """Engines send a stream's head long before its first token; until then another replica may have to answer."""
    seen = asyncio.Event()

    async def script(call: Call) -> None:
        await call.stream()
        await seen.wait()
        await call.piece(b": ping")
        await call.until_gone()

    (engine,) = await house.serve(script)
    client = await house.client()
    await client.send(request(ask(stream=True)))
    await house.until(lambda: any(exchange._held for exchange in house.gateway.active))
    seen.set()
    assert (await client.head()).status == 200, "a part of an event is enough"
    assert len(engine.calls) == 1


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(b"".join((chunk("京"), chunk("🙂"), DONE)), id="multibyte"),
        pytest.param(b"".join((chunk("a"), DONE)).replace(b"\n", b"\r\n"), id="crlf"),
        pytest.param(b"".join((chunk("a"), DONE)).replace(b"\n", b"\r"), id="cr"),
        pytest.param(b"".join((chunk("a"), DONE)).replace(b"data: ", b"data:"), id="no space"),
        pytest.param(b": ping\n\n" + chunk("a") + b": pong\n\n" + DONE, id="comments"),
        pytest.param(b"event: x\nid: 7\n" + chunk("a") + DONE, id="fields"),
        pytest.param(chunk("a") + b"data: [DONE]", id="no last blank line"),
        pytest.param(b'data: {"choices":[{"delta":{"reasoning":"r","k":1,"x":null}}]}\n\n' + DONE, id="unknown keys"),
        pytest.param(b"\xef\xbb\xbf" + chunk("a") + DONE, id="byte order mark"),
        pytest.param(chunk("\N{REPLACEMENT CHARACTER}") + b"data: \xff\xfe\n\n" + DONE, id="not UTF-8"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
async def test_streams_are_byte_exact_however_they_are_cut(house: House, stream: bytes, size: int) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        for at in range(0, len(stream), size):
            await call.piece(stream[at : at + size])
        await call.end()

    await house.serve(script)
    assert (await house.ask(ask(stream=True))).body == stream


async def test_the_request_reaches_the_engine_byte_for_byte(house: House) -> None:
    raw = (
        b'{ "messages":[{"role":"user","content":"\\u4eac \xf0\x9f\x99\x82"}],"chat_template_kwargs":'
        b'{"a":{"b":null}},\n"return_token_ids" : true,"priority":-1,"stream_options":null,'
        b'"max_completion_tokens":1e2,"x\\"y":[],"model":"m"}'
    )
    (engine,) = await house.serve(lambda call: call.json(200, COMPLETION))
    await house.ask(raw)
    assert engine.calls[0].body == raw
    assert engine.calls[0].method == "POST"
    assert engine.calls[0].target == "/v1/chat/completions"


async def test_an_alias_goes_on_as_it_was_given(house: House) -> None:
    (engine,) = await house.serve(lambda call: call.json(200, COMPLETION), route={"aliases": ("default",)})
    assert (await house.ask(ask(model="default", unknown=1))).status == 200
    assert json.loads(engine.calls[0].body)["model"] == "default"


async def test_query_and_headers_go_on(house: House) -> None:
    (engine,) = await house.serve(lambda call: call.json(200, COMPLETION))
    await house.ask(path="/v1/chat/completions?beta=true", headers=("X-Thing: a:b", "Accept-Encoding: gzip"))
    call = engine.calls[0]
    assert call.target == "/v1/chat/completions?beta=true"
    assert call.header("x-thing") == "a:b"
    assert call.header("accept-encoding") == "gzip"
    assert call.header("host") == f"127.0.0.1:{engine.port}"


async def test_hop_by_hop_headers_end_here(house: House) -> None:
    (engine,) = await house.serve(lambda call: call.json(200, COMPLETION, b"Connection: keep-alive", b"Keep-Alive: 5"))
    answer = await house.ask(
        headers=("Connection: keep-alive, X-Secret-Hop", "X-Secret-Hop: 1", "TE: trailers", "Keep-Alive: 3")
    )
    call = engine.calls[0]
    assert [call.header(name) for name in ("connection", "x-secret-hop", "te", "keep-alive")] == [None] * 4
    assert "keep-alive" not in answer.headers


async def test_compressed_plain_answers_stay_compressed(house: House) -> None:
    packed = gzip.compress(json.dumps(COMPLETION).encode())
    await house.serve(lambda call: call.answer(200, packed, b"Content-Encoding: gzip"))
    answer = await house.ask(headers=("Accept-Encoding: gzip",))
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.body == packed


async def test_streams_are_asked_for_uncompressed(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(DONE)
        await call.end()

    (engine,) = await house.serve(script)
    await house.ask(ask(stream=True), headers=("Accept-Encoding: gzip, br",))
    assert [value for name, value in engine.calls[0].headers if name == "accept-encoding"] == ["identity"]


async def test_a_stream_compressed_all_the_same_is_passed_on_untouched(house: House) -> None:
    packed = gzip.compress(chunk() + DONE)

    async def script(call: Call) -> None:
        await call.stream(SSE_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n"))
        await call.piece(packed)
        await call.end()

    await house.serve(script)
    answer = await house.ask(ask(stream=True))
    assert (answer.body, answer.headers["content-encoding"]) == (packed, "gzip")


async def test_a_stream_without_content_type_gets_one(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await call.piece(chunk() + DONE)
        await call.end()

    await house.serve(script)
    answer = await house.ask(ask(stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.body == chunk() + DONE


async def test_other_content_is_not_touched(house: House) -> None:
    noise = bytes(range(256)) * 64
    await house.serve(lambda call: call.answer(200, noise, content_type=b"audio/mpeg"))
    answer = await house.ask()
    assert (answer.headers["content-type"], answer.body) == ("audio/mpeg", noise)


async def test_a_json_route_without_content_type_gets_one(house: House) -> None:
    await house.serve(lambda call: call.answer(200, b"{}", content_type=b""))
    assert (await house.ask()).headers["content-type"] == "application/json"


async def test_a_chunked_plain_answer_stays_chunked(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        await call.piece(b'{"a":')
        await call.piece(b"1}")
        await call.end()

    await house.serve(script)
    answer = await house.ask()
    assert (answer.body, answer.headers["transfer-encoding"]) == (b'{"a":1}', "chunked")


async def test_an_answer_that_ends_with_the_connection(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        await call.send(b'{"a":1}')
        call.close()

    await house.serve(script)
    assert (await house.ask()).body == b'{"a":1}'


async def test_an_interim_answer_is_not_the_answer(house: House) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n")
        await call.json(200, COMPLETION)

    await house.serve(script)
    answer = await house.ask()
    assert answer.status == 200
    assert "link" not in answer.headers


async def test_a_json_answer_to_a_stream_is_no_empty_success(house: House) -> None:
    (engine,) = await house.serve(lambda call: call.json(200, COMPLETION))
    answer = await house.ask(ask(stream=True))
    assert (answer.status, answer.error["code"]) == (502, "not_a_stream")
    assert len(engine.calls) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_other_routes_go_to_the_same_path(house: House, path: str) -> None:
    (engine,) = await house.serve(lambda call: call.json(200, {"object": "list"}))
    assert (await house.ask({"model": "m", "input": "x"}, path=path)).status == 200
    assert engine.calls[0].target == path


async def test_connections_to_the_engine_are_used_again(house: House) -> None:
    (engine,) = await house.serve(lambda call: call.json(200, COMPLETION))
    client = await house.client()
    for _ in range(5):
        assert (await client.ask(ask())).status == 200
    assert engine.connections == 1


async def test_an_idle_connection_is_given_up_before_the_engine_closes_it(house: House) -> None:
    (engine,) = await house.serve(lambda call: call.json(200, COMPLETION), timeouts={"engine_idle_s": 0.02})
    await house.ask()
    await house.until(lambda: engine.closed == 1)
    assert (await house.ask()).status == 200
    assert engine.connections == 2


async def test_large_bodies_both_ways(house: House) -> None:
    """Images within a chat message, as clients send them."""
    image = base64.b64encode(random.Random(0).randbytes(26_000_000 * 3 // 4)).decode()
    (engine,) = await house.serve(lambda call: call.answer(200, call.body))
    for size in (32_769, 1024 * 1024, len(image)):
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image[:size]}"}}
        message = {"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}
        body = json.dumps({"messages": [message], "model": "m"}).encode()
        answer = await house.ask(body)
        assert answer.status == 200
        # Not the bytes themselves: what pytest says of two that differ would take minutes to find.
        known, there, back = (hashlib.sha256(each).digest() for each in (body, engine.calls[-1].body, answer.body))
        assert known == there == back


async def test_a_client_that_reads_slowly_holds_the_engine_back(house: House) -> None:
    """The gateway must not take in what the client does not: 64 MB here."""
    sent = 0
    piece = chunk("x" * 65_000)

    async def script(call: Call) -> None:
        nonlocal sent
        await call.stream()
        for _ in range(1_000):
            await call.piece(piece)
            sent += len(piece)
        await call.piece(DONE)
        await call.end()

    await house.serve(script)
    client = await Client.open(house.gateway.port)
    async with client:
        client.reader._limit = 1024  # type: ignore[attr-defined]
        await client.send(request(ask(stream=True)))
        await client.head()
        (connection,) = house.gateway.connections
        await house.until(lambda: connection.paused)
        assert await settled(lambda: sent) < 32 * 1024 * 1024, (
            "the rest is held in the kernel's buffers, then by the engine"
        )
        assert connection._transport.get_write_buffer_size() < 1024 * 1024
        total = 0
        while data := await client.piece():
            total += len(data)
        assert total == 1_000 * len(piece) + len(DONE)
    await house.at_rest()
