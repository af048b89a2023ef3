"""Every way in which a peer can fail to get in: its own words on its side, and on the server's where it was reached.

Over real sockets. The texts are what an operator reads at three in the morning, so they are asserted whole,
but for times and paths.
"""

from __future__ import annotations

import asyncio
import os
import queue
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import uvloop
from aiohttp import web
from structlog.testing import capture_logs

from llmgw.link.client import ClientIdentity, LinkError
from llmgw.link.listener import ListenError
from llmgw.link.messages import Hello
from llmgw.link.server import ServerIdentity
from llmgw.pki.authority import Authority
from llmgw.pki.certificate import unreadable
from llmgw.pki.issuer import Issuer, issue_issuer
from llmgw.pki.names import IdentityError
from llmgw.pki.roots import read_certificates
from llmgw.pki.signing import pem_of
from llmgw.pki.signing_request import new_key, pem_of_key
from llmgw.version import VERSION

from .ends import DEADLINE_S, Pki, Recorder, client_files, make_end, make_server, server_files


@pytest.fixture(scope="module", params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Each loop has a TLS of its own, and fails in its own ways."""
    return request.param()


MOMENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC")
PORT = re.compile(r"127\.0\.0\.1:\d+")


def plain(words: str, pki: Pki, directory: Path | None = None) -> str:
    """Words without what differs from run to run."""
    if directory is not None:
        words = words.replace(str(directory), "DIR")
    words = re.sub(r"key [0-9a-f]{12}", "key K", words.replace(str(pki.directory), "LAB"))
    return PORT.sub("ADDRESS", MOMENT.sub("TIME", words))


async def fail(serve, dial, id: str, pki: Pki, tls: ClientIdentity, *, directory: Path, **options) -> tuple[str, str]:
    """Dial with ``tls``; the words of the peer's log and those of the server's, without what differs."""
    server, told = await serve()
    with capture_logs() as logs:
        end = dial(server.port, id, tls=tls, **options)
        state = await end.failed()
        refusal = (await told.wait("refused"))[0][0]
    ours = [entry for entry in logs if entry["event"] == "not connected"]
    theirs = [entry for entry in logs if entry["event"] == "refused"]
    assert ours[0]["why"] == state.words
    assert ours[0]["log_level"] == "warning"
    assert theirs[0]["why"] == refusal.words
    return plain(state.words, pki, directory), plain(refusal.words, pki, directory)


async def test_certificate_for_a_claiming_b(serve, dial, pki: Pki, tmp_path: Path):
    ours, theirs = await fail(serve, dial, "b", pki, pki.node("a"), directory=tmp_path)
    assert ours == (
        "https://ADDRESS refused this peer: your certificate is for 'a', but you claim to be 'b': use the certificate "
        "of 'b' (`llmgw ctl cert issue-client b`), or set `node_id: a`"
    )
    assert theirs == (
        "ADDRESS claims to be 'b', but its certificate is for 'a': one of the two is wrong on that machine "
        "(the name it goes by, or its `tls:` files)"
    )


async def test_certificate_of_another_authority(serve, dial, pki: Pki, tmp_path: Path):
    other = Authority.create(tmp_path / "other", "lab")
    foreign = client_files(other.issue_client("a", tmp_path / "a"))
    ours, theirs = await fail(serve, dial, "a", pki, replace(foreign, ca=pki.node("a").ca), directory=tmp_path)
    assert ours == (
        "https://ADDRESS closed the connection: the certificate DIR/a/a.pem was issued by 'llmgw lab authority', "
        "key K, not by the authority in LAB/nodes/a/ca.pem ('llmgw lab authority', key K): have 'a' issued by the "
        "cluster's own authority (`llmgw ctl cert issue-client`)"
    )
    assert theirs == (
        "ADDRESS: nothing leads from its certificate to our authority ('llmgw lab authority', key K): it is from "
        "another one (issue one with `llmgw ctl cert issue-client NODE`), or the file of its `tls.cert` lacks the "
        "certificate of its issuer after its own; its own log says which"
    )


async def test_certificate_that_comes_with_another_authority(serve, dial, pki: Pki, tmp_path: Path):
    """Its own, that is: whoever has that one in its files shows it too, and then there is no doubt."""
    other = Authority.create(tmp_path / "other", "lab")
    foreign = client_files(other.issue_client("a", tmp_path / "a"))
    foreign.cert.write_bytes(foreign.cert.read_bytes() + other.roots_pem())
    _, theirs = await fail(serve, dial, "a", pki, replace(foreign, ca=pki.node("a").ca), directory=tmp_path)
    assert theirs == (
        "ADDRESS: its certificate is from another authority than ours ('llmgw lab authority', key K): "
        "issue one with `llmgw ctl cert issue-client NODE`"
    )


def without_issuer(cert: Path) -> None:
    cert.write_bytes(pem_of(read_certificates(cert, "it")[0]))


async def test_certificate_without_its_issuer(serve, dial, pki: Pki, tmp_path: Path):
    key, now = new_key(), datetime.now(UTC)
    signed = issue_issuer(pki.authority, tmp_path).sign_node("a", key.public_key(), 86400.0, now)
    files = ClientIdentity(pki.node("a").ca, tmp_path / "a.pem", tmp_path / "a-key.pem")
    files.cert.write_text(signed.chain)
    files.key.write_bytes(pem_of_key(key))
    without_issuer(files.cert)
    ours, theirs = await fail(serve, dial, "a", pki, files, directory=tmp_path)
    assert ours == (
        "https://ADDRESS closed the connection: the certificate DIR/a.pem was issued by 'llmgw lab issuer', key K, "
        "whose own certificate is not in that file: nothing leads from it to the authority in LAB/nodes/a/ca.pem "
        "('llmgw lab authority', key K). The file must hold the certificate followed by its issuer's: append "
        "issuer.pem, which lies beside the control plane's ca.pem, or have 'a' issued anew "
        "(`llmgw ctl cert issue-client a --force`)"
    )
    assert theirs == (
        "ADDRESS: nothing leads from its certificate to our authority ('llmgw lab authority', key K): it is from "
        "another one (issue one with `llmgw ctl cert issue-client NODE`), or the file of its `tls.cert` lacks the "
        "certificate of its issuer after its own; its own log says which"
    )


async def test_expired_certificate(serve, dial, pki: Pki, tmp_path: Path):
    past = datetime.now(UTC) - timedelta(days=30)
    old = client_files(pki.authority.issue_client("a", tmp_path, 86400.0, now=past))
    ours, theirs = await fail(serve, dial, "a", pki, old, directory=tmp_path)
    assert ours == (
        "https://ADDRESS closed the connection: the certificate DIR/a.pem expired on TIME (this machine's clock says "
        "TIME): issue a new one with `llmgw ctl cert issue-client a --force`"
    )
    assert theirs == (
        "ADDRESS: its certificate has expired (this machine's clock says TIME): "
        "issue a new one with `llmgw ctl cert issue-client NODE --force`"
    )


async def test_certificate_that_is_not_valid_yet(serve, dial, pki: Pki, tmp_path: Path):
    future = datetime.now(UTC) + timedelta(days=30)
    early = client_files(pki.authority.issue_client("a", tmp_path, now=future))
    ours, theirs = await fail(serve, dial, "a", pki, early, directory=tmp_path)
    assert ours == (
        "https://ADDRESS closed the connection: the certificate DIR/a.pem is not valid before TIME, and this "
        "machine's clock says TIME: correct the clock (`timedatectl`), or issue the certificate anew"
    )
    assert theirs == (
        "ADDRESS: its certificate is not valid yet (this machine's clock says TIME): "
        "compare this machine's clock with that of the machine which issued it"
    )


async def test_plain_http_address(pki: Pki):
    with pytest.raises(LinkError) as caught:
        make_end(["http://10.0.0.140:7443"], pki.node("a"), "a")
    assert str(caught.value) == (
        "server 'http://10.0.0.140:7443' begins with http://, but this peer has certificates and speaks mutual TLS "
        "only: write https://10.0.0.140:7443"
    )


async def refused_server(serve, dial, pki: Pki, tls: ServerIdentity, directory: Path) -> tuple[str, str]:
    """Words of a peer that does not accept the server's certificate, and those of that server."""
    server, told = await serve(tls=tls)
    with capture_logs() as logs:
        end = dial(server.port, "a")
        state = await end.failed()
    assert next(entry["why"] for entry in logs if entry["event"] == "not connected") == state.words
    return plain(state.words, pki, directory), plain((await told.wait("refused"))[0][0].words, pki, directory)


async def test_server_certificate_lacks_the_dialled_address(dial, serve, pki: Pki, tmp_path: Path):
    files = server_files(pki.authority.issue_server(["10.0.0.1", "cp.example"], tmp_path, "cp-1"))
    ours, theirs = await refused_server(serve, dial, pki, files, tmp_path)
    assert ours == (
        "the certificate of https://ADDRESS is not for '127.0.0.1'; it is for: cp.example, 10.0.0.1. Dial one of "
        "those names, or issue the server's certificate with `llmgw ctl cert issue-server --san 127.0.0.1 …`"
    )
    assert theirs == (
        "ADDRESS: it went away during the TLS handshake: most likely it does not accept this server's certificate, "
        "which is for cp.example, 10.0.0.1; its own log says why"
    )


async def test_server_of_another_authority(dial, serve, pki: Pki, tmp_path: Path):
    ours, theirs = await refused_server(serve, dial, pki, Pki.make(tmp_path).server, tmp_path)
    assert ours == (
        "the certificate of https://ADDRESS was issued by 'llmgw lab authority', key K, not by the authority in "
        "LAB/nodes/a/ca.pem ('llmgw lab authority', key K): this is another cluster's server, or the authority was "
        "made anew; copy the right ca.pem here"
    )
    assert theirs.startswith("ADDRESS: it went away during the TLS handshake: most likely it does not accept")


@pytest.fixture
async def bare() -> AsyncIterator[Callable[[ServerIdentity], Awaitable[int]]]:
    """A TLS server that checks nothing of its own and hangs up after the handshake: what LinkServer would not do."""
    async with AsyncExitStack() as stack:

        async def start(files: ServerIdentity) -> int:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files.cert, files.key)
            server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
            stack.push_async_callback(server.wait_closed)
            stack.callback(server.close)
            return int(server.sockets[0].getsockname()[1])

        yield start


async def only_ours(dial, pki: Pki, directory: Path, port: int, **options) -> str:
    end = dial(port, "a", **options)
    return plain((await end.failed()).words, pki, directory)


def by_issuing_key(issuer: Issuer, ca: Path, directory: Path) -> ServerIdentity:
    signed, key = issuer.issue_server("cp-1", ["127.0.0.1"], 86400.0, datetime.now(UTC))
    files = ServerIdentity(ca, directory / "cp.pem", directory / "cp-key.pem")
    files.cert.write_text(signed.chain)
    files.key.write_bytes(key)
    return files


async def test_server_that_does_not_send_its_issuer(dial, bare, pki: Pki, tmp_path: Path):
    files = by_issuing_key(issue_issuer(pki.authority, tmp_path), pki.server.ca, tmp_path)
    without_issuer(files.cert)
    assert await only_ours(dial, pki, tmp_path, await bare(files)) == (
        "the certificate of https://ADDRESS was issued by 'llmgw lab issuer', key K, and the server does not send that "
        "issuer's own certificate: nothing leads from it to the authority in LAB/nodes/a/ca.pem ('llmgw lab "
        "authority', key K). The file of the server's `tls.cert` must hold the certificate followed by its issuer's: "
        "append issuer.pem, which lies beside the control plane's ca.pem, or issue the certificate anew with "
        "`llmgw ctl cert issue-server --force`. Where that issuer is another cluster's of the same name, copy the "
        "right ca.pem here"
    )


async def test_server_by_the_issuing_key_of_another_authority(dial, bare, pki: Pki, tmp_path: Path):
    """As after an authority was made anew: of the same name, and nothing is missing in what it sends."""
    other = Authority.create(tmp_path / "other", "lab")
    files = by_issuing_key(issue_issuer(other, tmp_path), other.directory / "ca.pem", tmp_path)
    assert await only_ours(dial, pki, tmp_path, await bare(files)) == (
        "the certificate of https://ADDRESS was issued by 'llmgw lab issuer', key K, not by the authority in "
        "LAB/nodes/a/ca.pem ('llmgw lab authority', key K): this is another cluster's server, or the authority was "
        "made anew; copy the right ca.pem here"
    )


async def test_server_of_another_cluster_that_does_not_send_its_issuer(dial, bare, pki: Pki, tmp_path: Path):
    other = Authority.create(tmp_path / "other", "attic")
    files = by_issuing_key(issue_issuer(other, tmp_path), other.directory / "ca.pem", tmp_path)
    without_issuer(files.cert)
    assert await only_ours(dial, pki, tmp_path, await bare(files)) == (
        "the certificate of https://ADDRESS was issued by 'llmgw attic issuer', key K, not by the authority in "
        "LAB/nodes/a/ca.pem ('llmgw lab authority', key K): this is another cluster's server, or the authority was "
        "made anew; copy the right ca.pem here"
    )


async def test_server_certificate_that_expired_an_hour_ago(dial, bare, pki: Pki, tmp_path: Path):
    past = datetime.now(UTC) - timedelta(hours=2)
    files = server_files(pki.authority.issue_server(["127.0.0.1"], tmp_path, "cp-1", lifetime_s=3600.0, now=past))
    assert await only_ours(dial, pki, tmp_path, await bare(files)) == (
        "the certificate of https://ADDRESS expired on TIME (this machine's clock says TIME): renew it on the control "
        "plane with `llmgw ctl cert issue-server --force`, or correct this machine's clock"
    )


async def test_server_certificate_that_is_not_valid_yet(dial, bare, pki: Pki, tmp_path: Path):
    future = datetime.now(UTC) + timedelta(days=9)
    files = server_files(pki.authority.issue_server(["127.0.0.1"], tmp_path, "cp-1", now=future))
    assert await only_ours(dial, pki, tmp_path, await bare(files)) == (
        "the certificate of https://ADDRESS is not valid before TIME, and this machine's clock says TIME: "
        "one of the two clocks is wrong"
    )


async def test_server_with_the_certificate_of_a_node(dial, bare, pki: Pki, tmp_path: Path):
    node = pki.node("n")
    words = await only_ours(dial, pki, tmp_path, await bare(ServerIdentity(node.ca, node.cert, node.key)))
    assert words == (
        "the certificate of https://ADDRESS ('n') is not a server's: it was made for a client; use issue-server"
    )


async def test_a_server_that_hangs_up_though_all_looks_right_here(dial, bare, pki: Pki, tmp_path: Path):
    assert await only_ours(dial, pki, tmp_path, await bare(pki.server)) == (
        "https://ADDRESS closed the connection before a welcome. The certificate LAB/nodes/a/a.pem (a, valid TIME to "
        "TIME) looks right by this machine's clock (TIME): compare the server's clock, see whether it uses the same "
        "authority (ours is 'llmgw lab authority', key K), and read the control plane's log, which says why"
    )


async def test_connection_refused(dial, pki: Pki, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        words = await only_ours(dial, pki, tmp_path, port)
    assert words == f"https://ADDRESS: connection refused: nothing listens on port {port} of 127.0.0.1; is it running?"


async def test_name_not_resolved(dial, pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_such_name(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    assert await only_ours(dial, pki, tmp_path, 0, servers=["https://control.invalid:7443"]) == (
        "https://control.invalid:7443: the name 'control.invalid' can't be resolved (Name or service not known): "
        "correct the name or the resolver, or write the IP address"
    )


async def test_a_plain_http_server_on_that_port(dial, pki: Pki, tmp_path: Path):
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        words = await only_ours(dial, pki, tmp_path, runner.addresses[0][1])
    finally:
        await runner.cleanup()
    assert words == (
        "https://ADDRESS does not speak TLS: some other server has that port (the client's or the admin port?); "
        "agents dial the address of `listen.agents`, 7443 by default"
    )


async def test_an_https_server_that_is_no_control_plane(dial, pki: Pki, tmp_path: Path):
    runner = web.AppRunner(web.Application())
    await runner.setup()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki.server.cert, pki.server.key)
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        words = await only_ours(dial, pki, tmp_path, runner.addresses[0][1])
    finally:
        await runner.cleanup()
    assert words == (
        "https://ADDRESS answered HTTP 404 instead of opening the stream: this is not the port for agents "
        "(`listen.agents`), or not llmgw's control plane"
    )


async def test_protocols_that_do_not_overlap(dial, serve, pki: Pki, tmp_path: Path):
    hello = Hello(role="node", id="a", protocol=7, oldest_protocol=6, version="9.9.9")
    ours, theirs = await fail(serve, dial, "a", pki, pki.node("a"), hello=lambda: hello, directory=tmp_path)
    assert ours == (
        f"https://ADDRESS refused this peer: this control plane speaks protocol 1 (llmgw v{VERSION}), you speak "
        "protocol 6 to 7 (llmgw v9.9.9): upgrade the control plane (control planes first, then gateways, then agents)"
    )
    assert theirs == (
        "node 'a' at ADDRESS speaks protocol 6 to 7 (llmgw v9.9.9), this control plane speaks protocol 1 "
        f"(llmgw v{VERSION}): upgrade the control plane (control planes first, then gateways, then agents)"
    )


async def test_a_client_without_a_certificate(serve, pki: Pki):
    server, told = await serve()
    context = ssl.create_default_context(cafile=str(pki.node("a").ca))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
    writer.write(b"GET /v1/stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = b""
    with suppress(ssl.SSLError, ConnectionError):
        answer = await reader.read()
    writer.transport.abort()
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"you showed no certificate: agents and gateways need one" in answer
    assert plain((await told.wait("refused"))[0][0].words, pki) == (
        "ADDRESS: it showed no certificate: agents and gateways need one (`llmgw ctl cert issue-client NODE`)"
    )


async def test_plain_http_to_the_agents_port(serve, pki: Pki):
    server, told = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await reader.read()
    writer.close()
    assert plain((await told.wait("refused"))[0][0].words, pki) == (
        "ADDRESS: it does not speak TLS: agents must dial https://…; this port is not for clients of the API"
    )


async def test_a_probe_that_says_nothing_is_no_failure(serve, dial):
    server, told = await serve()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.close()
    await writer.wait_closed()
    await dial(server.port, "a").connected()
    assert told.of("refused") == []


async def test_the_same_refusal_is_told_once(serve, dial, pki: Pki):
    server, told = await serve()
    hellos: queue.Queue[Hello] = queue.Queue()

    def hello() -> Hello:
        hellos.put(Hello(role="node", id="b"))
        return Hello(role="node", id="b")

    with capture_logs() as logs:
        end = dial(server.port, "b", tls=pki.node("a"), hello=hello)
        for _ in range(5):
            await asyncio.to_thread(hellos.get, timeout=DEADLINE_S)
    assert server.counted["refused-identity"] >= 4
    assert len(told.of("refused")) == 1
    assert len([entry for entry in logs if entry["event"] in ("refused", "not connected")]) == 2
    assert not end.client.state.connected


async def test_expired_server_certificate_keeps_the_server_from_starting(pki: Pki, tmp_path: Path):
    past = datetime.now(UTC) - timedelta(days=900)
    files = server_files(pki.authority.issue_server(["127.0.0.1"], tmp_path, "cp-1", now=past))
    assert await no_start(pki, tmp_path, tls=files) == (
        "the server certificate DIR/server.pem expired on TIME (this machine's clock says TIME): every node would "
        "refuse it. Renew it with `llmgw ctl cert issue-server --force`"
    )


async def test_server_certificate_of_the_future_keeps_the_server_from_starting(pki: Pki, tmp_path: Path):
    future = datetime.now(UTC) + timedelta(days=9)
    files = server_files(pki.authority.issue_server(["127.0.0.1"], tmp_path, "cp-1", now=future))
    assert await no_start(pki, tmp_path, tls=files) == (
        "the server certificate DIR/server.pem is valid from TIME on, and this machine's clock says TIME: correct the "
        "clock, or issue the certificate anew"
    )


async def test_a_running_server_warns_of_its_own_certificate_before_it_expires(serve, pki: Pki, tmp_path: Path):
    issued = pki.authority.issue_server(["127.0.0.1"], tmp_path, "cp-1", lifetime_s=7 * 86400.0)
    with capture_logs() as logs:
        await serve(tls=server_files(issued))
    (words,) = [entry["why"] for entry in logs if entry["event"] == "identity"]
    assert plain(words, pki, tmp_path) == "the certificate DIR/server.pem expires on TIME: renew it before"


async def test_foreign_server_certificate_keeps_the_server_from_starting(pki: Pki, tmp_path: Path):
    files = replace(Pki.make(tmp_path).server, ca=pki.server.ca)
    assert await no_start(pki, tmp_path, tls=files) == (
        "the server certificate DIR/server/server.pem was issued by 'llmgw lab authority', key K, not by the authority "
        "in LAB/server/ca.pem ('llmgw lab authority', key K): every node would refuse it. Issue it with that authority"
    )


async def test_server_certificate_without_its_issuer_keeps_the_server_from_starting(pki: Pki, tmp_path: Path):
    files = by_issuing_key(issue_issuer(pki.authority, tmp_path), pki.server.ca, tmp_path)
    without_issuer(files.cert)
    assert await no_start(pki, tmp_path, tls=files) == (
        "the server certificate DIR/cp.pem was issued by 'llmgw lab issuer', key K, whose own certificate is not in "
        "that file: every node would refuse it. The file must hold the certificate followed by its issuer's: append "
        "that of the issuing key, issuer.pem, or issue the certificate anew with `llmgw ctl cert issue-server --force`"
    )


async def test_a_nodes_certificate_keeps_the_server_from_starting(pki: Pki, tmp_path: Path):
    node = pki.node("a")
    assert await no_start(pki, tmp_path, tls=ServerIdentity(node.ca, node.cert, node.key)) == (
        "LAB/nodes/a/a.pem is not a server's certificate (it names 'a'): `llmgw ctl cert issue-server` makes one"
    )


async def test_a_taken_port_names_who_has_it(pki: Pki, serve, tmp_path: Path):
    server, _ = await serve()
    name = Path("/proc/self/comm").read_text().strip()
    assert await no_start(pki, tmp_path, listen=("127.0.0.1", server.port)) == (
        f"can't listen on ADDRESS: the port is taken by pid {os.getpid()} ({name}); stop that process, or choose "
        "another port"
    )


async def test_an_address_of_another_machine(pki: Pki, tmp_path: Path):
    assert await no_start(pki, tmp_path, listen=("192.0.2.1", 7443)) == (
        "can't listen on 192.0.2.1:7443: 192.0.2.1 is not an address of this machine"
    )


async def no_start(pki: Pki, directory: Path, **options) -> str:
    server = make_server(pki, Recorder(), **options)
    with pytest.raises((IdentityError, ListenError)) as caught:
        await server.start()
    await server.stop()
    return plain(str(caught.value), pki, directory)


def test_files_that_can_not_be_used(pki: Pki, tmp_path: Path):
    good, other = pki.node("a"), pki.node("b")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    sealed = tmp_path / "sealed.pem"
    sealed.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    (tmp_path / "link.pem").symlink_to("nowhere.pem")
    cases = {
        replace(good, key=tmp_path / "link.pem"): (
            "the key DIR/link.pem leads to DIR/nowhere.pem, which does not exist: put it back there, or correct the "
            "path in the file's `tls:` section"
        ),
        replace(good, key=tmp_path / "none.pem"): (
            "the key DIR/none.pem does not exist: copy it there, or correct the path in the file's `tls:` section"
        ),
        replace(good, key=other.key): (
            "the key LAB/nodes/b/b-key.pem does not belong to the certificate LAB/nodes/a/a.pem: "
            "one of the two was replaced"
        ),
        replace(good, cert=tmp_path / "none.pem"): (
            "the certificate DIR/none.pem does not exist: copy it there, or correct the path in the file's `tls:` "
            "section"
        ),
        replace(good, ca=other.cert): (
            "LAB/nodes/b/b.pem is not an authority's certificate (it names 'b'): the cluster's ca.pem was expected"
        ),
        replace(good, cert=good.key): (
            "the certificate LAB/nodes/a/a-key.pem is a private key: a file with BEGIN CERTIFICATE was expected"
        ),
        replace(good, key=good.cert): "LAB/nodes/a/a.pem is not a private key in PEM form",
        replace(good, key=sealed): (
            "the key DIR/sealed.pem is protected by a passphrase, and nobody is there to type it: "
            "`openssl pkey -in DIR/sealed.pem` takes it off"
        ),
        replace(
            good, key=garbage
        ): "the key DIR/garbage.pem can't be read: the file is not whole, or no key that TLS takes",
        replace(good, key=tmp_path): "the key DIR can't be read: Is a directory",
    }
    for files, words in cases.items():
        with pytest.raises(IdentityError) as caught:
            make_end(["https://127.0.0.1:1"], files, "a").client.start()
        assert plain(str(caught.value), pki, tmp_path) == words


def test_a_file_that_may_not_be_read():
    # As root every file can be read, so the words alone.
    assert unreadable(Path("/etc/llmgw/agent-key.pem"), "the key", PermissionError(13, "Permission denied")) == (
        "the key /etc/llmgw/agent-key.pem can't be read by this user (permission denied): correct its owner or mode"
    )
