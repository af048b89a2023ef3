"""Tables from a control plane over the real stream, and from disk without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llmgw.cluster.model import Route
from llmgw.gateway.feed import Feed
from llmgw.gateway.gateway import Gateway, StartError
from llmgw.gateway.main import gateway_id, settings_of
from llmgw.gateway.settings import GatewaySettings
from llmgw.gateway.table import Table, TableFile
from llmgw.link.messages import Heartbeat, LogLines, Observed, Routes, RoutesAck, TrafficReport
from llmgw.link.server import LinkServer, Peer, RefusedPeer, ServerIdentity
from llmgw.pki.authority import Authority

from .client import Client, ask
from .conftest import endpoint, key, table, until
from .engine import Engine


class ControlPlane:
    """A real listener for streams that sends gateways one table."""

    def __init__(self, pki: Path, frame: Routes, port: int = 0) -> None:
        self.frame = frame
        self.acked = 0
        self.acks: list[RoutesAck] = []
        self.reports: list[TrafficReport] = []
        self.changed = asyncio.Event()
        self.peer: Peer | None = None
        self.server = LinkServer(
            listen=("127.0.0.1", port),
            tls=ServerIdentity(ca=pki / "ca.pem", cert=pki / "server.pem", key=pki / "server-key.pem"),
            cluster="llmgw",
            epoch=1,
            delegate=self,
            heartbeat_s=0.2,
        )

    def on_welcomed(self, peer: Peer) -> None:
        self.peer = peer
        self.say(self.frame)

    def say(self, frame: Routes) -> None:
        """The next table, to the gateway that is connected and to whichever comes."""
        self.frame = frame
        if self.peer is not None:
            self.peer.send(Routes(**{**_fields(frame), "epoch": 1, "session": self.peer.session}))

    def on_frame(self, peer: Peer, frame: Observed | RoutesAck | TrafficReport | LogLines) -> None:
        if isinstance(frame, RoutesAck):
            self.acked = frame.version
            self.acks.append(frame)
            self.changed.set()
        elif isinstance(frame, TrafficReport):
            self.reports.append(frame)
            self.changed.set()

    def on_heartbeat(self, peer: Peer, frame: Heartbeat) -> None: ...

    def on_closed(self, peer: Peer, why: str) -> None: ...

    def on_refused(self, refusal: RefusedPeer) -> None:
        raise AssertionError(refusal.words)

    async def until(self, condition: Callable[[], object]) -> None:
        """Until what the gateway has said fulfils the condition."""
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def until_acked(self, version: int) -> None:
        await self.until(lambda: self.acked == version)


def _fields(frame: Routes) -> dict[str, object]:
    return {name: getattr(frame, name) for name in frame.__slots__}


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    authority = Authority.create(folder / "ca")
    authority.issue_server(["127.0.0.1", "localhost"], folder / "server", name="cp1")
    authority.issue_client("node1", folder / "node1")
    return folder / "server"


def settings(pki: Path, state: Path, port: int) -> GatewaySettings:
    return GatewaySettings(
        id="cp1",
        state_dir=state,
        listen_host="127.0.0.1",
        listen_port=0,
        servers=(f"https://127.0.0.1:{port}",),
        ca=pki / "ca.pem",
        cert=pki / "server.pem",
        key=pki / "server-key.pem",
        drain_s=0.0,
    )


@asynccontextmanager
async def running(how: GatewaySettings) -> AsyncIterator[tuple[Gateway, Feed]]:
    gateway = Gateway(how)
    feed = Feed(gateway, how)
    feed.load()
    await gateway.start()
    feed.start()
    keeping = asyncio.ensure_future(feed.keep())
    try:
        yield gateway, feed
    finally:
        await feed.stop()
        async with asyncio.timeout(10):
            await keeping
        await gateway.stop()


async def test_a_table_comes_is_acknowledged_kept_and_outlives_its_control_plane(pki: Path, tmp_path: Path) -> None:
    async with Engine() as engine:
        plane = ControlPlane(pki, table([Route(model="m", endpoints=(endpoint(engine),))], version=7))
        await plane.server.start()
        how = settings(pki, tmp_path, plane.server.port)
        async with running(how) as (gateway, _), await Client.open(gateway.port) as client:
            await plane.until_acked(7)
            assert (await client.ask(ask())).status == 200
            await until(lambda: gateway.standing.connected)
            assert gateway.standing.stale_since(gateway.standing.applied_at + 1_000) is None
            await until(lambda: (tmp_path / "routes.json").exists())

            await plane.server.stop()
            await until(lambda: not gateway.standing.connected)
            assert gateway.standing.words
            assert (await client.ask(ask())).status == 200, "the last table serves on"
            assert gateway.standing.stale_since(gateway.standing.applied_at + 1_000) is not None

            back = ControlPlane(
                pki, table([Route(model="n", endpoints=(endpoint(engine),))], version=8), plane.server.port
            )
            await back.server.start()
            await back.until_acked(8)
            assert (await client.ask(ask(model="n"))).status == 200
            assert (await client.ask(ask())).status == 404
            await back.server.stop()

        async with running(how) as (gateway, _), await Client.open(gateway.port) as client:
            assert gateway.standing.from_file
            assert gateway.standing.version == 8
            assert (await client.ask(ask(model="n"))).status == 200, "started again without a control plane"


async def test_the_same_table_again_renews_it_and_no_more(pki: Path, tmp_path: Path) -> None:
    gateway = Gateway(settings(pki, tmp_path, 1))
    feed = Feed(gateway, gateway.settings)
    frame = table([Route(model="m")], version=3)
    feed.take(frame)
    first, gateway.standing.applied_at = gateway.table, 1.0
    feed.take(frame)
    assert gateway.table is first
    assert gateway.standing.applied_at > 1.0


async def test_the_newest_table_reaches_the_disk_before_the_end(pki: Path, tmp_path: Path) -> None:
    gateway = Gateway(settings(pki, tmp_path, 1))
    feed = Feed(gateway, gateway.settings)
    for version in (3, 4):
        feed.take(table([Route(model="m")], version=version))
    await feed.stop()
    async with asyncio.timeout(10):
        await feed.keep()
    kept = TableFile(tmp_path).load()
    assert kept is not None
    assert kept[0].version == 4


# The file


def test_the_file_is_private_and_comes_back(tmp_path: Path) -> None:
    frame = table([Route(model="m", aliases=("a",), why_none="x")], version=9, keys=(key(models=("m",)),))
    file = TableFile(tmp_path / "state")
    assert file.load() is None
    file.save(frame, 5.0)
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700
    assert file.load() == (frame, 5.0)
    assert [path.name for path in file.path.parent.iterdir()] == ["routes.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"format":1}', b"[]"])
async def test_a_damaged_file_is_left_alone_and_said(
    pki: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "routes.json").write_bytes(content)
    gateway = Gateway(settings(pki, tmp_path, 1))
    Feed(gateway, gateway.settings).load()
    assert not gateway.standing.has_table
    assert "can't be read" in capsys.readouterr().out
    assert (tmp_path / "routes.json").read_bytes() == content


def test_a_file_of_another_format(tmp_path: Path) -> None:
    file = TableFile(tmp_path)
    file.save(table([]), 1.0)
    file.path.write_bytes(file.path.read_bytes().replace(b'"format":1', b'"format":2'))
    with pytest.raises(ValueError, match="format 2; this build reads format 1"):
        file.load()


def test_a_save_that_fails_leaves_the_old_table(tmp_path: Path) -> None:
    file = TableFile(tmp_path)
    file.save(table([], version=1), 1.0)
    file.path.unlink()
    file.path.mkdir()
    with pytest.raises(OSError):
        file.save(table([], version=2), 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["routes.json"]


def test_a_models_own_name_wins_over_an_alias() -> None:
    compiled = Table.of(table([Route(model="a", aliases=("b", "c")), Route(model="b")]))
    assert {name: route.model for name, route in compiled.routes.items()} == {"a": "a", "b": "b", "c": "a"}


# Settings


def test_the_id_is_the_certificates(pki: Path) -> None:
    assert gateway_id(pki / "server.pem") == "cp1"


def test_a_nodes_certificate_is_refused_in_words(pki: Path) -> None:
    with pytest.raises(StartError, match="is no gateway's certificate: expected a URI llmgw://CLUSTER/gateway/ID"):
        gateway_id(pki.parent / "node1" / "node1.pem")


def test_settings_of_a_server_file(pki: Path, tmp_path: Path) -> None:
    from llmgw.config import parse_server

    text = f"""
listen: {{gateway: 127.0.0.1:18080, agents: "0.0.0.0:17443"}}
tls: {{ca: {pki}/ca.pem, cert: {pki}/server.pem, key: {pki}/server-key.pem}}
gateway: {{body_limit: 1MiB, queue: 7, hold_for: 3s, timeouts: {{total: 90s}}}}
models: []
"""
    found = settings_of(parse_server(text, "server.yaml"), tmp_path)
    assert (found.id, found.listen_port, found.queue, found.hold_for_s) == ("cp1", 18080, 7, 3.0)
    assert (found.body_limit_bytes, found.timeouts.total_s) == (1024 * 1024, 90.0)
    assert found.servers == ("https://127.0.0.1:17443",)
