"""The doors by which nodes get certificates, over real TLS: who may knock, what is read, what never goes through."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Mapping
from typing import Any

import pytest

from llmgw.link.joining import Given, JoinRefused, JoinRequest, RecoverRequest, RenewRequest
from llmgw.link.session import Presented
from llmgw.pki.certificate import PeerIdentity
from llmgw.pki.contexts import client_context
from llmgw.pki.signing_request import new_key, pem_of_request, signing_request

from .ends import DEADLINE_S, Pki

GIVEN = Given(certificate="CERT", ca="CA", node="a", cluster="lab", servers=("https://x:1",), labels={"rack": "a3"})
JOIN = {"id": "i", "secret": "s", "node": "a", "csr": "c", "time": "t", "fingerprint": "f", "more": "is ignored"}


class Recording:
    """Gives everybody the same certificate, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.refusal: Exception | None = None

    def authority(self) -> Mapping[str, str]:
        return {"ca": "CA", "time": "T"}

    async def join(self, request: JoinRequest, address: str) -> Given:
        return self._answer("join", request, address)

    async def renew(self, peer: PeerIdentity, request: RenewRequest, address: str) -> Given:
        return self._answer("renew", peer, request, address)

    def nonce(self, serial: str) -> str:
        self.asked.append(("nonce", serial))
        return "n"

    async def recover(self, request: RecoverRequest, address: str) -> Given:
        return self._answer("recover", request, address)

    def _answer(self, *asked: Any) -> Given:
        self.asked.append(asked)
        if self.refusal is not None:
            raise self.refusal
        return GIVEN


def without_certificate(pki: Pki) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(pki.server.ca))


async def ask(
    port: int, context: ssl.SSLContext, method: str, path: str, body: bytes | Mapping[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = await asyncio.wait_for(reader.read(), DEADLINE_S)  # to the end: nobody keeps a connection
    writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


async def test_a_machine_without_a_certificate_gets_as_far_as_it_must(serve, pki: Pki):
    joining = Recording()
    server, told = await serve(joining=joining)
    context = without_certificate(pki)
    assert await ask(server.port, context, "GET", "/v1/authority") == (200, {"ca": "CA", "time": "T"})
    status, answer = await ask(server.port, context, "POST", "/v1/join", JOIN)
    assert (status, answer) == (
        200,
        {
            "certificate": "CERT",
            "ca": "CA",
            "node": "a",
            "cluster": "lab",
            "servers": ["https://x:1"],
            "labels": {"rack": "a3"},
        },
    )
    kind, request, address = joining.asked[0]
    assert (kind, request.node, request.fingerprint) == ("join", "a", "f")
    assert address.startswith("127.0.0.1:")
    assert "'s'" not in repr(request)
    assert await ask(server.port, context, "POST", "/v1/recover/nonce", {"serial": "5e7a"}) == (200, {"nonce": "n"})
    status, answer = await ask(server.port, context, "POST", "/v1/renew", {"csr": "c", "time": "t"})
    assert (status, answer["error"]["code"]) == (401, "no_certificate")
    assert [asked[0] for asked in joining.asked] == ["join", "nonce"]
    assert told.of("refused") == []


async def test_renewing_is_by_the_certificate_that_tls_has_verified(serve, pki: Pki):
    joining = Recording()
    server, _ = await serve(joining=joining)
    context, identity = client_context(pki.node("a"))
    status, _ = await ask(server.port, context, "POST", "/v1/renew", {"csr": "c", "time": "t", "node": "b"})
    ((_, peer, request, _),) = joining.asked
    assert (status, peer.common_name, peer.serial) == (200, "a", identity.own.serial)
    assert request == RenewRequest(csr="c", time="t")


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        (b"", 400, "malformed", "the body is no JSON"),
        (b"\xff", 400, "malformed", "the body is no JSON"),
        (b"[1]", 400, "malformed", "the body is no JSON object"),
        (JOIN | {"csr": 1}, 400, "malformed", "`csr` is missing, or no text"),
        ({key: value for key, value in JOIN.items() if key != "secret"}, 400, "malformed", "`secret` is missing"),
        (JOIN | {"csr": "x" * 100_000}, 413, "malformed", "larger than any request here needs to be"),
    ],
)
async def test_bodies_that_are_not_read(serve, pki: Pki, body, status: int, code: str, words: str):
    joining = Recording()
    server, _ = await serve(joining=joining)
    found, answer = await ask(server.port, without_certificate(pki), "POST", "/v1/join", body)
    assert (found, answer["error"]["code"]) == (status, code)
    assert words in answer["error"]["message"]
    assert joining.asked == []


async def test_refusals_and_faults_have_one_shape(serve, pki: Pki):
    joining = Recording()
    server, _ = await serve(joining=joining)
    context = without_certificate(pki)
    joining.refusal = JoinRefused(403, "token_used", "why", "do")
    assert await ask(server.port, context, "POST", "/v1/join", JOIN) == (
        403,
        {"error": {"message": "why", "type": "invalid_request_error", "code": "token_used", "hint": "do"}},
    )
    joining.refusal = RuntimeError("a secret of the inside")
    status, answer = await ask(server.port, context, "POST", "/v1/join", JOIN)
    assert (status, answer["error"]["code"]) == (500, "fault")
    assert "inside" not in str(answer)


async def test_whoever_is_slow_is_not_waited_for(serve, pki: Pki, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llmgw.link.joining.READ_S", 0.2)
    server, _ = await serve(joining=Recording())
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=without_certificate(pki))
    writer.write(b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
    writer.transport.abort()
    assert b" 408 " in answer.partition(b"\r\n")[0]


async def test_a_certificate_that_is_not_trusted_gets_nowhere_at_any_door(serve, pki: Pki, tmp_path):
    server, told = await serve(joining=Recording())
    foreign = Pki.make(tmp_path)
    context, _ = client_context(foreign.node("a"))
    context.load_verify_locations(pki.server.ca)
    with pytest.raises((ssl.SSLError, ConnectionError, IndexError)):
        await ask(server.port, context, "GET", "/v1/authority")
    ((refusal,),) = await told.wait("refused")
    assert "its certificate is from another authority than ours" in refusal.words


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_resumed_session_renews_nothing(serve, pki: Pki, version: ssl.TLSVersion):
    joining = Recording()
    server, _ = await serve(joining=joining)
    context, _ = client_context(pki.node("a"))
    context.minimum_version = context.maximum_version = version
    csr = pem_of_request(signing_request(new_key(), "a"))
    body = json.dumps({"csr": csr, "time": "t"}).encode()

    def renew(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool, bytes]:
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as tls,
        ):
            tls.sendall(f"POST /v1/renew HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = b""
            while data := tls.recv(4096):
                answer += data
            return tls.session, bool(tls.session_reused), answer

    session, _, first = await asyncio.to_thread(renew, None)
    assert b" 200 " in first.partition(b"\r\n")[0]
    assert session is None or not session.has_ticket
    _, reused, second = await asyncio.to_thread(renew, session)
    assert (b'"code": "resumed"' in second) is reused
    assert len(joining.asked) == (1 if reused else 2)


async def test_a_revocation_closes_the_stream_at_once_and_the_others_stay(serve, dial, pki: Pki):
    revoked: set[str] = set()

    def allow(presented: Presented) -> str | None:
        return "it was revoked: stolen" if presented.id in revoked else None

    # Nobody beats meanwhile: it is not the next heartbeat that finds out.
    server, told = await serve(allow_serial=allow, heartbeat_s=600.0)
    ends = {id: dial(server.port, id) for id in ("a", "b")}
    for end in ends.values():
        await end.connected()
    revoked.add("a")
    server.close_refused()
    state = await ends["a"].failed()
    assert "it was revoked: stolen" in state.words
    assert [peer.id for peer, _ in told.of("closed")] == ["a"]
    assert server.peer("b", "node") is not None


async def test_files_are_taken_up_while_it_runs(serve, dial, pki: Pki, tmp_path):
    server, _ = await serve()
    first = dial(server.port, "a")
    await first.connected()
    before = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", server.port))
    pki.authority.issue_server(["127.0.0.1", "localhost"], pki.server.cert.parent, "cp-1", renew=True)
    server.take_up_files()
    assert await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", server.port)) != before
    assert first.client.state.connected
    second = dial(server.port, "b")
    await second.connected()
