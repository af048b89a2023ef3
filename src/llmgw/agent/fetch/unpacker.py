"""Unpacks in a process of its own: heartbeats and the event loop never wait for it, whatever an archive makes it do.

The process reads the archive while that still comes, and says in lines of JSON how far it is and what became of it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmgw.agent.fetch.archive import LIMITS, BadArchive, Limits, Packing
from llmgw.agent.fetch.artifact import FetchFailed
from llmgw.agent.fetch.child import ending, started
from llmgw.agent.fetch.disk import NoRoom

_PIPE_BYTES = 1 << 20
_COMPLAINT_BYTES = 4000

Progress = Callable[[int, int | None], None]
"""Takes bytes unpacked, and bytes that it will be in all where that is known before; called on the event loop."""


class Unpacker:
    """A process that unpacks what is written to it. Made by ``unpacking``."""

    def __init__(self, child: _Child, pipe: _Pipe) -> None:
        self._child = child
        self._pipe = pipe

    async def write(self, piece: bytes) -> None:
        """Hands on the next piece of the archive, as fast as it is unpacked.

        Raises as ``finish`` does, as soon as the archive is known to be of no use.
        """
        try:
            await self._pipe.write(piece)
        except BrokenPipeError:
            await self._child.verdict()
            raise FetchFailed(f"the process that unpacks {self._child.name} stopped reading") from None

    async def finish(self) -> None:
        """Waits until all is unpacked and on the disk.

        Raises BadArchive, NoRoom, OSError, and FetchFailed where the process died.
        """
        self._pipe.close_writing()
        await self._child.verdict()


@asynccontextmanager
async def unpacking(
    packing: Packing,
    target: Path,
    *,
    name: str = "the archive",
    strip: bool = False,
    limits: Limits = LIMITS,
    progress: Progress = lambda done, total: None,
) -> AsyncIterator[Unpacker]:
    """Unpacks a tar that is written to it into ``target``, which must be there; see ``archive.extract``.

    Unless ``finish`` returned, what is in ``target`` afterwards is of no use. The process is gone when the block ends.
    """
    wish = _wish(packing, target, strip, limits)
    with _Pipe() as pipe:
        # Only the process may have the end that it reads from: else nobody would notice that it is gone.
        async with _started(name, wish, pipe.reading, progress, on_start=pipe.close_reading) as child:
            yield Unpacker(child, pipe)


async def unpack_file(
    path: Path,
    target: Path,
    packing: Packing,
    *,
    strip: bool = False,
    limits: Limits = LIMITS,
    progress: Progress = lambda done, total: None,
) -> None:
    """Unpacks a file that lies on the disk, of any packing; raises as ``Unpacker.finish`` does."""
    wish = _wish(packing, target, strip, limits)
    with path.open("rb") as file:
        async with _started(path.name, wish, file.fileno(), progress) as child:
            await child.verdict()


class _Child:
    def __init__(self, name: str, process: asyncio.subprocess.Process, progress: Progress) -> None:
        self.name = name
        self._process = process
        self._progress = progress
        self._said: dict[str, Any] = {}
        self._complaints = b""
        self._heard = asyncio.Event()

    async def listen(self) -> None:
        """Until it has ended."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._listen(self._process.stdout))
                both.create_task(self._collect(self._process.stderr))
        finally:
            self._heard.set()

    async def _listen(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            said = json.loads(line)
            if "done" in said:
                self._progress(said["done"], said["total"])
            else:
                self._said = said

    async def _collect(self, stream: asyncio.StreamReader) -> None:
        while piece := await stream.read(_COMPLAINT_BYTES):
            self._complaints = (self._complaints + piece)[-_COMPLAINT_BYTES:]

    async def verdict(self) -> None:
        await self._heard.wait()
        status = await self._process.wait()
        match self._said:
            case {"unpacked": True} if status == 0:
                return
            case {"bad": str(words)}:
                raise BadArchive(words)
            case {"no_room": str(words)}:
                raise NoRoom(f"{self.name} can't be unpacked: {words}")
            case {"failed": [int(number), str(words), str(place)]}:
                raise OSError(number, words, place)
        last = self._complaints.decode("utf-8", "replace").strip().rpartition("\n")[2]
        why = f": {last}" if last else ""
        raise FetchFailed(f"the process that unpacks {self.name} {ending(status)}{why}; it is tried again")


def _wish(packing: Packing, target: Path, strip: bool, limits: Limits) -> str:
    return json.dumps({"packing": packing.value, "target": str(target), "strip": strip, "limits": asdict(limits)})


@asynccontextmanager
async def _started(
    name: str, wish: str, stdin: int, progress: Progress, *, on_start: Callable[[], None] = lambda: None
) -> AsyncIterator[_Child]:
    argv = (sys.executable, "-I", "-m", "llmgw.agent.fetch.unpack", wish)
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8"}
    async with started(argv, env=environment, stdin=stdin) as process:
        on_start()
        child = _Child(name, process, progress)
        listening = asyncio.create_task(child.listen(), name=f"unpack {name}")
        try:
            yield child
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await listening


class _Pipe:
    """A pipe that is written to on the event loop."""

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe2(os.O_CLOEXEC)
        self._open = {self.reading, self._writing}
        os.set_blocking(self._writing, False)
        with suppress(OSError):  # more than this user may have: a smaller one does as well
            fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def __enter__(self) -> _Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_reading()
        self.close_writing()

    def close_reading(self) -> None:
        self._close(self.reading)

    def close_writing(self) -> None:
        self._close(self._writing)

    def _close(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.remove(descriptor)
            os.close(descriptor)

    async def write(self, piece: bytes) -> None:
        """Raises BrokenPipeError where nobody reads any more."""
        left = memoryview(piece)
        while left:
            try:
                left = left[os.write(self._writing, left) :]
            except BlockingIOError:
                await self._writable()

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(self._writing, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self._writing)
