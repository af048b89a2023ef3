"""Asks an engine over HTTP how it is. One client session for all engines of a node."""

from __future__ import annotations

import asyncio

import aiohttp

from llmgw.engines.base import Probe

HEALTH_TIMEOUT_S = 5.0
ANSWER_BYTES = 1 << 20


class NoAnswer(Exception):
    """The engine gave no answer; the message says what happened instead."""

    def __init__(self, words: str, *, refused: bool = False) -> None:
        super().__init__(words)
        self.refused = refused
        """Nothing listens yet: what an engine does until its server is up."""


class EngineClient:
    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True), trust_env=False, auto_decompress=True
        )

    async def ask(self, endpoint: str, probe: Probe, api_key: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body (its first MiB). Raises NoAnswer."""
        headers = {"authorization": f"Bearer {api_key}"}
        if probe.body is not None:
            headers["content-type"] = "application/json"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    probe.method,
                    f"http://{endpoint}{probe.path}",
                    data=probe.body,
                    headers=headers,
                    allow_redirects=False,
                ) as answer,
            ):
                return answer.status, await _body(answer.content)
        except TimeoutError:
            raise NoAnswer(f"no answer from {endpoint}{probe.path} within {timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise NoAnswer(f"{endpoint}: {error.os_error.strerror}", refused=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(f"{endpoint}{probe.path}: {str(error) or type(error).__name__}") from None

    async def close(self) -> None:
        await self._session.close()


async def _body(content: aiohttp.StreamReader) -> bytes:
    """All of it, at most ANSWER_BYTES: one read gives only what has come in so far."""
    body = bytearray()
    while len(body) < ANSWER_BYTES and (piece := await content.read(ANSWER_BYTES - len(body))):
        body += piece
    return bytes(body)
