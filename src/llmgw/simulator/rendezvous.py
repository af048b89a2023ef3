"""How the ranks of a simulated replica talk: JSON lines over one TCP connection per worker, with keep-alives.

Rank 0 listens at the address of ``--dist-init`` and says ``challenge``; a worker answers ``hello`` with a proof that it
holds the key of this generation, and gets ``welcome`` with the same proof in return, or ``refused`` with the reason.
Then ``load`` and ``loaded``, a ``step`` and its ``done`` for every token, and ``end`` from whoever leaves in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
from typing import Any

BEAT_S = 0.2
SILENT_BEATS = 20
"""So many own beats without a word, and a peer counts as gone: 4 s, as long as this process itself gets to run."""
HANDSHAKE_S = 10.0
LINE_BYTES = 64 * 1024

CLOSED = "its connection was closed"

Frame = dict[str, Any]


class Gone(Exception):
    """The peer can't be talked to any more; the message says how that showed."""


class Ended(Exception):
    """This rank has to end. The message says why, ``status`` is the process's exit status."""

    def __init__(self, words: str, status: int = 1) -> None:
        super().__init__(words)
        self.status = status


def prove(key: str, nonce: str, *, rank: int, nodes: int, model: str) -> str:
    """Shows that a rank holds the generation's key without telling it. ``nonce`` is the one that asks."""
    said = json.dumps([nonce, rank, nodes, model])
    return hmac.new(key.encode(), said.encode(), hashlib.sha256).hexdigest()


class Channel:
    """One connection between two ranks. ``beat`` has to run beside whoever receives."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._heard = False

    @property
    def peer(self) -> str:
        """The other side's IP address."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if name else "?"

    def send(self, type: str, **fields: Any) -> None:
        """What can't be sent is lost: that the peer has gone shows to whoever receives."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"type": type, **fields}).encode() + b"\n")

    async def receive(self) -> Frame:
        """The next frame but keep-alives. Raises Gone."""
        while True:
            frame = await self._next()
            self._heard = True
            if frame["type"] != "ping":
                return frame

    async def _next(self) -> Frame:
        try:
            line = await self._reader.readline()
        except ValueError:
            raise Gone(f"it sent more than {LINE_BYTES} bytes without an end of line") from None
        except (ConnectionResetError, BrokenPipeError):
            raise Gone(CLOSED) from None
        except OSError as error:
            raise Gone(f"its connection broke: {error.strerror or error}") from None
        if not line.endswith(b"\n"):
            raise Gone(CLOSED)
        try:
            frame = json.loads(line)
        except ValueError:
            frame = None
        if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
            raise Gone("it does not speak as a rank of the simulated engine does")
        return frame

    async def beat(self) -> None:
        """Keeps the connection alive, and raises Gone once the peer has been silent for long.

        Counted in beats of our own, so that a process that was itself stopped does not hold that against the others.
        """
        silent = 0
        while silent < SILENT_BEATS:
            self._heard = False
            self.send("ping")
            await asyncio.sleep(BEAT_S)
            silent = 0 if self._heard else silent + 1
        raise Gone(f"it has been silent for {BEAT_S * SILENT_BEATS:g} s")

    def close(self) -> None:
        """What was sent before still arrives."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write_eof()
        self._writer.close()


def split_address(text: str) -> tuple[str, int]:
    """``HOST:PORT``, with an IPv6 host in brackets. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{text!r}: expected HOST:PORT, such as 10.0.0.1:20050")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
