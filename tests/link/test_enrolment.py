"""What is left of a question once it has been answered: nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from llmgw.link.course import parse_server
from llmgw.link.enrolment import Enrolment, EnrolmentError, unverified
from tests.link.ends import Pki


@contextmanager
def silent(pki: Pki, body: bytes) -> Iterator[str]:
    """A server that answers one request, says that it closes, and then neither closes nor says goodbye."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki.server.cert, pki.server.key)
    done = threading.Event()

    def serve(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        with accepted, context.wrap_socket(accepted, server_side=True) as connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            done.wait(30)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        try:
            yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            done.set()
            thread.join(30)


def test_a_server_that_does_not_say_goodbye_leaves_no_socket_behind(pki: Pki) -> None:
    async def ask(url: str) -> str:
        try:
            await Enrolment(parse_server(url), unverified()).authority()
        except EnrolmentError as error:
            return str(error)
        return ""

    with silent(pki, json.dumps({"ca": "", "time": ""}).encode()) as url:
        words = asyncio.run(ask(url))
        gc.collect()  # what was left open would be complained of now
    assert "the control plane's answer has no `ca`" in words
