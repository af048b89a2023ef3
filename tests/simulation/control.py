"""A control plane's process: the real Registry, Desk and Plane, driven by hand under virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from llmgw.cluster.model import Cluster, Instant
from llmgw.control.desk import Desk
from llmgw.control.errors import ApiError
from llmgw.control.leadership import Deposed, Leadership
from llmgw.control.logs import Logs
from llmgw.control.plane import RETRY_S, TICK_S, Plane
from llmgw.control.serials import Serials
from llmgw.link.messages import Heartbeat, Hello, RefusalCode, Refused
from llmgw.link.session import Admitted, Registry, Session
from llmgw.pki.certificate import PeerIdentity
from llmgw.store.base import ApiKey, Change, Event, Fenced, Lead, Saved, StoreError
from llmgw.store.memory import MemoryStore

from .process import Process
from .timeline import WALL_S, Timer
from .wires import SERVER, Stream

if TYPE_CHECKING:
    from .world import World

CLUSTER = "lab"
SILENT_HEARTBEATS = 6
LEASE_S = 10.0
NOT_AFTER = datetime(2100, 1, 1, tzinfo=UTC)
ADMITTED_AT = datetime(2026, 1, 1, tzinfo=UTC)

T = TypeVar("T")


class Pause:
    """What a coroutine waits for: so many seconds."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def __await__(self) -> Generator[float, None, None]:
        yield self.delay_s


class Connection:
    """A control plane's way to the database: slow at times, and it may break before a write is done, or after."""

    def __init__(self, world: World, store: MemoryStore, process: ControlPlane) -> None:
        self._world = world
        self._store = store
        self._process = process

    async def lead(self, holder: str, *, lease_s: float, alone: bool = False) -> Lead | None:
        return await self._through(lambda: self._store.lead(holder, lease_s=lease_s, alone=alone))

    async def renew(self, epoch: int, lease_s: float) -> None:
        await self._through(lambda: self._store.renew(epoch, lease_s))

    async def resign(self, epoch: int) -> None:
        await self._through(lambda: self._store.resign(epoch))

    async def load(self) -> Saved:
        return await self._through(self._store.load)

    async def commit(self, epoch: int, change: Change) -> None:
        await self._through(lambda: self._commit(epoch, change))

    async def set_scale(self, epoch: int, model: str, replicas: int | None, base: int) -> None:
        await self._through(lambda: self._store.set_scale(epoch, model, replicas, base))

    async def _commit(self, epoch: int, change: Change) -> None:
        await self._store.commit(epoch, change)
        self._world.checks.written(self._process, epoch, change)

    async def _through(self, verb: Callable[[], Awaitable[T]]) -> T:
        world, process = self._world, self._process
        fault = world.store_fault(process)
        if fault == "slow":
            await Pause(world.rng.uniform(0.005, 0.2))
        if fault == "before":
            raise StoreError("the database does not answer")
        result = await verb()
        if fault == "late":
            await Pause(world.rng.uniform(0.005, 0.2))
        if fault == "after":
            process.tell("its write is done, and the answer is lost")
            raise StoreError("the database's answer was lost")
        return result

    async def put_key(self, epoch: int, key: ApiKey) -> None:
        await self._through(lambda: self._store.put_key(epoch, key))

    async def set_admin_token(self, epoch: int, token_hash: str) -> None:
        await self._through(lambda: self._store.set_admin_token(epoch, token_hash))

    async def events(self, *, after: str | None = None, subject: str | None = None, limit: int = 100) -> list[Event]:
        return await self._store.events(after=after, subject=subject, limit=limit)

    async def backup(self, path: str) -> None:
        await self._store.backup(path)

    async def close(self) -> None:
        """The store is shared, and outlives whoever uses it."""


class DrivenPlane(Plane):
    """The real one; who asks it waits by hand, for there is no event loop."""

    async def ask(self, act: Callable[[], Awaitable[T]]) -> T:
        answers: list[T | Exception] = []

        async def answer() -> None:
            try:
                answers.append(await act())
            except Fenced:
                raise
            except Exception as error:
                answers.append(error)

        self.tell(answer)
        while not answers:
            await Pause(0.02)
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]


class SimPeer:
    """``llmgw.link.peer.Peer``, on a simulated stream."""

    def __init__(
        self, process: ControlPlane, stream: Stream, session: Session, hello: Hello, who: PeerIdentity
    ) -> None:
        self.process = process
        self.stream = stream
        self.entry = session
        self.id = session.id
        self.role = session.role
        self.session = session.number
        self.address = session.address
        self.hello = hello
        self.identity = who
        self.connected_at = process.clock().wall_s

    @property
    def open(self) -> bool:
        return self.stream.open[SERVER]

    def send(self, frame: Any) -> None:
        if self.open:
            self.process.world.checks.sent(self.process, self, frame)
            self.stream.send(SERVER, frame)

    def close(self, words: str, code: RefusalCode = "fenced") -> None:
        if self.open:
            self.stream.send(SERVER, Refused(code=code, words=words))
            self.process.end_session(self.stream, words)


class ControlPlane(Process):
    side = SERVER

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, name)
        self.url = f"https://{name}:7443"
        self.wall_offset_s = 0.0
        self._born = 0.0
        self.plane: DrivenPlane | None = None
        self.desk: Desk
        self.registry: Registry
        self.connection = Connection(world, world.store, self)
        self._driven: list[Coroutine[Any, Any, Any]] = []
        self._turning = False
        self._next: Timer | None = None
        self._due = 0.0
        self._rests_until = 0.0
        self._silent_due = 0.0

    @property
    def listening(self) -> bool:
        return self.alive and self.plane is not None

    def clock(self) -> Instant:
        now = self.timeline.now
        return Instant(WALL_S + now + self.wall_offset_s, now - self._born)

    # -- its life

    def on_start(self) -> None:
        # A monotonic clock of its own: two control planes' times have nothing in common.
        self._born = self.timeline.now - self.rng.uniform(100.0, 10_000.0)
        self.plane = None
        self._turning = False
        self._next, self._rests_until = None, 0.0
        self._driven.clear()
        self.after(self.rng.uniform(0.0, 0.5), self._seek)

    def on_kill(self) -> None:
        self.plane = None
        driven, self._driven = self._driven, []
        for coroutine in driven:
            coroutine.close()

    def leave(self, why: str) -> None:
        """It ends itself, and is started again by whatever looks after it."""
        self.tell("ends: {}", why)
        self.kill()
        self.timeline.after(self.rng.uniform(0.5, 3.0), self.start)

    # -- coroutines by hand

    def drive(
        self, work: Coroutine[Any, Any, T], done: Callable[[T], None], failed: Callable[[Exception], None]
    ) -> None:
        self._driven.append(work)
        self._drive(work, done, failed)

    def _drive(
        self, work: Coroutine[Any, Any, T], done: Callable[[T], None], failed: Callable[[Exception], None]
    ) -> None:
        try:
            delay_s = work.send(None)
        except StopIteration as end:
            self._driven.remove(work)
            done(end.value)
        except (StoreError, Deposed, ApiError) as error:
            self._driven.remove(work)
            failed(error)
        else:
            self.after(delay_s, self._drive, work, done, failed)

    # -- the lead

    def _seek(self) -> None:
        async def seek() -> tuple[Leadership, Saved] | None:
            leadership = Leadership(self.connection, self.name, lease_s=LEASE_S, clock=self.clock)
            if await leadership.take() is None:
                return None
            return leadership, await self.connection.load()

        self.drive(seek(), self._sought, lambda error: self._seek_again())

    def _seek_again(self) -> None:
        self.after(LEASE_S / 3, self._seek)

    def _sought(self, found: tuple[Leadership, Saved] | None) -> None:
        if found is None:
            self._seek_again()
            return
        leadership, saved = found
        world = self.world
        self.tell("leads, epoch {}", leadership.epoch)
        cluster = Cluster(
            name=CLUSTER,
            catalog=world.catalog,
            nodes={node.id: node for node in saved.nodes},
            replicas={replica.id: replica for replica in saved.replicas},
            drains={drain.node: drain for drain in saved.drains},
            engines={history.name: history for history in saved.engines},
            scale=saved.scale,
            replicas_made=saved.replicas_made,
            secret=saved.secret,
            suspect_after_s=world.suspect_after_s,
            lost_after_s=world.lost_after_s,
            in_flight_s=world.in_flight_s,
            lease_s=world.lease_s,
        )
        self.plane = plane = DrivenPlane(
            cluster,
            store=self.connection,
            leadership=leadership,
            saved=saved,
            heartbeat_s=world.heartbeat_s,
            clock=self.clock,
        )
        self.desk = Desk(plane, Logs())
        serials = Serials(plane)
        self.registry = Registry(
            cluster=CLUSTER,
            epoch=leadership.epoch,
            heartbeat_s=world.heartbeat_s,
            servers=tuple(each.url for each in world.planes),
            allow_serial=serials.allow,
            serial_used=serials.used,
        )
        world.checks.leads(self, leadership.lead)
        self.wake()

    # -- the writer

    def wake(self, delay_s: float | None = None) -> None:
        """Have the writer take its turn soon, or in so many seconds if nothing calls for it before."""
        if self._turning:
            return
        delay_s = self.rng.uniform(0.0005, 0.01) if delay_s is None else delay_s
        due = max(self.timeline.now + delay_s, self._rests_until)
        if self._next is not None:
            if self._due <= due:
                return
            self._next.cancel()
        self._due = due
        self._next = self.after(due - self.timeline.now, self._turn)

    def _turn(self) -> None:
        plane = self.plane
        assert plane is not None
        self._next, self._turning = None, True
        self.world.checks.before_turn(self, plane)
        self.drive(plane.turn(), self._turned, self._deposed)

    def _turned(self, result: None) -> None:
        plane = self.plane
        assert plane is not None
        self.world.checks.after_turn(self, plane)
        self._turning = False
        if plane.trouble is not None:
            # Whatever comes in meanwhile: as ``Plane.run`` does.
            self._rests_until = self.timeline.now + RETRY_S
            self.wake()
            return
        rest_s = plane.rest_s()
        self.wake(rest_s if rest_s > 0.0 else None)
        self._look_for_silence()

    def _deposed(self, error: Exception) -> None:
        self.leave(str(error))

    def _look_for_silence(self) -> None:
        now = self.timeline.now
        if now < self._silent_due:
            return
        self._silent_due = now + TICK_S
        limit_s = SILENT_HEARTBEATS * self.world.heartbeat_s
        for stream in [stream for stream in self.streams if now - stream.heard_at[SERVER] > limit_s]:
            self.end_session(stream, f"nothing was heard from it for {limit_s:g} s")

    # -- the stream's end, as ``llmgw.link.server`` has it

    def on_frame(self, stream: Stream, frame: Any) -> None:
        if not self.listening or stream not in self.streams:
            return
        peer: SimPeer | None = stream.session
        if peer is None:
            if isinstance(frame, Hello):
                self._admit(stream, frame)
            return
        if not self.registry.takes(peer.entry, frame):
            return
        if isinstance(frame, Heartbeat):
            self._beat(stream, peer, frame)
        else:
            self.world.checks.heard(self, peer)
            self.desk.on_frame(peer, frame)  # type: ignore[arg-type]
            self.wake()

    def _beat(self, stream: Stream, peer: SimPeer, frame: Heartbeat) -> None:
        stream.answered()
        refusal = self.registry.serial_refusal(peer.entry)
        if refusal is not None:
            peer.close(refusal.words, refusal.code)
            return
        self.world.checks.heard(self, peer)
        self.desk.on_heartbeat(peer, frame)  # type: ignore[arg-type]

    def _admit(self, stream: Stream, hello: Hello) -> None:
        name = hello.id
        who = PeerIdentity(
            common_name=name,
            role=hello.role,
            id=name,
            cluster=CLUSTER,
            serial=f"serial-{name}",
            not_after=NOT_AFTER,
            roles={hello.role: name},
        )
        verdict = self.registry.admit(hello, who, f"{stream.client.host}:40000", ADMITTED_AT)
        if not isinstance(verdict, Admitted):
            self.tell("refuses {}: {}", name, verdict.code)
            stream.send(SERVER, Refused(code=verdict.code, words=verdict.words))
            self.hang_up(stream, verdict.words)
            return
        peer = SimPeer(self, stream, verdict.session, hello, who)
        if verdict.displaced is not None:
            old = next(each for each in self.streams if each.session and each.session.entry is verdict.displaced)
            old.send(SERVER, Refused(code="duplicate", words=verdict.displaced_words))
            self.end_session(old, verdict.displaced_words)
        stream.session = peer
        stream.send(SERVER, verdict.welcome)
        self.world.checks.heard(self, peer)
        self.desk.on_welcomed(peer)  # type: ignore[arg-type]
        self.wake()

    def on_broken(self, stream: Stream, why: str) -> None:
        self._forget(stream, why)

    def end_session(self, stream: Stream, why: str) -> None:
        self.hang_up(stream, why)
        self._forget(stream, why)

    def _forget(self, stream: Stream, why: str) -> None:
        peer: SimPeer | None = stream.session
        if peer is None or self.plane is None:
            return
        stream.session = None
        self.registry.end(peer.entry)
        self.tell("{} is gone: {}", peer.id, why)
        self.desk.on_closed(peer, why)  # type: ignore[arg-type]
        self.wake()
