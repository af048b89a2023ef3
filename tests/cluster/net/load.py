"""Clients that never stop asking: so many streams open at all times, each begun again as soon as it has ended."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field

from tests.cluster.lab import Lab
from tests.cluster.streams import Stream, run_stream


@dataclass
class Load:
    """``with Load(...)``: returns once every client has had its first token; ends when each has ended its stream."""

    lab: Lab
    key: str
    model: str
    clients: int
    tokens: int
    done: list[Stream] = field(default_factory=list)
    _ending: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _first: list[threading.Event] = field(default_factory=list)

    def __enter__(self) -> Load:
        for _ in range(self.clients):
            begun = threading.Event()
            self._first.append(begun)
            thread = threading.Thread(target=self._client, args=(begun,), daemon=True)
            self._threads.append(thread)
            thread.start()
        for begun in self._first:
            assert begun.wait(60), "a client had no token for a minute"
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        deadline = time.monotonic() + 120
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads), "a stream hangs"

    def _client(self, begun: threading.Event) -> None:
        for turn in itertools.count():
            stream = Stream(begun=begun if turn == 0 else threading.Event())
            run_stream(stream, self.lab.endpoint, self.key, self.tokens, self.model)
            self.done.append(stream)
            if self._ending.is_set():
                return

    @property
    def broken(self) -> list[Stream]:
        """Ended in an error, or without an end, after their first token."""
        return [stream for stream in self.done if stream.tokens and not self._whole(stream)]

    @property
    def failed(self) -> list[Stream]:
        """Were refused, or ended, without a token."""
        return [stream for stream in self.done if not stream.tokens and not self._whole(stream)]

    @property
    def whole(self) -> int:
        return sum(self._whole(stream) for stream in self.done)

    def _whole(self, stream: Stream) -> bool:
        return stream.done and not stream.error and stream.tokens == self.tokens

    def words(self) -> str:
        faults = [f"{stream.tokens} tokens: {stream.error or 'no end'}" for stream in [*self.broken, *self.failed]]
        return f"{self.whole} whole, {len(self.broken)} broken, {len(self.failed)} failed {faults[:5]}"
