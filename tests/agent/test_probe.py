"""Asking an engine, and the many ways in which it does not answer."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from llmgw.agent.probe import ANSWER_BYTES, EngineClient, NoAnswer
from llmgw.engines.base import Probe

GET = Probe(method="GET", path="/health")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def engine(handler: Handler) -> AsyncIterator[str]:
    """A server that says what ``handler`` writes; yields its host:port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    found = EngineClient()
    yield found
    await found.close()


async def test_an_answer_that_comes_in_pieces_is_read_whole(client: EngineClient) -> None:
    """A vector of thousands of numbers does not come in one segment."""
    body = json.dumps({"data": [{"embedding": [0.5] * 4096}]}).encode()

    async def in_pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 5000):
            writer.write(body[start : start + 5000])
            await writer.drain()
            await asyncio.sleep(0.001)

    async with engine(in_pieces) as endpoint:
        assert await client.ask(endpoint, Probe(method="POST", path="/v1/embeddings", body=b"{}"), "k", 10) == (
            200,
            body,
        )


async def test_no_more_than_its_share_is_read(client: EngineClient) -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x" * 65536)
            await writer.drain()

    async with engine(endless) as endpoint:
        status, body = await client.ask(endpoint, GET, "k", 10)
    assert (status, len(body)) == (200, ANSWER_BYTES)


async def test_the_key_goes_to_the_engine_and_nowhere_else(client: EngineClient) -> None:
    seen: list[bytes] = []

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(b"elsewhere")

    async with engine(elsewhere) as other:

        async def redirects(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 302 Found\r\nlocation: http://%s/\r\ncontent-length: 0\r\n\r\n" % other.encode())

        async with engine(redirects) as endpoint:
            assert await client.ask(endpoint, GET, "k", 10) == (302, b"")
    assert seen == []


async def test_where_nothing_listens_yet_it_is_said_so(client: EngineClient) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(NoAnswer, match="Connect") as error:
            await client.ask(endpoint, GET, "k", 10)
    assert error.value.refused


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"", "Server disconnected"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "400"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc", "ContentLength|not completed|payload"),
        (b"HTTP/1.1 two OK\r\n\r\n", "400"),
    ],
)
async def test_what_is_no_answer_is_said_in_words(client: EngineClient, said: bytes, words: str) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()

    async with engine(broken) as endpoint:
        with pytest.raises(NoAnswer, match=words) as error:
            await client.ask(endpoint, GET, "k", 10)
    assert not error.value.refused
    assert str(error.value).startswith(f"{endpoint}/health: ")


async def test_who_hangs_is_waited_for_so_long(client: EngineClient) -> None:
    over = asyncio.Event()

    async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()

    async with engine(hangs) as endpoint:
        with pytest.raises(NoAnswer, match=r"no answer from 127\.0\.0\.1:\d+/health within 0\.05 s"):
            await client.ask(endpoint, GET, "k", 0.05)
        over.set()
