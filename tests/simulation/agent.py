"""A node's agent: the real rules of its link, and in miniature what the real one does with shards.

It follows ``llmgw.agent.converge`` and ``llmgw.agent.shard``: nothing starts before a desired state has come in this
life, a newer generation begins only after the older one has ended, what outlives the agent is adopted by what is on
disk, and what failed stays failed until it is asked for anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmgw.cluster.catalog import Profile
from llmgw.cluster.model import DesiredShard, EngineOnNode, EngineState, ObservedShard, ShardState, Vitals
from llmgw.link.course import Conversation, Course, Deliver, Ended
from llmgw.link.messages import Desired, Heartbeat, Hello, Observed, Welcome
from llmgw.version import VERSION

from .builds import ENGINE, OWN
from .machine import Engine, Machine, Phase, Remembered
from .process import Process
from .wires import CLIENT, Stream

if TYPE_CHECKING:
    from .world import World

WELCOME_S = 15.0
CONNECT_S = 10.0
SILENT_HEARTBEATS = 3
UNHEALTHY_S = 30.0
RECONNECT_MAX_S = 5.0
SAY_ALL_S = 60.0
VITALS = Vitals(memory_bytes=64 << 30, memory_available_bytes=60 << 30, disk_bytes=1 << 40, disk_free_bytes=1 << 39)
SIM = (EngineOnNode(name="sim", version="1.0", state=EngineState.INSTALLED),)


class Caller(Process):
    """The client's end of the link, of an agent or a gateway: dials in turn, says hello, beats."""

    side = CLIENT

    def __init__(self, world: World, name: str, host: str) -> None:
        super().__init__(world, name, host)
        self.stream: Stream | None = None
        self.talk: Conversation | None = None
        self.course: Course
        self.boots = 0
        self._welcomed_at = 0.0
        self._heartbeat_s = 5.0

    @property
    def connected(self) -> bool:
        return self.talk is not None and self.talk.welcome is not None

    def on_start(self) -> None:
        self.boots += 1
        self.stream = self.talk = None
        servers = [plane.url for plane in self.world.planes]
        self.course = Course(servers, base_s=1.0, max_s=RECONNECT_MAX_S, rng=self.rng)
        self.on_boot()
        self.after(self.rng.uniform(0.0, 0.5), self._dial)

    def on_boot(self) -> None:
        """Take up what is on disk."""

    def on_kill(self) -> None:
        self.stream = self.talk = None

    def make_hello(self) -> Hello:
        raise NotImplementedError

    def on_delivered(self, frame: Any) -> None:
        raise NotImplementedError

    def on_disconnected(self) -> None:
        """No session is open any more."""

    def _dial(self) -> None:
        world = self.world
        server = world.plane_at(self.course.current.url)
        if not world.wires.reach(self.host, server.host) or server.stopped:
            self.after(CONNECT_S, self._failed, 0.0, False)
        elif not server.listening:
            self.after(0.005, self._failed, 0.0, False)
        else:
            self.stream = stream = Stream(world.wires, self, server)
            self.streams = [stream]
            server.streams.append(stream)
            self.talk = Conversation(self.course.current.url, self.course.newest_epoch)
            stream.send(CLIENT, self.make_hello())
            self.after(WELCOME_S, self._not_welcomed, stream)

    def _not_welcomed(self, stream: Stream) -> None:
        if self.stream is stream and not self.connected:
            self._leave(stream, "no welcome", patient=False)

    def _failed(self, lasted_s: float, patient: bool) -> None:
        self.after(self.course.failed(lasted_s=lasted_s, patient=patient), self._dial)

    def _leave(self, stream: Stream, why: str, *, patient: bool) -> None:
        lasted_s = self.timeline.now - self._welcomed_at if self.connected else 0.0
        self.hang_up(stream, why)
        self._ended(why, lasted_s, patient)

    def _ended(self, why: str, lasted_s: float, patient: bool) -> None:
        self.tell("link ended: {}", why)
        was_connected = self.connected
        self.stream = self.talk = None
        if was_connected:
            self.on_disconnected()
        self._failed(lasted_s, patient)

    def on_broken(self, stream: Stream, why: str) -> None:
        if stream is self.stream:
            self._ended(why, self.timeline.now - self._welcomed_at if self.connected else 0.0, False)

    def on_frame(self, stream: Stream, frame: Any) -> None:
        if stream is not self.stream or self.talk is None:
            return
        step = self.talk.receive(frame)
        if isinstance(step, Ended):
            self._leave(stream, step.words, patient=step.patient)
        elif isinstance(step, Deliver):
            if isinstance(step.frame, Welcome):
                self._welcomed(stream, step.frame)
            self.on_delivered(step.frame)

    def _welcomed(self, stream: Stream, welcome: Welcome) -> None:
        self.world.checks.welcomed(self, welcome)
        self.course.welcomed(welcome)
        self._welcomed_at = self.timeline.now
        self._heartbeat_s = welcome.heartbeat_s
        self.tell("welcomed by {}, epoch {}, session {}", self.course.current.url, welcome.epoch, welcome.session)
        self.after(welcome.heartbeat_s, self._beat, stream)

    def _beat(self, stream: Stream) -> None:
        if stream is not self.stream or self.talk is None or self.talk.welcome is None:
            return
        if self.timeline.now - stream.heard_at[CLIENT] > SILENT_HEARTBEATS * self._heartbeat_s:
            self._leave(stream, "nothing was heard", patient=False)
            return
        welcome = self.talk.welcome
        beat = Heartbeat(epoch=welcome.epoch, session=welcome.session, sent_at=0.0, vitals=self.vitals())
        stream.beat(beat)
        self.after(self._heartbeat_s, self._beat, stream)

    def vitals(self) -> Vitals | None:
        return None

    def say(self, frame: Any) -> None:
        """To whichever control plane welcomed it; dropped where none has."""
        if self.stream is not None and self.talk is not None and self.talk.welcome is not None:
            self.stream.send(CLIENT, self.talk.stamp(frame))


@dataclass(slots=True)
class Life:
    """One generation of a shard here, whatever is known of it."""

    id: str
    generation: int
    observed: ObservedShard
    asked: DesiredShard | None = None
    """None: a stray, of which only the process or its end is known."""
    engine: Engine | None = None
    ending: bool = False
    waits: bool = False
    """For its engine, which is not here."""
    proved: bool = False


class Agent(Caller):
    def __init__(self, world: World, machine: Machine) -> None:
        super().__init__(world, f"a.{machine.id}", machine.host)
        self.machine = machine
        machine.agent = self
        self.fingerprint = f"machine-{machine.id}"
        self.on_boot()

    def on_boot(self) -> None:
        self.lives: dict[str, Life] = {}
        self.wanted: dict[str, DesiredShard] | None = None
        self.revision = self.asked = 0
        self.probed = False
        self.engines: tuple[EngineOnNode, ...] = ()
        self.builds = Installer(self)
        self._said: Observed | None = None
        self._dirty = False
        if self.alive:
            self._adopt()
            self.after(self.rng.uniform(0.05, 2.0), self._probe)
            self.after(SAY_ALL_S, self._say_all)

    def on_kill(self) -> None:
        super().on_kill()
        self.lives = {}

    def _probe(self) -> None:
        self.probed = True
        self.engines_changed()

    def engines_changed(self) -> None:
        """Say anew which engines there are, and go on with what waited for one."""
        if self.probed:
            self.engines = (*SIM, *self.builds.states())
        self._touch()
        for life in list(self.lives.values()):
            if life.waits:
                self._prepared(life)

    def vitals(self) -> Vitals | None:
        return VITALS

    def make_hello(self) -> Hello:
        return Hello(
            role="node",
            id=self.machine.id,
            version=VERSION,
            fingerprint=self.fingerprint,
            instance=f"{self.machine.id}-{self.boots}",
            inventory=self.machine.inventory,
            vitals=VITALS,
            probed=self.probed,
            engines=self.engines,
            shards=self.shards(),
        )

    def on_delivered(self, frame: Any) -> None:
        if isinstance(frame, Welcome):
            self._said = None
            self.asked = self.revision = 0
            self._touch()
        elif isinstance(frame, Desired):
            self.world.checks.desired_taken(self, frame)
            self.wanted = {shard.id: shard for shard in frame.shards}
            self.asked = frame.revision
            self.builds.take(frame)
            self._converge()

    def shards(self) -> tuple[ObservedShard, ...]:
        return tuple(life.observed for _, life in sorted(self.lives.items()))

    # -- reports

    def _touch(self) -> None:
        if not self._dirty:
            self._dirty = True
            self.after(self.rng.uniform(0.001, 0.06), self._report)

    def _report(self) -> None:
        self._dirty = False
        if not self.connected:
            return
        now = Observed(
            epoch=0,
            session=0,
            revision=self.revision,
            inventory=self.machine.inventory,
            probed=self.probed,
            engines=self.engines,
            shards=self.shards(),
            weights=(),
        )
        if now != self._said:
            self.say(_what_changed(self._said, now))
            self._said = now

    def _say_all(self) -> None:
        self.look_again()
        self.after(SAY_ALL_S, self._say_all)

    def look_again(self) -> None:
        """What the machine is may have changed: all is said anew."""
        self._said = None
        self.engines_changed()
        for life in self.lives.values():
            if life.engine is not None and life.engine.live and not life.engine.healthy:
                self.engine_changed(life.engine)

    def _say(self, life: Life, state: ShardState, why: str, **changes: Any) -> None:
        said = replace(life.observed, state=state, why=why, **changes)
        if state is ShardState.FAILED:
            self.world.checks.refused(life.id, life.generation)
        if said != life.observed:
            life.observed = said
            self._touch()

    # -- adoption

    def _adopt(self) -> None:
        machine = self.machine
        known = dict(machine.remembered)
        for engine in machine.engines:
            found = known.pop(engine.shard.id, None)
            life = self._begin(engine.shard.id, engine.shard.generation, ShardState.STARTING)
            life.engine = engine
            if found is not None and found.shard.generation == engine.shard.generation:
                life.asked, life.proved = found.shard, found.proved
                life.observed = replace(life.observed, why="adopted", endpoint=found.endpoint, pid=engine.pid)
                if found.proved:
                    life.observed = replace(life.observed, state=ShardState.READY)
                self._watch(life)
        for shard_id, (generation, exit) in machine.ended.items():
            known.pop(shard_id, None)
            if shard_id not in self.lives:
                life = self._begin(shard_id, generation, ShardState.FAILED)
                life.observed = replace(life.observed, why="ended while no agent was running", exit=exit)
        for shard_id in known:
            if shard_id not in self.lives:
                machine.remembered.pop(shard_id, None)

    def _begin(self, shard_id: str, generation: int, state: ShardState) -> Life:
        observed = ObservedShard(id=shard_id, generation=generation, state=state, since=0.0)
        life = self.lives[shard_id] = Life(shard_id, generation, observed)
        return life

    # -- converging

    def _converge(self) -> None:
        wanted = self.wanted
        if wanted is None:
            return
        for shard_id, life in list(self.lives.items()):
            if life.ending:
                continue
            shard = wanted.get(shard_id)
            if shard is None or shard.generation != life.generation:
                self._end_life(life)
            elif life.asked is None and life.observed.state is not ShardState.FAILED:
                self._recognise(life, shard)
            elif life.asked is not None:
                life.asked = shard
                self._go_on(life)
        for shard_id, shard in wanted.items():
            if shard_id not in self.lives:
                life = self._begin(shard_id, shard.generation, ShardState.WANTED)
                life.asked = shard
                self._say(life, ShardState.PREPARING, "looking for the weights")
                self.after(self.world.prepare_s(), self._prepared, life)
        self.revision = self.asked
        self._touch()

    def _recognise(self, life: Life, shard: DesiredShard) -> None:
        life.asked = shard
        endpoint = _endpoint(self.machine, shard)
        self.machine.remembered[life.id] = Remembered(shard, endpoint)
        self._say(life, ShardState.STARTING, "adopted", endpoint=endpoint)
        self._watch(life)

    def _end_life(self, life: Life) -> None:
        life.ending = True
        self._say(life, ShardState.STOPPING, "stopping: no longer wanted here")
        engine = life.engine if life.engine is not None and life.engine.live else None
        if engine is not None:
            self.world.checks.stopped_by_agent(engine)
            engine.terminate()
        else:
            self.after(self.rng.uniform(0.001, 0.05), self._over, life)

    def _over(self, life: Life) -> None:
        if self.lives.get(life.id) is not life:
            return
        if self.wanted is None or life.id not in self.wanted:
            self.machine.remembered.pop(life.id, None)
        del self.lives[life.id]
        self._touch()
        self._converge()
        self.builds.converge()

    # -- one shard, from nothing to a process

    def _current(self, life: Life) -> bool:
        return self.lives.get(life.id) is life and not life.ending

    def _prepared(self, life: Life) -> None:
        if not self._current(life) or life.asked is None or life.observed.state is not ShardState.PREPARING:
            return
        life.waits = not self.builds.has(life.asked.profile)
        if life.waits:
            self._say(life, ShardState.PREPARING, f"waiting for {life.asked.profile.engine_version} on this node")
            return
        if life.asked.profile.nodes > 1:
            self.world.checks.prepared(life.id, life.generation)
            self._say(life, ShardState.PREPARING, "prepared: waits for the other ranks", prepared=True)
        self._go_on(life, prepared=True)

    def _go_on(self, life: Life, *, prepared: bool = False) -> None:
        """Start once all ranks are as far."""
        asked, seen = life.asked, life.observed
        if asked is None or life.engine is not None or seen.state is not ShardState.PREPARING:
            return
        if asked.go and not life.waits and (prepared or seen.prepared):
            self._launch(life, asked)

    def _launch(self, life: Life, asked: DesiredShard) -> None:
        if asked.placement.port in self.machine.squatted:
            self._say(life, ShardState.FAILED, "the port is taken", port_taken=True)
            return
        if asked.fabric is not None and not _on_fabric(asked):
            self._say(life, ShardState.FAILED, f"not all ranks are on {asked.fabric}")
            return
        endpoint = _endpoint(self.machine, asked)
        self._say(life, ShardState.STARTING, "starting the engine", endpoint=endpoint, prepared=False)
        self.machine.remembered[life.id] = Remembered(asked, endpoint)
        self.after(self.rng.uniform(0.0, 0.1), self._spawn, life, asked)

    def _spawn(self, life: Life, asked: DesiredShard) -> None:
        if not self._current(life):
            return
        life.engine = engine = self.machine.spawn(asked)
        self._say(life, ShardState.LOADING, "the engine is starting", pid=engine.pid)
        self._watch(life)

    # -- from a process to its end

    def _watch(self, life: Life) -> None:
        engine, asked = life.engine, life.asked
        if engine is None or asked is None:
            return
        if asked.rank > 0:
            self.after(1.0, self._runs, life)
        elif engine.phase is Phase.UP:
            self.engine_changed(engine)

    def _runs(self, life: Life) -> None:
        if self._current(life) and life.engine is not None and life.engine.live:
            self._say(life, ShardState.READY, "runs; rank 0 answers for the replica")

    def engine_changed(self, engine: Engine) -> None:
        """What polling shows of an engine: up, hung, or gone."""
        life = self.lives.get(engine.shard.id)
        if life is None or (life.engine is not engine and life.engine is not None):
            return
        if not engine.live:
            self._engine_gone(life, engine)
        elif life.ending or life.asked is None:
            return
        elif not engine.healthy and life.asked.rank == 0:
            self.after(UNHEALTHY_S, self._unhealthy, life)
        elif engine.phase is Phase.UP and life.observed.state is not ShardState.READY and life.asked.rank == 0:
            self.after(self.rng.uniform(0.01, 0.4), self._prove, life)

    def _engine_gone(self, life: Life, engine: Engine) -> None:
        if life.engine is not engine:
            return
        if life.ending:
            self._over(life)
        elif life.observed.state is not ShardState.FAILED:
            self._say(life, ShardState.FAILED, f"the engine {engine.exit}", exit=engine.exit, pid=None)

    def _prove(self, life: Life) -> None:
        engine = life.engine
        if not self._current(life) or engine is None or life.asked is None:
            return
        if engine.answers() and life.observed.state in (ShardState.STARTING, ShardState.LOADING):
            if (found := self.machine.remembered.get(life.id)) is not None:
                found.proved = True
            self.world.checks.proved(engine)
            self._say(
                life, ShardState.READY, "answered its first request", endpoint=_endpoint(self.machine, life.asked)
            )

    def _unhealthy(self, life: Life) -> None:
        engine = life.engine
        if self._current(life) and engine is not None and engine.live and not engine.healthy:
            engine.terminate()


class Installer:
    """Versions of the engine that has some: installed as they are asked for, removed where nobody wants them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._machine = agent.machine
        self._builds = agent.world.builds
        self._wanted: tuple[str, ...] | None = None
        self._kept: tuple[str, ...] = ()
        self._states: dict[str, EngineOnNode] = {}
        """Of those that are being installed, or were tried."""

    @property
    def _named(self) -> bool:
        return self._machine.id in self._builds.named

    def states(self) -> tuple[EngineOnNode, ...]:
        if self._named:
            return (EngineOnNode(name=ENGINE, version=OWN, state=EngineState.INSTALLED, named=True),)
        return tuple(self._state(version) for version in sorted(self._machine.installed | self._states.keys()))

    def _state(self, version: str) -> EngineOnNode:
        if version not in self._machine.installed:
            return self._states[version]
        if version in self._machine.spoiled:
            return EngineOnNode(name=ENGINE, version=version, state=EngineState.FAILED, words="a library is gone")
        return EngineOnNode(name=ENGINE, version=version, state=EngineState.INSTALLED)

    def has(self, profile: Profile) -> bool:
        if profile.engine != ENGINE or self._named:
            return True
        return profile.engine_version in self._machine.installed - self._machine.spoiled

    def take(self, frame: Desired) -> None:
        self._wanted = tuple(spec.version for spec in frame.engines if spec.name == ENGINE)
        self._kept = tuple(spec.version for spec in frame.engines_kept if spec.name == ENGINE)
        self.converge()

    def converge(self) -> None:
        if self._wanted is None or self._named or not self._builds.used:
            return
        agent, machine = self._agent, self._machine
        runs = {engine.shard.profile.engine_version for engine in machine.engines}
        runs |= {life.asked.profile.engine_version for life in agent.lives.values() if life.asked is not None}
        gone = (machine.installed | self._states.keys()) - {*self._wanted, *self._kept, *runs}
        for version in gone:
            machine.installed.discard(version)
            machine.spoiled.discard(version)
            self._states.pop(version, None)
        begun = [each for each in self._wanted if each not in machine.installed and each not in self._states]
        for version in begun:
            self._begin(version)
        if gone or begun:
            agent.engines_changed()

    def _begin(self, version: str) -> None:
        words = f"downloading {version}"
        self._states[version] = EngineOnNode(name=ENGINE, version=version, state=EngineState.DOWNLOADING, words=words)
        self._agent.after(self._builds.install_s(), self._over, version)

    def _over(self, version: str) -> None:
        agent, machine = self._agent, self._machine
        if version not in self._states or self._states[version].state is not EngineState.DOWNLOADING:
            return
        if machine.id in self._builds.known[version].on and not agent.world.chance("install_fails"):
            del self._states[version]
            machine.installed.add(version)
            agent.world.checks.counted["versions installed"] += 1
        else:
            words = f"{version} says another version"
            self._states[version] = EngineOnNode(name=ENGINE, version=version, state=EngineState.FAILED, words=words)
            agent.after(agent.rng.uniform(10.0, 30.0), self._again, version)
        agent.engines_changed()

    def _again(self, version: str) -> None:
        if version in self._states and self._states[version].state is EngineState.FAILED:
            self._begin(version)
            self._agent.engines_changed()


def _endpoint(machine: Machine, shard: DesiredShard) -> str | None:
    return f"{machine.inventory.mgmt_addr}:{shard.placement.port}" if shard.rank == 0 else None


def _on_fabric(shard: DesiredShard) -> bool:
    return all(shard.fabric in peer.fabrics for peer in shard.peers)


def _what_changed(said: Observed | None, now: Observed) -> Observed:
    if said is None:
        return now
    return replace(
        now,
        inventory=now.inventory if now.inventory != said.inventory else None,
        probed=now.probed if now.probed != said.probed else None,
        engines=now.engines if now.engines != said.engines else None,
        shards=now.shards if now.shards != said.shards else None,
        weights=now.weights if now.weights != said.weights else None,
    )
