"""The agent over a real stream: nothing that it has to say is lost, whatever breaks in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from llmgw.agent import main
from llmgw.agent.discovery import discover, read_vitals, settings_of
from llmgw.agent.main import Agent
from llmgw.cluster.model import DesiredShard, EngineOnNode, Fabric, Inventory, ObservedShard, ShardState, Vitals
from llmgw.config import AgentConfig, load_agent
from llmgw.link.client import LinkError
from llmgw.link.messages import Desired, Heartbeat, Hello, LogLines, LogsRequest, Observed, RoutesAck
from llmgw.link.server import LinkServer, Peer, RefusedPeer
from llmgw.pki.names import IdentityError
from tests.agent.discovery.machines import write_port
from tests.agent.node import alive, clear, sim
from tests.link.ends import Pki, make_server

DEADLINE_S = 30.0


class Ledger:
    """A control plane's view of one node: what its hello said, changed by each of its frames."""

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self.hellos: list[Peer] = []
        self.shards: dict[str, ObservedShard] = {}
        self.weights: tuple[str, ...] = ()
        self.inventory: Inventory | None = None
        self.engines: tuple[EngineOnNode, ...] = ()
        self.probed = False
        self.revision = 0
        self.logs: list[LogLines] = []
        self.beats: list[Heartbeat] = []
        self.closed: list[str] = []
        self.seen: list[tuple[int, frozenset[str]]] = []
        """Revision and ids of the shards after each frame."""
        self.loses: Callable[[Observed], bool] = lambda frame: False
        self.wanted: tuple[DesiredShard, ...] = ()
        self._revisions = 0
        self._changed = asyncio.Event()

    def want(self, *shards: DesiredShard) -> None:
        self.wanted = shards
        self._revisions += 1
        if self.peer is not None:
            self.peer.send(Desired(epoch=1, session=self.peer.session, revision=self._revisions, shards=shards))

    def on_welcomed(self, peer: Peer) -> None:
        self.peer = peer
        self.hellos.append(peer)
        self.probed, self.inventory = peer.hello.probed, peer.hello.inventory
        self.shards = {shard.id: shard for shard in peer.hello.shards}
        self.weights, self.engines = peer.hello.weights, peer.hello.engines
        self.revision, self._revisions = 0, 0
        self.want(*self.wanted)
        self._changed.set()

    def on_frame(self, peer: Peer, frame: Observed | RoutesAck | LogLines) -> None:
        if isinstance(frame, LogLines):
            self.logs.append(frame)
        elif isinstance(frame, Observed) and peer is self.peer and not self.loses(frame):
            self.revision = frame.revision
            if frame.shards is not None:
                self.shards = {shard.id: shard for shard in frame.shards}
            self.weights = self.weights if frame.weights is None else frame.weights
            self.inventory = frame.inventory or self.inventory
            self.engines = self.engines if frame.engines is None else frame.engines
            self.probed = self.probed if frame.probed is None else frame.probed
            self.seen.append((frame.revision, frozenset(self.shards)))
        self._changed.set()

    def on_heartbeat(self, peer: Peer, frame: Heartbeat) -> None:
        self.beats.append(frame)
        self._changed.set()

    def on_closed(self, peer: Peer, why: str) -> None:
        self.closed.append(why)
        if self.peer is peer:
            self.peer = None
        self._changed.set()

    def on_refused(self, refusal: RefusedPeer) -> None:
        raise AssertionError(refusal)

    async def until(self, check: Callable[[], object], what: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not check():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"not within {DEADLINE_S:g} s: {what}; last: {self.shards}") from None

    def states(self) -> list[ShardState]:
        return [shard.state for shard in self.shards.values()]


@asynccontextmanager
async def serving(pki: Pki) -> AsyncIterator[tuple[LinkServer, Ledger]]:
    ledger = Ledger()
    server = make_server(pki, ledger)  # type: ignore[arg-type]
    await server.start()
    try:
        yield server, ledger
    finally:
        await server.stop()


@pytest.fixture
async def config(pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AgentConfig]:
    monkeypatch.setattr(main, "ENGINE_USER", None)  # who could not look into the tests' folders
    tls = pki.node("n1")
    path = tmp_path / "agent.yaml"
    path.write_text(
        "server: https://127.0.0.1:1\n"
        f"tls: {{ca: {tls.ca}, cert: {tls.cert}, key: {tls.key}}}\n"
        "node_id: n1\nmgmt_addr: 127.0.0.1\nreconnect_base: 20ms\nreconnect_max: 50ms\n"
        f"weights_dir: {tmp_path}/weights\nengines_dir: {tmp_path}/engines\n"
        f"supervisor: {{work_dir: {tmp_path}/work, stop_timeout: 5s, health_interval: 200ms}}\n"
    )
    yield load_agent(path)
    clear(tmp_path)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("agent-pki"))


@asynccontextmanager
async def running(config: AgentConfig, server: LinkServer) -> AsyncIterator[Agent]:
    config = replace(config, servers=(f"https://127.0.0.1:{server.port}",))
    config.weights_dir.mkdir(exist_ok=True)
    agent = Agent(config, await discover(settings_of(config)))
    stop = asyncio.Event()
    task = asyncio.ensure_future(agent.run(stop))
    try:
        yield agent
    finally:
        stop.set()
        await task


async def test_a_shard_is_told_from_its_wish_to_its_end(pki: Pki, config: AgentConfig) -> None:
    async with serving(pki) as (server, ledger), running(config, server):
        await ledger.until(lambda: ledger.probed, "the node says which engines it has")
        wanted = sim(load_time_s=0.2)
        ledger.want(wanted)
        await ledger.until(lambda: ledger.states() == [ShardState.READY], "the shard is ready")
        # Whoever says that it has taken up a wish says in the same breath what came of it.
        assert all(shards == {wanted.id} for revision, shards in ledger.seen if revision == 2)
        ledger.want()
        await ledger.until(lambda: ledger.revision == 3 and not ledger.shards, "it is gone")


async def test_a_stream_that_breaks_again_and_again_loses_nothing(pki: Pki, config: AgentConfig) -> None:
    """Cut after each frame that comes: in the end both sides have the same view."""
    async with serving(pki) as (server, ledger), running(config, server) as agent:
        await ledger.until(lambda: ledger.probed, "the node says which engines it has")
        cuts = 0

        def cut(frame: Observed) -> bool:
            nonlocal cuts
            if cuts < 8 and ledger.peer is not None:
                cuts += 1
                ledger.peer.end("cut by the test")
                return cuts % 2 == 0
            return False

        ledger.loses = cut
        ledger.want(sim(load_time_s=0.5))
        await ledger.until(lambda: cuts == 8 and ledger.states() == [ShardState.READY], "the shard is ready")
        await ledger.until(lambda: tuple(ledger.shards.values()) == agent.converge.shards(), "both views are one")
        assert len({peer.hello.instance for peer in ledger.hellos}) == 1
        assert len(ledger.hellos) >= 8
        (shard,) = ledger.shards.values()
        assert shard.generation == 1


async def test_no_report_answers_to_a_wish_of_an_earlier_session(
    pki: Pki, config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one that is made between the hello and the welcome: wishes are counted anew in each session."""
    answers_to: list[int] = []
    hello = Agent._hello

    def and_look(agent: Agent) -> Hello:
        made = hello(agent)
        answers_to.append(agent.converge.revision)
        return made

    monkeypatch.setattr(Agent, "_hello", and_look)
    async with serving(pki) as (server, ledger), running(config, server) as agent:
        await ledger.until(lambda: ledger.revision == 1, "the first wish is taken up")
        ledger.want(sim())
        await ledger.until(lambda: ledger.revision == agent.converge.revision == 2, "the second is")
        assert ledger.peer is not None
        ledger.peer.end("cut by the test")
        await ledger.until(lambda: len(ledger.hellos) == 2 and ledger.revision == 1, "it is back")
    assert answers_to == [0, 0]


async def test_a_report_that_is_lost_is_made_up_for(
    pki: Pki, config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that came through and was not taken up: everything is said anew now and then."""
    monkeypatch.setattr(main, "REDISCOVER_S", 0.3)
    async with serving(pki) as (server, ledger), running(config, server):
        await ledger.until(lambda: ledger.probed, "the node says which engines it has")
        lost: list[Observed] = []

        def lose(frame: Observed) -> bool:
            if not lost and frame.shards is not None and any(s.state is ShardState.READY for s in frame.shards):
                lost.append(frame)
            return bool(lost) and lost[0] is frame

        ledger.loses = lose
        ledger.want(sim())
        await ledger.until(lambda: lost and ledger.states() == [ShardState.READY], "the shard is ready all the same")
        assert len(ledger.hellos) == 1


async def test_an_agent_that_comes_back_says_in_its_hello_what_it_runs(pki: Pki, config: AgentConfig) -> None:
    async with serving(pki) as (server, ledger):
        async with running(config, server):
            ledger.want(sim())
            await ledger.until(lambda: ledger.states() == [ShardState.READY], "the shard is ready")
            before = list(ledger.shards.values())
        async with running(config, server):
            await ledger.until(lambda: len(ledger.hellos) == 2, "it is back")
            (found,) = ledger.hellos[1].hello.shards
            assert found.state is ShardState.READY
            assert [(found.pid, found.endpoint)] == [(shard.pid, shard.endpoint) for shard in before]
        assert len({peer.hello.instance for peer in ledger.hellos}) == 2


async def test_an_agent_that_can_not_start_gives_no_engine_up(
    pki: Pki, config: AgentConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One whose key is gone has taken up by then what runs: that it can ask an engine nothing is no fault of that."""
    wanted = sim(first_token_s=600.0)
    async with serving(pki) as (server, ledger), running(config, server):
        ledger.want(wanted)
        await ledger.until(lambda: [shard for shard in ledger.shards.values() if is_asked(shard)], "it is asked")
        (before,) = ledger.shards.values()
    agent = Agent(
        replace(config, tls=replace(config.tls, key=tmp_path / "gone.pem")), await discover(settings_of(config))
    )

    async def until_it_is_asked() -> None:
        while not all(map(is_asked, agent.converge.shards())):
            agent._dirty.clear()
            await agent._dirty.wait()

    monkeypatch.setattr(main, "FIRST_LOOK_S", DEADLINE_S)
    monkeypatch.setattr(agent, "_look_for_weights", until_it_is_asked)
    with capture_logs() as logs, pytest.raises(IdentityError, match=r"gone\.pem does not exist"):
        await agent.run(asyncio.Event())
    assert [shard.id for shard in agent.converge.shards()] == [wanted.id]
    assert f"shard {wanted.id}" not in {task.get_name() for task in asyncio.all_tasks()}
    assert not [line for line in logs if line["event"] == "giving up on a shard"]
    assert before.pid is not None
    assert alive(before.pid)


def is_asked(shard: ObservedShard) -> bool:
    return shard.why == "loaded; waiting for the answer to a first request"


async def test_a_look_that_fails_ends_no_agent(pki: Pki, config: AgentConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "REDISCOVER_S", 0.05)
    async with serving(pki) as (server, ledger), running(config, server) as agent:
        await ledger.until(lambda: ledger.probed, "the node says which engines it has")
        failed = asyncio.Event()

        async def breaks(*arguments: object) -> Inventory:
            failed.set()
            raise RuntimeError("bug")

        def stale() -> tuple[str, ...]:
            raise OSError(116, "Stale file handle")

        monkeypatch.setattr(main, "discover", breaks)
        monkeypatch.setattr(agent.weights, "held", stale)
        async with asyncio.timeout(DEADLINE_S):
            await failed.wait()
        ledger.want(sim())
        await ledger.until(lambda: ledger.states() == [ShardState.READY], "the shard is ready")


async def test_what_changes_on_the_machine_is_told(
    pki: Pki, config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "REDISCOVER_S", 0.05)
    async with serving(pki) as (server, ledger), running(config, server):
        await ledger.until(lambda: ledger.inventory is not None, "it says what it is")
        assert ledger.inventory is not None
        before = ledger.inventory.memory_bytes
        other = replace(ledger.inventory, memory_bytes=1 << 40)

        async def grown(*arguments: object) -> Inventory:
            return other

        with capture_logs() as logs:
            monkeypatch.setattr(main, "discover", grown)
            await ledger.until(lambda: ledger.inventory == other, "the memory that was added is told")
    (changed,) = [line for line in logs if line["event"] == "this machine changed"]
    assert (changed["what"], changed["old"], changed["new"]) == ("memory_bytes", before, 1 << 40)


async def test_a_port_that_goes_down_is_told_at_once(
    pki: Pki, config: AgentConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not only when the machine is looked at as a whole: what spans several nodes hangs on it."""
    monkeypatch.setattr(main, "LOOK_AT_LINKS_S", 0.05)
    port = write_port(tmp_path / "ib", "mlx5_0")
    config = replace(
        config,
        fabrics=(Fabric(name="ib-a", hcas=("mlx5_0",)),),
        discovery=replace(config.discovery, ib_root=tmp_path / "ib"),
    )

    def told() -> list[str]:
        return [] if ledger.inventory is None else [hca.state for hca in ledger.inventory.hcas]

    async with serving(pki) as (server, ledger), running(config, server):
        await ledger.until(lambda: told() == ["ACTIVE"], "it says what it is")
        (port / "state").write_text("1: DOWN\n")
        await ledger.until(lambda: told() == ["DOWN"], "the port is told to be down")
        assert ledger.inventory is not None
        assert any("no replica over several nodes on fabric ib-a" in words for words in ledger.inventory.warnings)


async def test_a_reading_of_logs_ends_with_the_session_that_asked_for_it(pki: Pki, config: AgentConfig) -> None:
    async with serving(pki) as (server, ledger), running(config, server):
        ledger.want(sim())
        await ledger.until(lambda: ledger.states() == [ShardState.READY], "the shard is ready")
        (shard,) = ledger.shards
        assert ledger.peer is not None
        ledger.peer.send(LogsRequest(id="1", shard=shard, lines=10, follow=True))
        await ledger.until(lambda: ledger.logs, "its output comes")
        assert readings()
        ledger.peer.end("cut by the test")
        await ledger.until(lambda: ledger.peer is not None and len(ledger.hellos) == 2, "it is back")
        ledger.want(sim(2, port=next(iter(ledger.wanted)).placement.port))
        await ledger.until(lambda: [s.generation for s in ledger.shards.values()] == [2], "it goes on")
        assert not readings()


async def test_a_disk_that_does_not_answer_stops_no_heartbeat(
    pki: Pki, config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hangs(folder: Path) -> Vitals:
        answers.wait(DEADLINE_S)
        return read_vitals(folder)

    config = replace(config, heartbeat_interval_s=0.1)
    async with serving(pki) as (server, ledger), running(config, server) as agent:
        await ledger.until(lambda: ledger.beats, "it beats")
        monkeypatch.setattr(main, "read_vitals", hangs)
        monkeypatch.setattr(agent.weights, "held", lambda: hangs(config.weights_dir))
        before = len(ledger.beats)
        await ledger.until(lambda: len(ledger.beats) > before + 20, "it goes on beating")
        assert ledger.beats[-1].vitals is not None
        ledger.want(sim())
        await ledger.until(lambda: ledger.states() == [ShardState.READY], "and working")
        assert len(ledger.hellos) == 1
        answers.set()


async def test_an_agent_whose_heartbeats_alone_have_died_begins_anew(
    pki: Pki, config: AgentConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its stream is open, reads and reports: it sees by itself that it does not beat, before the server misses it."""
    config = replace(config, heartbeat_interval_s=0.2)
    async with serving(pki) as (server, ledger), running(config, server) as agent:
        await ledger.until(lambda: len(ledger.beats) > 1, "it beats")
        dialogue, loop = agent.link._dialogue, agent.link._loop
        assert dialogue is not None
        assert loop is not None
        (beats,) = [task for task in dialogue._tasks if task.get_name() == "link: beats"]
        loop.call_soon_threadsafe(beats.cancel)
        await ledger.until(lambda: len(ledger.hellos) == 2, "it is back")
        assert "no heartbeat goes out" in capsys.readouterr().out
        before = len(ledger.beats)
        await ledger.until(lambda: len(ledger.beats) > before + 1, "and beats again")


async def test_an_agent_whose_stream_stands_still_ends_and_leaves_its_engines(
    pki: Pki, config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "LINK_STUCK_S", 1.0)
    stands, goes_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        stands.set()
        goes_on.wait(DEADLINE_S)

    async with serving(pki) as (server, ledger):

        async def until_it_ends() -> None:
            async with running(config, server) as agent, asyncio.timeout(DEADLINE_S):
                await ledger.until(lambda: ledger.states() == [ShardState.READY], "the shard is ready")
                stop, loop = agent.link.stop, agent.link._loop
                monkeypatch.setattr(agent.link, "stop", lambda: (goes_on.set(), stop()))
                assert loop is not None
                loop.call_soon_threadsafe(stand_still)
                await asyncio.to_thread(goes_on.wait, DEADLINE_S)

        ledger.want(sim())
        with pytest.raises(LinkError, match="the thread of the stream has done nothing for 1 s"):
            await until_it_ends()
        assert stands.is_set()
        (shard,) = ledger.shards.values()
        assert shard.pid is not None
        assert alive(shard.pid)


def readings() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("logs of")]
