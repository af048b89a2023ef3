"""The network: who reaches whom, and streams that keep order inside one and none between two.

A stream is a TCP connection: what is sent arrives in order or not at all. While two hosts can't reach each other,
frames wait (they are sent again after the heal) and neither end is told; an end that dies without a goodbye leaves the
other half-open until its own silence limit, or until it writes.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any, Protocol

from llmgw.link.messages import Desired, Routes
from llmgw.link.wire import decode, encode

from .story import Violation
from .timeline import Timeline

CLIENT, SERVER = 0, 1
ENCODED_EVERY = 32
"""Frames of which one goes over the wire as it really does: as text."""
RESENT_WITHIN_S = 2.0
"""After a heal, a connection that had something to send tries again within this."""


class Party(Protocol):
    """A process at one end of streams."""

    host: str

    def receive(self, stream: Stream, frame: Any) -> None: ...

    def broken(self, stream: Stream, why: str) -> None:
        """The connection has ended, by the other end or on the way."""


class Closed:
    """The other end's goodbye: FIN or RST."""

    __slots__ = ("why",)

    def __init__(self, why: str) -> None:
        self.why = why


class Wires:
    """Which hosts can't reach each other, and how long frames take."""

    def __init__(self, timeline: Timeline, rng: Random) -> None:
        self.timeline = timeline
        self.rng = rng
        self.cuts: dict[frozenset[str], int] = {}
        """Pairs of hosts that are cut from each other, with how many faults keep them so."""
        self.dead: set[str] = set()
        """Hosts without power: nothing arrives there, and nobody answers."""
        self.latency_s = 0.002
        self.parked: list[_Pipe] = []
        self.sent = 0

    def reach(self, one: str, other: str) -> bool:
        if one in self.dead or other in self.dead:
            return False
        return not self.cuts or one == other or frozenset((one, other)) not in self.cuts

    def cut(self, pairs: list[frozenset[str]]) -> None:
        for pair in pairs:
            self.cuts[pair] = self.cuts.get(pair, 0) + 1

    def mend(self, pairs: list[frozenset[str]]) -> None:
        for pair in pairs:
            count = self.cuts.get(pair, 0) - 1
            if count > 0:
                self.cuts[pair] = count
            else:
                self.cuts.pop(pair, None)
        self.resume()

    def mend_all(self) -> None:
        self.cuts.clear()
        self.resume()

    def resume(self) -> None:
        """Let what waits for a cut to be mended try again."""
        parked, self.parked = self.parked, []
        for pipe in parked:
            pipe.resume(self.rng.uniform(0.0, RESENT_WITHIN_S))

    def delay_s(self) -> float:
        rng = self.rng
        delay = self.latency_s * (0.5 + rng.random())
        return delay if rng.random() > 0.02 else delay + rng.random()


class Stream:
    """One connection, from a client (an agent, a gateway) to a server (a control plane)."""

    __slots__ = ("client", "ends", "heard_at", "open", "pipes", "server", "session", "wires")

    def __init__(self, wires: Wires, client: Party, server: Party) -> None:
        self.wires = wires
        self.client, self.server = client, server
        self.ends: tuple[Party, Party] = (client, server)
        self.open = [True, True]
        """By side: its process still holds the connection."""
        self.pipes = (_Pipe(self, SERVER), _Pipe(self, CLIENT))
        """By sending side: what is on its way to the other."""
        self.heard_at = [wires.timeline.now, wires.timeline.now]
        """By side: when it last heard anything from the other."""
        self.session: Any = None
        """What the server holds of it: its peer, once welcomed."""

    def send(self, side: int, frame: Any) -> None:
        if self.open[side]:
            self.wires.sent += 1
            if self.wires.sent % ENCODED_EVERY == 0 and decode(encode(frame)) != frame:
                raise Violation("wire", f"is another frame once it has been sent: {frame}")
            self.pipes[side].put(frame)

    def beat(self, frame: Any) -> None:
        """A client's heartbeat. Where nothing is in its way it arrives at once, which spares a step."""
        pipe = self.pipes[CLIENT]
        if not self.open[CLIENT]:
            return
        if pipe.moving or not self.open[SERVER] or not self.wires.reach(self.client.host, self.server.host):
            pipe.put(frame)
            return
        self.heard_at[SERVER] = self.wires.timeline.now
        self.server.receive(self, frame)

    def close(self, side: int, why: str = "closed") -> None:
        """This side's process ends the connection, or ends itself: the kernel says goodbye for it."""
        if self.open[side]:
            self.open[side] = False
            self.pipes[side].put(Closed(why))

    def drop(self, side: int) -> None:
        """This side is gone without a goodbye: its machine has lost power."""
        self.open[side] = False
        self.pipes[side].clear()

    def reset(self, why: str) -> None:
        """Something on the way breaks the connection: what was on it is lost, and both ends are told soon."""
        for side in (CLIENT, SERVER):
            if self.open[side]:
                self.pipes[1 - side].clear()
                self.pipes[1 - side].put(Closed(why))

    def answered(self) -> None:
        """The server's kernel and process answer a ping on the spot."""
        self.heard_at[CLIENT] = self.wires.timeline.now


class _Pipe:
    """One direction of a stream, towards ``side``."""

    __slots__ = ("frames", "moving", "side", "stream", "turn")

    def __init__(self, stream: Stream, side: int) -> None:
        self.stream = stream
        self.side = side
        self.frames: deque[Any] = deque()
        self.moving = False
        self.turn = 0

    def put(self, frame: Any) -> None:
        frames = self.frames
        if len(frames) > 2 and isinstance(frame, Desired | Routes):
            # As the outbox does: a whole state replaces an older one that has not gone out yet.
            kind = type(frame)
            self.frames = frames = deque(
                waiting for at, waiting in enumerate(frames) if at == 0 or not isinstance(waiting, kind)
            )
        frames.append(frame)
        if not self.moving:
            self._move(self.stream.wires.delay_s())

    def clear(self) -> None:
        self.frames.clear()
        self.turn += 1
        self.moving = False

    def resume(self, delay_s: float) -> None:
        if self.frames and self.moving:
            self._move(delay_s)

    def _move(self, delay_s: float) -> None:
        self.moving = True
        self.turn += 1
        self.stream.wires.timeline.after(delay_s, self._arrive, self.turn)

    def _arrive(self, turn: int) -> None:
        if turn != self.turn:
            return
        stream, wires = self.stream, self.stream.wires
        sender, receiver = stream.ends[1 - self.side], stream.ends[self.side]
        if not wires.reach(sender.host, receiver.host):
            wires.parked.append(self)
            return
        frame = self.frames.popleft()
        if self.frames:
            self._move(wires.latency_s * 0.1)
        else:
            self.moving = False
        if isinstance(frame, Closed):
            self.clear()
            if stream.open[self.side]:
                stream.open[self.side] = False
                receiver.broken(stream, frame.why)
        elif stream.open[self.side]:
            stream.heard_at[self.side] = wires.timeline.now
            receiver.receive(stream, frame)
        elif stream.open[1 - self.side]:
            # Nobody holds the connection here: whoever writes to it is told so.
            self.clear()
            stream.pipes[self.side].clear()
            stream.pipes[self.side].put(Closed("the connection broke"))
