"""Identity from end to end: real machines' joining, TLS and clocks against a whole control plane."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from llmgw.agent.identity import NamedFiles
from llmgw.agent.joining import Joined, JoinRefused, join, place_of
from llmgw.control.certificate_operations import ask_to_renew, revoke
from llmgw.link.client import ClientIdentity, LinkClient
from llmgw.link.messages import Hello
from llmgw.pki.contexts import client_context
from llmgw.store.sqlite import SqliteStore
from tests.cluster.lab import ENGINE_PORTS, end_all, eventually
from tests.control.house import House, Opened, open_house

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The control plane's own loop: others end TLS in another way, and leave nothing to be resumed."""
    return uvloop.EventLoopPolicy()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with open_house(tmp_path / "cp") as opened:
        yield opened


async def joined(house: House, folder: Path, node: str = "gpu-1") -> Joined:
    return await join(await house.token(node), (), place_of(folder / "agent.yaml", folder / "work"), ())


async def until(check: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(eventually, check, what, DEADLINE_S)


# -- races


async def test_two_machines_race_with_one_token_through_the_real_doors(house: House, tmp_path: Path) -> None:
    """Two hundred times in a soak: ``LLMGW_RACES=200``."""
    for number in range(int(os.environ.get("LLMGW_RACES", "10"))):
        name = f"n{number}"
        token = await house.token(name)
        places = [place_of(tmp_path / f"{name}-{rival}" / "agent.yaml", tmp_path / f"{name}-{rival}") for rival in "ab"]
        answers = await asyncio.gather(*(join(token, (), place, ()) for place in places), return_exceptions=True)
        lost = [answer for answer in answers if isinstance(answer, BaseException)]
        (refusal,) = lost
        assert isinstance(refusal, JoinRefused), refusal
        assert f"this token for {name} was used on " in str(refusal)
        assert house.office.states(name) == ["token next"]
        (loser,) = [place for place, answer in zip(places, answers, strict=True) if answer is refusal]
        assert (loser.store.current(), loser.file.exists()) == (None, False)


# -- addresses


async def test_an_address_that_the_servers_certificate_lacks_is_passed_over(house: House, tmp_path: Path) -> None:
    token, place = await house.token("gpu-1"), place_of(tmp_path / "agent.yaml", tmp_path / "work")
    lacking = f"https://localhost:{house.link.port}"
    with pytest.raises(JoinRefused) as caught:
        await join(token, (lacking,), place, ())
    for words in ("is not for 'localhost'", "it is for: 127.0.0.1", "The token's secret was not sent"):
        assert words in str(caught.value)
    assert house.office.states() == []
    await join(token, (lacking, house.url), place, ())
    assert house.office.states() == ["token next"]


# -- the private key


def forms_of(key: ec.EllipticCurvePrivateKey) -> tuple[bytes, ...]:
    """Every form in which somebody could have written it down: raw, hex, base64 at each of the three offsets, PEM."""
    number = key.private_numbers().private_value.to_bytes(32, "big")
    shifted = (base64.b64encode(b"\0" * offset + number)[4:-4] for offset in range(3))
    # Of the PEM files such pieces as lie within the number, and within one line.
    pkcs8, sec1 = (
        base64.b64encode(key.private_bytes(Encoding.DER, form, NoEncryption()))
        for form in (PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL)
    )
    return (
        number,
        number[::-1],
        number.hex().encode(),
        number.hex().upper().encode(),
        *shifted,
        pkcs8[64:88],
        sec1[12:48],
    )


async def test_a_private_key_is_in_no_byte_that_tls_hides_and_in_no_file_of_the_control_plane(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "cp" / "state" / "llmgw.db")
    async with open_house(tmp_path / "cp", store=store) as house, Opened(house).standing() as opened:
        token = await house.token("gpu-1")
        place = place_of(tmp_path / "node" / "agent.yaml", tmp_path / "node")
        made = await join(token, (f"https://127.0.0.1:{opened.port}",), place, ())
        seen = bytes(opened.seen)
        await house.office.floor.settled()
    await store.close()
    key = load_pem_private_key(made.named.key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert b"CERTIFICATE REQUEST" in seen, "what TLS hides was read"
    assert token.secret.encode() in seen
    assert b"BEGIN CERTIFICATE-----" in seen, "in both directions"
    assert b"PRIVATE KEY" not in seen
    files = [path for path in (tmp_path / "cp").rglob("*") if path.is_file()]
    assert {"llmgw.db", "ca-key.pem"} <= {path.name for path in files}
    for form in forms_of(key):
        assert form not in seen
        assert [path.name for path in files if form in path.read_bytes()] == []
    assert any(form in made.named.key.read_bytes() for form in forms_of(key)), "it would be found"


# -- sessions of TLS


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_revoked_node_is_let_in_by_no_resumed_session(
    house: House, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    named = (await joined(house, tmp_path)).named
    context, _ = client_context(ClientIdentity(named.ca, named.cert, named.key))
    context.minimum_version = context.maximum_version = version

    def ask(session: ssl.SSLSession | None, *lines: str) -> tuple[ssl.SSLSession | None, bool, bytes]:
        with (
            socket.create_connection(("127.0.0.1", house.link.port), timeout=DEADLINE_S) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as tls,
        ):
            tls.sendall("\r\n".join(["GET /v1/stream HTTP/1.1", "Host: x", *lines, "", ""]).encode())
            answer = b""
            while b"\r\n\r\n" not in answer and (data := tls.recv(4096)):
                answer += data
            if not lines[0].endswith("Upgrade"):
                while tls.recv(4096):
                    pass  # to its end: OpenSSL keeps no session that was broken off
            return tls.session, bool(tls.session_reused), answer

    session, _, answer = await asyncio.to_thread(ask, None, "Connection: close")
    assert b"426 Upgrade Required" in answer
    assert session is not None
    assert not session.has_ticket
    assert (await dialled(house, named, "gpu-1")).connected, "until then it is let in"
    await revoke(house.identities, "gpu-1", "stolen")
    upgrade = (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {'A' * 22}==",
    )
    _, reused, answer = await asyncio.to_thread(ask, session, *upgrade)
    # OpenSSL resumes a session of TLS 1.2 by its id; in TLS 1.3 there is nothing to resume without a ticket.
    assert reused is (version is ssl.TLSVersion.TLSv1_2)
    if reused:
        assert b"403 Forbidden" in answer
        assert b"resumed TLS sessions are not taken" in answer
    state = await dialled(house, named, "gpu-1")
    assert (state.connected, "(stolen)" in state.words) == (False, True)


@dataclass
class Said:
    connected: bool
    words: str


async def dialled(house: House, named: NamedFiles, node: str) -> Said:
    """What a machine with these files is told, at its first try."""
    hello = Hello(role="node", id=node, fingerprint="machine", instance="process", probed=True)
    said: asyncio.Queue[Said] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    client = LinkClient(
        role="node",
        id=node,
        servers=(house.url,),
        tls=ClientIdentity(named.ca, named.cert, named.key),
        hello=lambda: hello,
        vitals=lambda: None,
        on_frame=lambda frame: None,
        on_state=lambda state: loop.call_soon_threadsafe(said.put_nowait, Said(state.connected, state.words)) and None,
    )
    client.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = await said.get()
                if found.connected or found.words:
                    return found
    finally:
        await asyncio.to_thread(client.stop)


# -- clocks


@asynccontextmanager
async def agent_of(file: Path, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """``llmgw agent`` as a process of its own; it is ended at the end."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "llmgw", "agent", "--config", str(file), stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        end_all(file.parent)


@pytest.mark.parametrize(
    ("minutes", "words"),
    [
        (-4, ""),
        (-6, "your clock is 6 min behind the control plane's"),
        (10, "your clock is 10 min ahead of the control plane's"),
        (30 * 1440, "your clock is 30 days ahead of the control plane's"),
    ],
)
async def test_a_machine_whose_clock_is_off(tmp_path: Path, minutes: int, words: str) -> None:
    """The machine's clock is right, and the control plane's is off by as much: who is told what is the same."""
    place = place_of(tmp_path / "node" / "agent.yaml", tmp_path / "node")
    async with open_house(tmp_path / "cp", ahead_s=-60.0 * minutes) as house:
        token = await house.token("gpu-1")
        if not words:
            await join(token, (), place, ())
            assert house.office.states() == ["token next"]
            return
        with pytest.raises(JoinRefused) as caught:
            await join(token, (), place, ())
        assert words in str(caught.value)
        assert "this machine's clock (" in str(caught.value)
        assert (place.store.current(), place.file.exists()) == (None, False)
        assert house.office.states() == []
        assert house.office.plane.cluster.nodes == {}
        house.clock.ahead_s = 0.0
        await join(await house.token("gpu-1"), (), place, ())


@pytest.mark.parametrize(("minutes", "renews"), [(-4, True), (-6, False), (10, False)])
async def test_an_agent_whose_clock_is_off_renews_or_says_so_in_its_own_log(
    tmp_path: Path, minutes: int, renews: bool
) -> None:
    """It joined while its clock was right."""
    folder, log = tmp_path / "node", tmp_path / "agent.log"
    async with open_house(tmp_path / "cp") as house:
        file = (await joined(house, folder)).wrote
        assert file is not None
        house.clock.ahead_s = -60.0 * minutes
        with file.open("a") as more:
            more.write(f"reconnect_base: 200ms\nports: {ENGINE_PORTS}\n")
            more.write(f"weights_dir: {folder}/weights\nengines_dir: {folder}/engines\n")
        async with agent_of(file, log) as agent:
            await until(lambda: house.link.peer("gpu-1", "node") is not None, f"it is let in: {log.read_text()}")
            ask_to_renew(house.identities, "gpu-1")
            if renews:
                await until(lambda: house.office.states() == ["token retired", "renewal current"], "it is renewed")
            else:
                which = f"{'ahead of' if minutes > 0 else 'behind'} the control plane's"
                words = f"your clock is {abs(minutes)} min {which}"
                await until(lambda: words in log.read_text(), f"its log says so: {log.read_text()}")
                assert house.office.states() == ["token current"]
                assert house.link.peer("gpu-1", "node") is not None, "and until it expires it goes on"
            assert agent.returncode is None
