"""A gateway: the real rules of its link, and in miniature what the real one does with tables and requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmgw.cluster.model import Endpoint, Traffic
from llmgw.link.messages import Hello, Routes, RoutesAck, TrafficReport
from llmgw.version import VERSION

from .agent import Caller
from .machine import Engine, Machine

if TYPE_CHECKING:
    from .world import World

HOLD_S = 60.0
"""How long a request waits for a replica before it fails."""
CONNECT_S = 5.0
REMEMBERED_S = 60.0
REPORT_EVERY_S = 0.1


class Request:
    """One client's request, from its acceptance to its end."""

    __slots__ = ("begun", "engine", "gateway", "generation", "model", "number", "over", "replica", "since", "turn")

    def __init__(self, gateway: Gateway, number: int, model: str) -> None:
        self.gateway = gateway
        self.number = number
        self.model = model
        self.since = gateway.timeline.now
        self.replica: str | None = None
        self.generation = 0
        self.engine: Engine | None = None
        self.begun = False
        """Its first byte has been sent on."""
        self.over = False
        self.turn = 0
        """Counts its attempts: what belongs to an older one is void."""

    def cut_off(self, *, reset: bool) -> None:
        """The engine has ended under it; ``reset``: its machine still says so."""
        self.engine = None
        delay_s = 0.002 if reset else self.gateway.rng.uniform(5.0, 15.0)
        self.gateway.after(delay_s, self.gateway.connection_ended, self, self.turn)


class Gateway(Caller):
    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, name)
        self.saved: Routes | None = None
        """The table on its disk."""
        self.clear()

    def clear(self) -> None:
        self.table: Routes | None = None
        self.acked = 0
        self.at: dict[str, dict[Request, None]] = {}
        """Requests in flight by replica."""
        self.waiting: list[Request] = []
        self.left: dict[str, float] = {}
        """Replicas that left the table, and when."""
        self.finished: dict[str, int] = {}
        self.broken_off: dict[str, int] = {}
        self.cooling: dict[str, float] = {}
        """Replicas that could not be reached, and until when they are left alone."""
        self._report_due = False
        self._free_at = 0.0
        self._looking = False

    @property
    def in_flight(self) -> int:
        return sum(len(requests) for requests in self.at.values()) + len(self.waiting)

    def on_boot(self) -> None:
        self.clear()
        if self.saved is not None:
            self.table = self.saved
        self.after(self.world.request_gap_s(), self._client)

    def on_kill(self) -> None:
        super().on_kill()
        for request in [each for requests in self.at.values() for each in requests] + self.waiting:
            request.over = True
            if request.engine is not None:
                request.engine.requests.pop(request, None)
            self.world.request_over(request, "killed with its gateway")
        self.clear()

    def make_hello(self) -> Hello:
        return Hello(
            role="gateway",
            id=self.name,
            version=VERSION,
            fingerprint=f"machine-{self.name}",
            instance=f"{self.name}-{self.boots}",
            routes_version=self.table.version if self.table is not None else 0,
        )

    # -- the table

    def on_delivered(self, frame: Any) -> None:
        if isinstance(frame, Routes):
            # Its loop may be busy; tables are taken up in the order in which they came all the same.
            delay_s = self.rng.uniform(0.2, 3.0) if self.world.chance("late_ack") else 0.001
            self._free_at = max(self._free_at, self.timeline.now + delay_s)
            self.after(self._free_at - self.timeline.now, self._apply, self.stream, frame)

    def _apply(self, stream: Any, frame: Routes) -> None:
        now = self.timeline.now
        before, after = _endpoints(self.table), _endpoints(frame)
        leaving = {name for route in frame.routes for name in getattr(route, "draining", ())}
        self.table = frame
        for name in before.keys() - after.keys():
            self.left[name] = now
            self.finished[name] = self.broken_off[name] = 0
        for name in after:
            self.left.pop(name, None)
        for name in [name for name, at in self.left.items() if now - at > REMEMBERED_S and not self.at.get(name)]:
            del self.left[name]
        gone = [name for name in before if name not in leaving and after.get(name) != before[name]]
        for name in gone:
            self._give_up(name)
        self.after(self.rng.uniform(0.001, 0.1), self._save, frame)
        if stream is self.stream:
            self.acked = frame.version
            self.say(RoutesAck(epoch=0, session=0, version=frame.version, traffic=self.traffic()))
        self._look()

    def _save(self, frame: Routes) -> None:
        self.saved = frame

    def _give_up(self, replica: str) -> None:
        """The replica is not there any more: what has no byte yet goes to another."""
        for request in [each for each in self.at.get(replica, ()) if not each.begun]:
            self._take_off(request)
            self._place(request)

    def traffic(self) -> dict[str, Traffic]:
        names = {name for name, requests in self.at.items() if requests} | self.left.keys()
        return {
            name: Traffic(
                in_flight=len(self.at.get(name, ())),
                finished=self.finished.get(name, 0),
                broken=self.broken_off.get(name, 0),
            )
            for name in sorted(names)
        }

    def _changed(self, replica: str) -> None:
        if replica in self.left and not self._report_due:
            self._report_due = True
            self.after(0.001 if not self.at.get(replica) else REPORT_EVERY_S, self._report)

    def _report(self) -> None:
        self._report_due = False
        traffic = self.traffic()
        self.say(TrafficReport(epoch=0, session=0, replicas={name: traffic[name] for name in traffic}))

    # -- requests

    def _client(self) -> None:
        world = self.world
        if world.clients and self.table is not None:
            served = [route.model for route in self.table.routes if route.endpoints]
            all_models = [route.model for route in self.table.routes]
            models = served if served and self.rng.random() < 0.95 else all_models
            if models:
                request = Request(self, world.next_request(), self.rng.choice(models))
                world.open_requests[request.number] = request
                self._place(request)
        self.after(world.request_gap_s(), self._client)

    def _place(self, request: Request) -> None:
        """Send it to a replica, or have it wait for one."""
        endpoint = self._choose(request.model)
        if endpoint is None:
            self.waiting.append(request)
            if not self._looking:
                self._looking = True
                self.after(1.0, self._look_again)
            return
        request.replica, request.generation = endpoint.replica, endpoint.generation
        request.turn += 1
        self.at.setdefault(endpoint.replica, {})[request] = None
        host, _, port = endpoint.url.removeprefix("http://").rpartition(":")
        machine = self.world.machine_at(host)
        self.after(0.001, self._connect, request, request.turn, machine, int(port), endpoint)

    def _choose(self, model: str) -> Endpoint | None:
        assert self.table is not None
        for route in self.table.routes:
            if route.model == model:
                choice = [endpoint for endpoint in route.endpoints if self._cooled(endpoint.replica)]
                preferred = [endpoint for endpoint in choice if endpoint.preferred] or choice
                return min(
                    preferred, key=lambda each: (len(self.at.get(each.replica, ())), self.rng.random()), default=None
                )
        return None

    def _cooled(self, replica: str) -> bool:
        return self.cooling.get(replica, 0.0) <= self.timeline.now

    def _connect(self, request: Request, turn: int, machine: Machine | None, port: int, endpoint: Endpoint) -> None:
        if request.over or request.turn != turn:
            return
        if machine is None or not self.world.wires.reach(self.host, machine.host):
            self.after(CONNECT_S, self._unreachable, request, turn)
            return
        engine = machine.listener(port)
        if engine is None:
            self._unreachable(request, turn)
            return
        self.world.checks.asked(self, request, engine)
        if engine.replica != request.replica:
            self._unreachable(request, turn)  # Its key is another's: refused.
            return
        request.engine = engine
        engine.requests[request] = None
        self.after(self.rng.uniform(0.05, 1.0), self._first_byte, request, turn)

    def _unreachable(self, request: Request, turn: int) -> None:
        if request.over or request.turn != turn:
            return
        assert request.replica is not None
        self.cooling[request.replica] = self.timeline.now + 1.0
        self._take_off(request)
        if self.timeline.now - request.since > HOLD_S:
            self._end(request, "failed")
        else:
            self._place(request)

    def _first_byte(self, request: Request, turn: int) -> None:
        engine = request.engine
        if request.over or request.turn != turn or engine is None:
            return
        if not engine.answers() or not self.world.wires.reach(self.host, engine.machine.host):
            self.after(1.0, self._first_byte, request, turn)
            return
        request.begun = True
        self.after(self.world.stream_s(), self._last_byte, request, turn)

    def _last_byte(self, request: Request, turn: int) -> None:
        engine = request.engine
        if request.over or request.turn != turn or engine is None:
            return
        if not engine.answers() or not self.world.wires.reach(self.host, engine.machine.host):
            self.after(1.0, self._last_byte, request, turn)
            return
        self._end(request, "answered")

    def connection_ended(self, request: Request, turn: int) -> None:
        """The connection to the engine broke: an error where it had begun, another replica where it had not."""
        if request.over or request.turn != turn:
            return
        if request.begun:
            self._end(request, "broken")
        else:
            self._unreachable(request, turn)

    def _take_off(self, request: Request) -> None:
        replica = request.replica
        assert replica is not None
        self.at.get(replica, {}).pop(request, None)
        if request.engine is not None:
            request.engine.requests.pop(request, None)
        request.engine, request.replica = None, None
        request.turn += 1
        self._changed(replica)

    def _end(self, request: Request, how: str) -> None:
        replica = request.replica
        if replica is not None:
            if replica in self.left:
                counts = self.broken_off if how == "broken" else self.finished
                counts[replica] = counts.get(replica, 0) + 1
            self._take_off(request)
        request.over = True
        self.world.request_over(request, how)

    def _look(self) -> None:
        """Whoever waits may go where there is a replica now, and fails where it has waited for too long."""
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            if self.timeline.now - request.since > HOLD_S:
                self._end(request, "failed")
            else:
                self._place(request)

    def _look_again(self) -> None:
        self._looking = False
        self._look()


def _endpoints(table: Routes | None) -> dict[str, tuple[int, str]]:
    """Replicas of a table, with the generation and address that requests go to."""
    if table is None:
        return {}
    return {each.replica: (each.generation, each.url) for route in table.routes for each in route.endpoints}
