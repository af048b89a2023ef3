"""Client and server over real mutual TLS on loopback."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import WSMsgType
from structlog.testing import capture_logs

from llmgw.cluster.model import Traffic
from llmgw.link import server as server_module
from llmgw.link.client import ClientIdentity
from llmgw.link.messages import (
    Desired,
    Hello,
    LogsRequest,
    Observed,
    Refused,
    Routes,
    RoutesAck,
    TrafficReport,
    Welcome,
)
from llmgw.link.server import LinkServer
from llmgw.link.wire import decode, encode
from llmgw.pki.contexts import client_context

from .ends import DEADLINE_S, VITALS, Pki, Recorder, make_end, make_server


async def test_a_node_is_welcomed_and_both_ways_carry_frames(serve, dial):
    server, told = await serve(servers=("https://127.0.0.1:1",), epoch=7)
    end = dial(server.port, "a")
    state = await end.connected()
    assert (state.epoch, state.session, state.server) == (7, 1, f"https://127.0.0.1:{server.port}")
    welcome = await end.frame(Welcome)
    assert (welcome.cluster, welcome.servers) == ("lab", ("https://127.0.0.1:1",))

    ((peer,),) = await told.wait("welcomed")
    assert (peer.id, peer.role, peer.session, peer.hello.fingerprint) == ("a", "node", 1, "machine-of-a")
    assert server.peer("a", "node") is peer

    peer.send(Desired(epoch=7, session=1, revision=3))
    assert (await end.frame(Desired)).revision == 3
    end.client.send(Observed(epoch=0, session=0, revision=3, weights=("w",)))
    ((of, frame),) = await told.wait("frame")
    assert of is peer
    assert frame == Observed(epoch=7, session=1, revision=3, weights=("w",))
    beats = await told.wait("heartbeat", 2)
    assert beats[0][1].vitals == VITALS


async def test_a_gateway_dials_in_with_the_servers_own_certificate(serve, dial, pki: Pki):
    server, told = await serve()
    files = ClientIdentity(pki.server.ca, pki.server.cert, pki.server.key)
    end = dial(server.port, "cp-1", role="gateway", tls=files)
    await end.connected()
    ((peer,),) = await told.wait("welcomed")
    peer.send(Routes(epoch=1, session=peer.session, version=4))
    assert (await end.frame(Routes)).version == 4
    end.client.send(RoutesAck(epoch=0, session=0, version=4))
    ((_, ack),) = await told.wait("frame")
    assert ack == RoutesAck(epoch=1, session=peer.session, version=4)
    end.client.send(TrafficReport(epoch=0, session=0, replicas={"tiny-aaaaa": Traffic(in_flight=3)}))
    _, (_, report) = await told.wait("frame", 2)
    assert report == TrafficReport(epoch=1, session=peer.session, replicas={"tiny-aaaaa": Traffic(in_flight=3)})
    assert server.peer("cp-1", "node") is None


async def test_a_stopped_client_sends_what_was_queued_and_says_goodbye(serve, dial):
    server, told = await serve()
    end = dial(server.port, "a")
    await end.connected()
    end.client.send(Observed(epoch=0, session=0, weights=("last",)))
    await asyncio.to_thread(end.client.stop)
    ((_, why),) = await told.wait("closed")
    assert why == "it closed the connection: stopped"
    assert told.of("frame")[0][1].weights == ("last",)
    assert server.peer("a", "node") is None
    assert end.client.state.words == "stopped"
    end.client.send(Observed(epoch=0, session=0))
    end.client.stop()


def test_a_client_that_was_never_started_can_be_told_and_stopped(pki: Pki):
    end = make_end(["https://127.0.0.1:1"], pki.node("a"), "a")
    end.client.send(Observed(epoch=0, session=0))
    end.client.stop()
    assert end.client.state.words == "not connected yet"


async def test_what_changes_between_hello_and_welcome_is_not_lost(serve, pki: Pki):
    server, told = await serve()
    said: list[Hello] = []

    def hello() -> Hello:
        # As an agent whose shard died just after it had looked.
        said.append(Hello(role="node", id="a", weights=("before",)))
        end.client.send(Observed(epoch=0, session=0, weights=("after",)))
        return said[-1]

    end = make_end([f"https://127.0.0.1:{server.port}"], pki.node("a"), "a", hello=hello)
    end.client.start()
    try:
        ((peer, frame),) = await told.wait("frame")
    finally:
        await asyncio.to_thread(end.client.stop)
    assert peer.hello.weights == ("before",)
    assert frame.weights == ("after",)


async def test_another_process_of_the_same_machine_takes_over(serve, dial):
    server, told = await serve()
    first = dial(server.port, "a", instance="one", reconnect_max_s=600.0)
    await first.connected()
    second = dial(server.port, "a", instance="two")
    assert (await second.connected()).session == 2
    refused = await first.frame(Refused)
    assert refused.code == "duplicate"
    assert refused.words.startswith("another process of the same machine connected as 'a', from 127.0.0.1:")
    assert (await first.failed()).words == f"https://127.0.0.1:{server.port} ended the session: {refused.words}"
    kinds = [entry[0] for entry in told.told if entry[0] in ("welcomed", "closed")]
    assert kinds == ["welcomed", "closed", "welcomed"]
    assert server.peer("a", "node").session == 2


async def test_a_second_machine_is_refused_and_the_first_stays(serve, dial):
    server, told = await serve()
    first = dial(server.port, "a", fingerprint="one")
    await first.connected()
    second = dial(server.port, "a", fingerprint="two")
    words = (await second.failed()).words
    ((refusal,),) = await told.wait("refused")
    address = server.peer("a", "node").address
    assert (refusal.code, refusal.common_name, refusal.claimed_id) == ("duplicate", "a", "a")
    assert refusal.words == (
        f"a second machine at {refusal.address} claims to be 'a', which is connected from {address}: refused; "
        "two machines share a name and certificate (a copied image or disk?): give one of them its own with "
        "`llmgw ctl node token NAME` and `llmgw agent join`. Once a certificate that both have is renewed, the older "
        "one counts as copied, and neither is let in"
    )
    assert f"connected already, from another machine at {address} (you are at {refusal.address})" in words
    assert first.client.state.connected
    assert told.of("closed") == []


async def test_a_revoked_certificate_ends_the_session_at_the_next_heartbeat(serve, dial):
    revoked: set[str] = set()
    words = "the certificate of a was revoked: issue a new one"
    server, told = await serve(allow_serial=lambda presented: words if presented.id in revoked else None)
    end = dial(server.port, "a")
    await end.connected()
    revoked.add("a")
    ((_, why),) = await told.wait("closed")
    assert why == words
    assert (await end.frame(Refused)).code == "revoked"
    ((refusal,),) = await told.wait("refused")
    assert refusal.code == "revoked"


async def test_a_session_can_be_closed_with_words(serve, dial):
    server, told = await serve()
    end = dial(server.port, "a")
    await end.connected()
    server.peer("a", "node").close("this control plane was deposed")
    assert (await end.failed()).words == (
        f"https://127.0.0.1:{server.port} ended the session: this control plane was deposed"
    )
    assert (await told.wait("closed"))[0][1] == "this control plane was deposed"


async def test_a_delegate_that_fails_breaks_nothing(serve, dial):
    server, told = await serve()
    told.on_welcomed = lambda peer: 1 / 0  # type: ignore[method-assign]
    with capture_logs() as logs:
        end = dial(server.port, "a")
        await end.connected()
        await told.wait("heartbeat", 2)
    assert "the control plane failed at a message" in [entry["event"] for entry in logs]


# -- servers that come and go


async def test_it_goes_round_to_a_server_that_it_learned_of(serve, dial):
    other, _ = await serve(epoch=2)
    server, _ = await serve(servers=(f"https://127.0.0.1:{other.port}",))
    end = dial(server.port, "a")
    await end.connected()
    await server.stop()
    state = await end.state(lambda state: state.connected and state.epoch == 2)
    assert state.server == f"https://127.0.0.1:{other.port}"


async def test_a_server_that_stops_says_so_and_its_peers_come_back(serve, dial, pki: Pki):
    server, told = await serve()
    end = dial(server.port, "a")
    await end.connected()
    await server.stop()
    assert told.of("closed")[0][1] == "the control plane is stopping"
    words = (await end.failed()).words
    assert words == f"https://127.0.0.1:{server.port} closed the connection: the control plane is stopping"
    again = make_server(pki, Recorder(), listen=("127.0.0.1", server.port), epoch=2)
    await again.start()
    try:
        assert (await end.connected()).epoch == 2
    finally:
        await again.stop()


async def test_a_deposed_leader_is_not_believed(serve, dial, pki: Pki):
    old, _ = await serve(epoch=4)
    leader, _ = await serve(epoch=5)
    end = dial(0, "a", servers=[f"https://127.0.0.1:{leader.port}", f"https://127.0.0.1:{old.port}"])
    assert (await end.connected()).epoch == 5
    await leader.stop()
    state = await end.state(lambda state: "was deposed" in state.words)
    assert f"https://127.0.0.1:{old.port} leads with epoch 4, but epoch 5 has been seen" in state.words
    assert not state.connected
    await serve(epoch=6, listen=("127.0.0.1", leader.port))
    assert (await end.connected()).epoch == 6
    assert not any(seen.connected and seen.epoch == 4 for seen in end.seen)


class Relay:
    """Stands between the two ends, and can stop passing bytes on while both connections stay open."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Relay]:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def freeze(self) -> None:
        self._flows.clear()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._tasks += [
            asyncio.ensure_future(self._pump(reader, other_writer)),
            asyncio.ensure_future(self._pump(other_reader, writer)),
        ]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await self._flows.wait()
                writer.write(data)
        finally:
            writer.transport.abort()


async def test_a_half_open_connection_is_seen_by_both_ends(serve, dial):
    server, told = await serve(heartbeat_s=0.3)
    async with Relay(server.port).open() as relay:
        end = dial(relay.port, "a", fingerprint="one")
        await end.connected()
        relay.freeze()
        state = await end.failed()
        assert state.words == f"nothing was heard from https://127.0.0.1:{relay.port} for 0.9 s"
        ((_, why),) = await told.wait("closed")
        assert why == "nothing was heard from it for 1.8 s"
        # Only now may another machine have the name.
        await dial(server.port, "a", fingerprint="two").connected()


def test_heartbeats_go_out_while_the_main_thread_holds_on_to_the_interpreter(pki: Pki):
    enough, port = threading.Event(), threading.Event()
    stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    ports: list[int] = []

    class Counting(Recorder):
        def on_heartbeat(self, *_: object) -> None:
            self.told.append(())
            if len(self.told) >= 4:
                enough.set()

        def on_closed(self, *_: object) -> None: ...

        def on_welcomed(self, *_: object) -> None: ...

    async def run() -> None:
        done = asyncio.Event()
        stop.append((asyncio.get_running_loop(), done))
        server = make_server(pki, Counting(), heartbeat_s=0.4)
        await server.start()
        ports.append(server.port)
        port.set()
        await done.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert port.wait(DEADLINE_S)
    end = make_end([f"https://127.0.0.1:{ports[0]}"], pki.node("a"), "a")
    end.client.start()
    deadline = threading.Event()
    timer = threading.Timer(DEADLINE_S, deadline.set)
    timer.start()
    try:
        end.state_now(lambda state: state.connected)
        number = 0
        while not enough.is_set() and not deadline.is_set():
            number = hash((number, "busy"))
        assert enough.is_set(), "the heartbeats stood still"
        assert end.client.state.session == 1, "and the session was never lost"
    finally:
        timer.cancel()
        end.client.stop()
        loop, done = stop[0]
        loop.call_soon_threadsafe(done.set)
        thread.join(DEADLINE_S)


# -- peers that misbehave


@asynccontextmanager
async def raw(server: LinkServer, files: ClientIdentity) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A WebSocket without any of the client's manners."""
    context, _ = client_context(files)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, force_close=True)) as http:
        ws = await http.ws_connect(f"https://127.0.0.1:{server.port}/v1/stream", max_msg_size=0, autoclose=False)
        sock = socket.socket(fileno=os.dup(ws.get_extra_info("socket").fileno()))
        try:
            yield ws
        finally:
            with sock, suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            # The transport closes once its end has been read.
            async with asyncio.timeout(DEADLINE_S):
                while (await ws.receive()).type not in (WSMsgType.CLOSED, WSMsgType.ERROR):
                    pass


async def last_words(ws: aiohttp.ClientWebSocketResponse) -> Refused:
    async with asyncio.timeout(DEADLINE_S):
        frame = decode((await ws.receive()).data)
    assert isinstance(frame, Refused)
    return frame


async def greet(ws: aiohttp.ClientWebSocketResponse, id: str = "a") -> Welcome:
    await ws.send_str(encode(Hello(role="node", id=id, fingerprint="f")))
    async with asyncio.timeout(DEADLINE_S):
        frame = decode((await ws.receive()).data)
    assert isinstance(frame, Welcome)
    return frame


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ("nonsense", "a frame is not JSON: 'nonsense'"),
        ('{"type": "hello", "role": "node"}', "a 'hello' frame is malformed: id: Field required"),
        (
            '{"type": "heartbeat", "epoch": 0, "session": 0, "sent_at": 0}',
            "the first frame was 'heartbeat', not 'hello'",
        ),
        ('{"type": "weather"}', "the first frame was 'weather', not 'hello'"),
    ],
)
async def test_a_first_frame_that_is_no_hello(serve, pki: Pki, first: str, words: str):
    server, told = await serve()
    async with raw(server, pki.node("a")) as ws:
        await ws.send_str(first)
        assert await last_words(ws) == Refused(code="malformed", words=words)
    ((refusal,),) = await told.wait("refused")
    assert refusal.words == f"{refusal.address}: {words}"
    assert refusal.common_name == "a"
    assert told.of("welcomed") == []


async def test_a_hello_of_a_protocol_to_come_is_told_so_though_it_can_not_be_read(serve, pki: Pki):
    server, _ = await serve()
    async with raw(server, pki.node("a")) as ws:
        await ws.send_str(
            '{"type": "hello", "protocol": 9, "oldest_protocol": 8, "version": "3.0", "node": {"id": "a"}}'
        )
        refused = await last_words(ws)
    assert refused.code == "protocol"
    assert "you speak protocol 8 to 9 (llmgw v3.0): upgrade the control plane" in refused.words


async def test_a_peer_that_never_says_hello(serve, pki: Pki, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "HELLO_S", 0.05)
    server, _ = await serve()
    async with raw(server, pki.node("a")) as ws:
        assert await last_words(ws) == Refused(code="malformed", words="no hello within 0.05 s")


async def test_a_malformed_frame_ends_the_session_with_words(serve, pki: Pki):
    server, told = await serve()
    async with raw(server, pki.node("a")) as ws:
        await greet(ws)
        await ws.send_str('{"type": "observed", "epoch": 1}')
        words = "a 'observed' frame is malformed: session: Field required"
        assert await last_words(ws) == Refused(code="malformed", words=words)
    assert (await told.wait("closed"))[0][1] == words
    assert server.counted["malformed"] == 1


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("binary", "it sent a binary frame; text frames were expected"),
        ("large", "it sent what can't be taken: Message size 2001 exceeds limit 2000"),
    ],
)
async def test_frames_of_the_wrong_kind_end_the_session(
    serve, pki: Pki, monkeypatch: pytest.MonkeyPatch, kind: str, why: str
):
    monkeypatch.setattr(server_module, "MAX_FRAME_BYTES", 2000)
    server, told = await serve()
    async with raw(server, pki.node("a")) as ws:
        await greet(ws)
        await (ws.send_bytes(b"x") if kind == "binary" else ws.send_str("x" * 2001))
        assert (await told.wait("closed"))[0][1] == why


async def test_unknown_and_stale_frames_are_dropped_and_counted_and_the_session_goes_on(serve, pki: Pki):
    server, told = await serve()
    async with raw(server, pki.node("a")) as ws:
        welcome = await greet(ws)
        await ws.send_str('{"type": "weather"}')
        await ws.send_str(encode(Observed(epoch=welcome.epoch, session=welcome.session + 1)))
        await ws.send_str(encode(Observed(epoch=welcome.epoch - 1, session=welcome.session)))
        await ws.send_str(encode(Observed(epoch=welcome.epoch, session=welcome.session, weights=("this",))))
        ((_, frame),) = await told.wait("frame")
    assert frame.weights == ("this",)
    assert server.counted["unknown-type"] == 1
    assert server.registry.dropped == {"stale-session": 1, "stale-epoch": 1}


async def test_fuzzed_frames_never_harm_another_peer(serve, dial, pki: Pki):
    server, told = await serve()
    good = dial(server.port, "b")
    await good.connected()
    rng = random.Random(7)
    text = encode(Observed(epoch=1, session=1, weights=("w",)))
    for round in range(40):
        async with raw(server, pki.node("a")) as ws:
            if round % 2:
                await greet(ws)
            broken = list(text)
            for _ in range(rng.randint(1, 6)):
                broken[rng.randrange(len(broken))] = chr(rng.randrange(32, 0x2FF))
            await ws.send_str("".join(broken))
            await ws.send_str(text)
    beats = len(told.of("heartbeat"))
    await told.wait("heartbeat", beats + 2)
    assert good.client.state.session == 1
    assert good.client.state.connected


async def test_a_peer_that_does_not_read_is_closed_and_holds_up_nobody(serve, dial, pki: Pki):
    server, told = await serve(heartbeat_s=5.0)
    other = dial(server.port, "b", heartbeat_s=0.3)
    await other.connected()
    async with raw(server, pki.node("a")) as ws:
        await greet(ws)
        peer = server.peer("a", "node")
        # Nobody reads on the other side: the sockets' buffers fill, then the queue.
        for number in range(4):
            peer.send(LogsRequest(id=f"{number}-{'x' * 4_000_000}", shard="s/0"))
        await told.wait("heartbeat", len(told.of("heartbeat")) + 2)
        for _ in range(1100):
            peer.send(LogsRequest(id="x", shard="s/0"))
        closed = await told.wait("closed")
        assert closed[0][1] == "it does not read: 1024 frames are waiting to be sent"
        peer.send(Desired(epoch=1, session=1, revision=1))
    assert other.client.state.connected
    assert other.client.state.session == 1


async def test_a_server_stops_though_a_peer_does_not_read(serve, pki: Pki):
    server, _ = await serve(heartbeat_s=5.0)
    async with raw(server, pki.node("a")) as ws:
        await greet(ws)
        for number in range(4):
            server.peer("a", "node").send(LogsRequest(id=f"{number}-{'x' * 4_000_000}", shard="s/0"))
        await asyncio.wait_for(server.stop(), 10.0)


# -- TLS


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_no_tickets_are_given_and_a_resumed_session_gets_nothing(serve, pki: Pki, version: ssl.TLSVersion):
    server, _ = await serve()
    context, _ = client_context(pki.node("a"))
    context.minimum_version = context.maximum_version = version

    def ask(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool, bytes]:
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as tls,
        ):
            tls.sendall(b"GET /v1/stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = b""
            while data := tls.recv(4096):
                answer += data
            return tls.session, bool(tls.session_reused), answer

    session, _, answer = await asyncio.to_thread(ask, None)
    assert b"426 Upgrade Required" in answer
    assert session is None or not session.has_ticket
    _, reused, answer = await asyncio.to_thread(ask, session)
    # OpenSSL resumes a session of TLS 1.2 by its id, without a ticket, and Python can't forbid it: so it gets nothing.
    assert reused is (version is ssl.TLSVersion.TLSv1_2)
    assert (b"403 Forbidden" in answer) is reused


async def test_three_hundred_quick_connections_keep_one_context(serve, pki: Pki):
    server, _ = await serve()
    context, _ = client_context(pki.node("a"))

    def contexts() -> int:
        gc.collect()
        return sum(isinstance(thing, ssl.SSLContext) for thing in gc.get_objects())

    before = contexts()
    for _ in range(300):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context, server_hostname="127.0.0.1")
        writer.transport.abort()
    assert contexts() - before < 3  # others may hold one of their own; what must not grow is one for each of 300


async def test_a_renewed_certificate_is_taken_up_and_a_broken_one_is_not(serve, dial, pki: Pki, tmp_path: Path):
    server, told = await serve()
    pki.authority.issue_client("r", tmp_path)
    files = ClientIdentity(tmp_path / "ca.pem", tmp_path / "r.pem", tmp_path / "r-key.pem")
    end = dial(server.port, "r", tls=files)
    await end.connected()

    async def next_serial(number: int) -> str:
        server.peer("r", "node").end("to be dialled anew")
        peer = (await told.wait("welcomed", number))[-1][0]
        return peer.identity.serial

    first = told.of("welcomed")[0][0].identity.serial
    assert await next_serial(2) == first
    renewed = pki.authority.issue_client("r", tmp_path, renew=True)
    assert await next_serial(3) == renewed.serial
    shutil.copy(pki.node("a").key, files.key)
    with capture_logs() as logs:
        assert await next_serial(4) == renewed.serial
    why = [entry["why"] for entry in logs if entry["event"].startswith("the new certificate can't be used")]
    assert why == [f"the key {files.key} does not belong to the certificate {files.cert}: one of the two was replaced"]


async def test_a_key_that_others_can_read_is_warned_about(pki: Pki, tmp_path: Path):
    pki.authority.issue_client("w", tmp_path)
    files = ClientIdentity(tmp_path / "ca.pem", tmp_path / "w.pem", tmp_path / "w-key.pem")
    files.key.chmod(0o644)
    end = make_end(["https://127.0.0.1:1"], replace(files), "w")
    with capture_logs() as logs:
        end.client.start()
    await asyncio.to_thread(end.client.stop)
    (words,) = [entry["why"] for entry in logs if entry["event"] == "identity"]
    assert words.startswith(f"the key {files.key} is open to others (mode 0644)")
