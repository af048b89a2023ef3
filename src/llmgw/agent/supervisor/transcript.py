"""The output of all processes of a shard as one: a sidecar's lines have its name before them, the engine's are bare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llmgw.process import output


@dataclass(frozen=True, slots=True)
class Source:
    name: str
    """Empty: the engine's."""
    log_path: Path

    def shown(self, line: str) -> str:
        return f"[{self.name}] {line}" if self.name else line


def tail(source: Source, lines: int) -> list[str]:
    """The last ``lines`` lines of one process, as they are shown."""
    return [source.shown(line) for line in output.tail(source.log_path, lines)]


class Transcript:
    """Follows the output of several processes, which may join one after the other."""

    def __init__(self, lines: int) -> None:
        """``lines``: how many of each process's last lines come first."""
        self._lines = lines
        self._followers: dict[Source, output.Follower] = {}

    def add(self, sources: Iterable[Source]) -> None:
        """Follow these as well; idempotent."""
        for source in sources:
            if source not in self._followers:
                self._followers[source] = output.Follower(source.log_path, self._lines)

    def read(self, *, final: bool = False) -> Iterator[str]:
        """The lines that came since; with ``final`` also last ones that have no line end."""
        for source, follower in self._followers.items():
            for line in follower.read(final=final):
                yield source.shown(line)

    def close(self) -> None:
        for follower in self._followers.values():
            follower.close()
