"""A process of ours: it can be killed, stopped and continued; its timers and its streams end with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .timeline import Timer
from .wires import Stream

if TYPE_CHECKING:
    from .world import World


class Process:
    """Subclasses implement ``on_start``, ``on_frame``, ``on_broken`` and ``on_kill``."""

    side: int
    """Which end of its streams it is."""

    def __init__(self, world: World, name: str, host: str) -> None:
        self.world = world
        self.timeline = world.timeline
        self.rng = world.rng
        self.name = name
        self.host = host
        self.alive = False
        self.stopped = False
        """By SIGSTOP: what arrives and what is due waits until it goes on."""
        self.stopped_at = 0.0
        self.life = 0
        self.streams: list[Stream] = []
        self._waiting: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def tell(self, words: str, *arguments: Any) -> None:
        self.world.story.tell(self.name, words, *arguments)

    # -- its life

    def start(self) -> None:
        if self.alive or self.host in self.world.wires.dead:
            return
        self.life += 1
        self.alive, self.stopped = True, False
        self._waiting.clear()
        self.on_start()

    def kill(self, *, power: bool = False) -> None:
        """kill -9; with ``power``, its whole machine goes down and nobody says goodbye."""
        if not self.alive:
            return
        self.alive = self.stopped = False
        self.life += 1
        self._waiting.clear()
        self.on_kill()
        streams, self.streams = self.streams, []
        for stream in streams:
            if power:
                stream.drop(self.side)
            else:
                stream.close(self.side, "the connection broke")

    def stop(self) -> None:
        if self.alive and not self.stopped:
            self.stopped, self.stopped_at = True, self.timeline.now

    def go_on(self) -> None:
        if not self.stopped:
            return
        self.stopped = False
        waiting, self._waiting = self._waiting, []
        life = self.life
        for act, arguments in waiting:
            self._do(life, act, arguments)  # one of them may end it: the rest was another life's

    def on_start(self) -> None:
        raise NotImplementedError

    def on_kill(self) -> None:
        """What it held in memory is gone."""

    # -- what it does later, and what it is told

    def after(self, delay_s: float, act: Callable[..., object], *arguments: Any) -> Timer:
        return self.timeline.after(delay_s, self._do, self.life, act, arguments)

    def _do(self, life: int, act: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if life != self.life:
            return
        if self.stopped:
            self._waiting.append((act, arguments))
        else:
            act(*arguments)

    def receive(self, stream: Stream, frame: Any) -> None:
        self._do(self.life, self.on_frame, (stream, frame))

    def broken(self, stream: Stream, why: str) -> None:
        self._do(self.life, self._broken, (stream, why))

    def _broken(self, stream: Stream, why: str) -> None:
        if stream in self.streams:
            self.streams.remove(stream)
            self.on_broken(stream, why)

    def hang_up(self, stream: Stream, why: str) -> None:
        """End a connection of one's own accord."""
        stream.close(self.side, why)
        if stream in self.streams:
            self.streams.remove(stream)

    def on_frame(self, stream: Stream, frame: Any) -> None:
        raise NotImplementedError

    def on_broken(self, stream: Stream, why: str) -> None:
        raise NotImplementedError
