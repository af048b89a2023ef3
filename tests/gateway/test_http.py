"""HTTP as clients speak it, well or badly."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from pathlib import Path

import pytest

from llmgw.gateway.front import HEAD_LIMIT_BYTES, TARGET_LIMIT_BYTES
from llmgw.gateway.gateway import Gateway, StartError
from llmgw.gateway.settings import GatewaySettings

from .client import KEY, Client, ask, request
from .conftest import House
from .engine import COMPLETION, DONE, Call, chunk, completion

MODELS = "GET", "/v1/models"


async def streamed(call: Call) -> None:
    await call.stream()
    await call.piece(chunk("one") + DONE)
    await call.end()


async def echo(call: Call) -> None:
    await call.answer(200, call.body)


# Routes and methods


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "/health", "/v1/models/", "/v1//models", "/v1/responses", "/v1/x?y"]
)
async def test_an_unknown_route_names_those_there_are(house: House, path: str) -> None:
    await house.serve(completion)
    answer = await house.ask(path=path)
    assert (answer.status, answer.error["code"]) == (404, "unknown_url")
    assert "/v1/chat/completions" in answer.error["message"]
    assert "/v1/models/{id}" in answer.error["message"]
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST, OPTIONS"),
        ("PUT", "/v1/embeddings", "POST, OPTIONS"),
        ("DELETE", "/v1/models/m", "GET, OPTIONS"),
        ("POST", "/v1/models", "GET, OPTIONS"),
    ],
)
async def test_a_wrong_method_names_the_right_one(house: House, method: str, path: str, allow: str) -> None:
    await house.serve(completion)
    answer = await house.ask(method=method, path=path)
    assert (answer.status, answer.error["code"], answer.headers["allow"]) == (405, "method_not_allowed", allow)


async def test_a_target_in_absolute_form(house: House) -> None:
    (engine,) = await house.serve(completion)
    assert (await house.ask(path="http://gateway/v1/chat/completions?a=b")).status == 200
    assert engine.calls[0].target == "/v1/chat/completions?a=b"


async def test_an_answer_to_head_has_no_body(house: House) -> None:
    await house.serve(completion)
    client = await house.client()
    await client.send(request(method="HEAD", path="/v1/models"))
    answer = await client.head()
    assert (answer.status, answer.headers["allow"]) == (405, "GET, OPTIONS")
    assert (await client.ask(ask())).status == 200


# Request ids


@pytest.mark.parametrize("given", ["abc-123", "!" * 128])
async def test_a_valid_request_id_is_kept(house: House, given: str) -> None:
    (engine,) = await house.serve(completion)
    answer = await house.ask(headers=(f"X-Request-Id: {given}",))
    assert answer.headers["x-request-id"] == given == engine.calls[0].header("x-request-id")


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "caf\xe9"])
async def test_an_invalid_request_id_is_replaced(house: House, given: str) -> None:
    (engine,) = await house.serve(lambda call: call.json(200, COMPLETION, b"X-Request-Id: the-engines-own"))
    answer = await house.ask(headers=(f"X-Request-Id: {given}",))
    assert answer.headers["x-request-id"].startswith("req-")
    assert [v for n, v in answer.lines if n == "x-request-id"] == [engine.calls[0].header("x-request-id")]


# Bodies


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"{", "not JSON"),
        (b'{"model":"m"} x', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "JSON object"),
        (b'"m"', "JSON object"),
        (b"{}", "'model'"),
        (b'{"model":null}', "'model'"),
        (b'{"model":["m"]}', "'model'"),
        (b'{"model":"m","stream":"yes"}', "'stream'"),
        (b'{"model":"m","model":"m"}', "'model'"),
        (b'{"model":"m","mod\\u0065l":"x"}', "'model'"),
        (b'{"stream":true,"model":"m","stream":false}', "'stream'"),
        (b"", "no body"),
    ],
)
async def test_a_body_that_can_not_be_read(house: House, body: bytes, word: str) -> None:
    (engine,) = await house.serve(completion)
    client = await house.client()
    answer = await client.ask(body, headers=() if body else ("Content-Length: 0",))
    assert answer.status == 400
    assert word in answer.error["message"]
    assert not engine.calls
    assert (await client.ask(ask())).status == 200, "the connection goes on"


async def test_fields_of_inner_objects_may_be_called_model(house: House) -> None:
    body = ask(metadata={"model": "x", "stream": 1}, tools=[{"model": {"model": 1}}], note='"model": "model"')
    (engine,) = await house.serve(completion)
    assert (await house.ask(body)).status == 200
    assert len(engine.calls) == 1


async def test_the_model_of_the_body_counts_and_not_the_querys(house: House) -> None:
    (engine,) = await house.serve(completion)
    assert (await house.ask(ask(), path="/v1/chat/completions?model=other")).status == 200
    answer = await house.ask(ask(model="other"), path="/v1/chat/completions?model=m")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert len(engine.calls) == 1


async def test_a_chunked_body(house: House) -> None:
    (engine,) = await house.serve(echo)
    body = json.dumps(ask()).encode()
    client = await house.client()
    await client.send(request(None, headers=("Transfer-Encoding: chunked",)))
    for at in range(0, len(body), 7):
        piece = body[at : at + 7]
        await client.send(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece))
    await client.send(b"0\r\nTrailer: 1\r\n\r\n")
    assert (await client.answer()).body == body
    assert engine.calls[0].header("content-length") == str(len(body))
    assert engine.calls[0].header("transfer-encoding") is None
    assert engine.calls[0].header("trailer") is None


async def test_a_body_over_the_limit_by_its_length(house: House) -> None:
    (engine,) = await house.serve(completion, body_limit_bytes=1_000)
    client = await house.client()
    answer = await client.ask(b"x" * 1_001)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert (await client.ask(ask())).status == 200, "a small body is dropped and the connection goes on"
    assert len(engine.calls) == 1


async def test_a_large_body_over_the_limit_is_not_waited_for(house: House) -> None:
    await house.serve(completion, body_limit_bytes=1_000)
    client = await house.client()
    await client.send(request(None, headers=(f"Content-Length: {10**9}",)) + b"x" * 100_000)
    answer = await client.answer()
    assert (answer.status, answer.headers["connection"]) == (413, "close")
    assert await client.ended() == b""


async def test_a_chunked_body_over_the_limit_is_seen_midway(house: House) -> None:
    (engine,) = await house.serve(completion, body_limit_bytes=256_000)
    client = await house.client()
    await client.send(request(None, headers=("Transfer-Encoding: chunked",)))
    for _ in range(300):
        await client.send(b"3e8\r\n%b\r\n" % (b"x" * 1_000))
    answer = await client.answer()
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert not engine.calls


async def test_a_large_body_with_the_model_last(house: House) -> None:
    (engine,) = await house.serve(echo)
    body = b'{"messages":[{"content":"%b"}],"model":"nobody"}' % (b"A" * 1_500_000)
    answer = await house.ask(body)
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    body = body.replace(b"nobody", b"m")
    assert (await house.ask(body)).body == body
    assert len(engine.calls) == 1


@pytest.mark.parametrize(("method", "path"), [("OPTIONS", "/v1/models"), ("GET", "/v1/models")])
@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_that_nobody_wants_is_not_kept(house: House, method: str, path: str, chunked: bool) -> None:
    await house.serve(completion)
    client = await house.client()
    length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 100000000"
    await client.send(request(method=method, path=path, headers=(length,)))
    for _ in range(70):
        await client.send(b"400\r\n%b\r\n" % (b"x" * 1024))
    answer = await client.answer()
    assert (answer.status, answer.headers["connection"]) == (413, "close")


async def test_expect_continue(house: House) -> None:
    (engine,) = await house.serve(completion)
    body = json.dumps(ask(pad="x" * 1_000_000)).encode()
    client = await house.client()
    await client.send(request(None, headers=(f"Content-Length: {len(body)}", "Expect: 100-continue")))
    assert (await client.head()).status == 100
    await client.send(body)
    assert (await client.answer()).status == 200
    assert engine.calls[0].header("expect") is None
    assert engine.calls[0].body == body


async def test_expect_continue_of_a_refused_request(house: House) -> None:
    """It is refused before a byte of its body is asked for."""
    await house.serve(completion)
    client = await house.client()
    await client.send(request(None, key="sk-wrong", headers=("Content-Length: 5000000", "Expect: 100-continue")))
    answer = await client.answer()
    assert (answer.status, answer.headers["connection"]) == (401, "close")


# What must not be understood in two ways


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc",
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: 3, 3\r\n\r\nabc",
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/models HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length : 3\r\n\r\nabc",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n",
        b"GET /v1/models HTTP/1.1\nHost: a\n\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/3.0\r\nHost: a\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"BREW /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
async def test_what_could_be_understood_in_two_ways_is_refused(house: House, raw: bytes) -> None:
    (engine,) = await house.serve(completion)
    client = await house.client()
    await client.send(raw + b"GET /v1/models HTTP/1.1\r\nHost: smuggled\r\n\r\n")
    answer = await client.answer()
    assert (answer.status, answer.headers["connection"], answer.error["code"]) == (400, "close", "bad_request")
    assert await client.ended() == b""
    assert not engine.calls


async def test_a_smuggled_request_is_never_begun(house: House) -> None:
    (engine,) = await house.serve(completion)
    inner = request(ask())
    raw = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %b\r\n"
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n%b" % (KEY.encode(), len(inner) + 5, inner)
    )
    client = await house.client()
    await client.send(raw)
    assert (await client.answer()).status == 400
    await client.ended()
    assert not engine.calls


# Limits of size and time


@pytest.mark.parametrize("size", [HEAD_LIMIT_BYTES, 4 * HEAD_LIMIT_BYTES])
async def test_a_head_too_large(house: House, size: int) -> None:
    await house.serve(completion)
    client = await house.client()
    await client.send(request(ask(), headers=("X: " + "x" * size,)))
    answer = await client.answer()
    assert (answer.status, answer.headers["connection"]) == (431, "close")


async def test_a_head_that_never_ends(house: House) -> None:
    await house.serve(completion)
    client = await house.client()
    await client.send(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: ")
    for _ in range(8):
        await client.send(b"x" * 16_384)
    assert (await client.answer()).status == 431


@pytest.mark.parametrize("size", [TARGET_LIMIT_BYTES, 8 * TARGET_LIMIT_BYTES])
async def test_a_url_too_long(house: House, size: int) -> None:
    await house.serve(completion)
    answer = await house.ask(path="/v1/models?" + "x" * size, method="GET")
    assert answer.status == 414


async def test_a_large_head_within_the_limit(house: House) -> None:
    (engine,) = await house.serve(completion)
    assert (await house.ask(headers=("X-Large: " + "x" * 50_000,))).status == 200
    assert len(engine.calls[0].header("x-large") or "") == 50_000


async def test_a_head_that_comes_too_slowly(house: House) -> None:
    await house.serve(completion, timeouts={"head_s": 0.1})
    client = await house.client()
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n")
    answer = await client.answer()
    assert (answer.status, answer.error["code"], answer.headers["connection"]) == (408, "timeout", "close")
    assert await client.ended() == b""


async def test_a_body_that_stalls(house: House) -> None:
    await house.serve(completion, timeouts={"body_stall_s": 0.1})
    client = await house.client()
    await client.send(request(None, headers=("Content-Length: 100",)) + b"{")
    assert (await client.answer()).status == 408


async def test_idle_connections_are_closed(house: House) -> None:
    await house.serve(completion, timeouts={"keep_alive_s": 0.1})
    client = await house.client()
    assert (await client.ask(ask())).status == 200
    assert await client.ended() == b""
    fresh = await house.client()
    assert await fresh.ended() == b""


async def test_a_long_wait_for_the_engine_is_not_the_clients_silence(house: House) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await call.json(200, COMPLETION)

    await house.serve(script, timeouts={"keep_alive_s": 0.05, "body_stall_s": 0.05, "head_s": 0.05})
    client = await house.client()
    await client.send(request(ask()))
    await house.until(lambda: house.gateway.active)
    ticks = asyncio.get_running_loop().time() + 0.3
    await house.until(lambda: asyncio.get_running_loop().time() > ticks)
    go.set()
    assert (await client.answer()).status == 200


# Versions, pipelining, connections


async def test_http_1_0(house: House) -> None:
    await house.serve(completion)
    client = await house.client()
    answer = await client.ask(ask(), version="1.0")
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert answer.json() == COMPLETION
    assert await client.ended() == b""


async def test_http_1_0_kept_alive(house: House) -> None:
    await house.serve(completion)
    client = await house.client()
    for _ in range(3):
        answer = await client.ask(ask(), version="1.0", headers=("Connection: keep-alive",))
        assert (answer.status, answer.headers["connection"]) == (200, "keep-alive")


async def test_a_stream_to_http_1_0_is_not_chunked(house: House) -> None:
    await house.serve(streamed)
    answer = await house.ask(ask(stream=True), version="1.0", headers=("Connection: keep-alive",))
    assert "transfer-encoding" not in answer.headers
    assert (answer.body, answer.headers["connection"]) == (chunk("one") + DONE, "close")


async def test_a_cut_answer_to_http_1_0_ends_in_a_reset(house: House) -> None:
    """Its end is the connection's: closing it would pass for the answer's."""

    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
        await seen.wait()
        call.close()

    seen = asyncio.Event()
    await house.serve(script)
    client = await house.client()
    await client.send(request(ask(), version="1.0"))
    await client.head()
    assert await client.reader.readexactly(2) == b"{}"
    seen.set()
    with pytest.raises(ConnectionResetError):
        await client.reader.read()


async def test_pipelined_requests_are_answered_in_order(house: House) -> None:
    async def script(call: Call) -> None:
        if call.header("x-number") == "0":
            await go.wait()
        if json.loads(call.body).get("stream"):
            await call.stream()
            await call.piece(b": %b\n\n" % (call.header("x-number") or "").encode() + DONE)
            await call.end()
        else:
            await call.answer(200, (call.header("x-number") or "").encode())

    go = asyncio.Event()
    await house.serve(script)
    client = await house.client()
    raw = b"".join(request(ask(stream=bool(n % 2)), headers=(f"X-Number: {n}",)) for n in range(20))
    raw += request(method="GET", path="/v1/models")
    for at in range(0, len(raw), 777):
        await client.send(raw[at : at + 777])
    go.set()
    for number in range(20):
        answer = await client.answer()
        expected = b": %d\n\n" % number + DONE if number % 2 else b"%d" % number
        assert (answer.status, answer.body) == (200, expected)
    assert (await client.answer()).json()["object"] == "list"


async def test_what_is_sent_ahead_is_bounded(house: House) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await call.answer(200, b"{}")

    await house.serve(script)
    client = await house.client()
    many = 400
    await client.send(request(ask()))
    await house.until(lambda: house.gateway.active)
    writing = asyncio.ensure_future(client.send(request(ask(pad="x" * 50_000)) * many))
    (connection,) = house.gateway.connections
    await house.until(lambda: connection._reading_paused)
    assert connection._ahead_bytes < 1_000_000
    go.set()
    for _ in range(many + 1):
        assert (await client.answer()).status == 200
    await writing


async def test_garbage_after_a_request_does_not_harm_its_answer(house: House) -> None:
    await house.serve(completion)
    client = await house.client()
    await client.send(request(ask()) + b"\x00garbage")
    assert (await client.answer()).status == 200
    assert (await client.answer()).status == 400
    assert await client.ended() == b""


async def test_connection_close_is_obeyed(house: House) -> None:
    await house.serve(streamed)
    client = await house.client()
    answer = await client.ask(ask(stream=True), headers=("Connection: close",))
    assert answer.headers["connection"] == "close"
    assert await client.ended() == b""


async def test_an_upgrade_without_a_body_is_ignored(house: House) -> None:
    await house.serve(completion)
    client = await house.client()
    await client.send(
        request(method="GET", path="/v1/models", headers=("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"))
    )
    assert (await client.answer()).status == 200


async def test_the_sockets_do_not_delay(house: House) -> None:
    async def script(call: Call) -> None:
        await call.stream()
        await call.piece(b": ping")
        await call.until_gone()

    await house.serve(script)
    client = await house.client()
    await client.send(request(ask(stream=True)))
    await client.head()
    (front,) = house.gateway.connections
    (exchange,) = house.gateway.active
    back = exchange._connection
    assert back is not None
    for transport in (front._transport, back.transport):
        handle = transport.get_extra_info("socket")
        assert handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


# CORS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models"])
async def test_a_preflight_needs_no_key(house: House, path: str) -> None:
    await house.serve(completion)
    wanted = "authorization, content-type, x-stainless-os, x-stainless-retry-count"
    answer = await house.ask(
        b"",
        method="OPTIONS",
        path=path,
        key=None,
        headers=(
            "Origin: https://app.example",
            "Access-Control-Request-Method: POST",
            f"Access-Control-Request-Headers: {wanted}",
        ),
    )
    assert answer.status == 204
    assert answer.headers["access-control-allow-headers"] == wanted
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "POST" in answer.headers["access-control-allow-methods"]


@pytest.mark.parametrize("key", [KEY, None])
async def test_browsers_may_read_answers_and_refusals(house: House, key: str | None) -> None:
    await house.serve(lambda call: call.json(200, COMPLETION, b"Access-Control-Allow-Origin: https://engine"))
    answer = await house.ask(key=key, headers=("Origin: https://app.example",))
    assert [value for name, value in answer.lines if name == "access-control-allow-origin"] == ["*"]


# The listener


async def test_a_taken_port_says_so(house: House, tmp_path: Path) -> None:
    await house.serve(completion)
    other = Gateway(
        GatewaySettings(id="g", state_dir=tmp_path, listen_host="127.0.0.1", listen_port=house.gateway.port)
    )
    words = rf"port {house.gateway.port} \(listen.gateway\): it is taken by pid {os.getpid()} .*change listen.gateway"
    with pytest.raises(StartError, match=words):
        await other.start()


@pytest.mark.parametrize("host", ["::1", "::"])
async def test_ipv6(house: House, host: str) -> None:
    await house.serve(completion, listen_host=host)
    for address in ("::1", "127.0.0.1") if host == "::" else ("::1",):
        async with await Client.open(house.gateway.port, address) as client:
            assert (await client.ask(ask())).status == 200


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    from llmgw.pki.authority import Authority

    authority = Authority.create(tmp_path / "pki")
    authority.issue_server(["localhost", "127.0.0.1"], tmp_path / "server", name="gw")
    return tmp_path / "server" / "server.pem", tmp_path / "server" / "server-key.pem"


async def test_tls_at_the_front(house: House, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    await house.serve(streamed, front_cert=certificate[0], front_key=certificate[1])
    context = ssl.create_default_context(cafile=str(tmp_path / "pki" / "ca.pem"))
    context.set_alpn_protocols(["h2", "http/1.1"])
    client = await Client.open(house.gateway.port, ssl=context, server_hostname="localhost")
    async with client:
        for _ in range(3):
            answer = await client.ask(ask(stream=True))
            assert answer.body == chunk("one") + DONE
        assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"


async def test_leaving_under_tls(house: House, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    async def script(call: Call) -> None:
        await call.until_gone()

    (engine,) = await house.serve(script, front_cert=certificate[0], front_key=certificate[1])
    context = ssl.create_default_context(cafile=str(tmp_path / "pki" / "ca.pem"))
    client = await Client.open(house.gateway.port, ssl=context, server_hostname="localhost")
    await client.send(request(ask()))
    call = await engine.call()
    await client.close()
    await call.until_gone()
    await house.at_rest()


async def test_a_front_certificate_that_can_not_be_used(tmp_path: Path) -> None:
    gateway = Gateway(
        GatewaySettings(id="g", state_dir=tmp_path, front_cert=tmp_path / "no.pem", front_key=tmp_path / "no-key.pem")
    )
    with pytest.raises(StartError, match=r"gateway\.tls: .*no\.pem"):
        await gateway.start()
