"""The one way in which a file comes onto this node: onto the disk while it is hashed, resumed where it was cut."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import aiohttp

from llmgw.agent.fetch.artifact import Artifact, FetchFailed, Say
from llmgw.agent.fetch.complaints import Broken, explain, host_of, refusal, shown
from llmgw.agent.fetch.disk import CHUNK_BYTES, megabytes
from llmgw.agent.fetch.members import BadArchive
from llmgw.agent.fetch.part import Part, Validator
from llmgw.agent.fetch.threads import Pace, in_thread
from llmgw.agent.fetch.transport import Transport

_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


class Sink(Protocol):
    """Takes the file while it comes."""

    async def write(self, piece: bytes) -> None:
        """Every byte of the file, in order, once. The download waits for it.

        BadArchive is taken down and raised once the hash has shown that it is not the download that is to blame; any
        other exception ends the download at once.
        """


class StartAnew(FetchFailed):
    """The file was wrong, is gone from the disk, and the sink has had bytes of it: once more, with a new sink."""


class _Excess(FetchFailed):
    """More comes than there may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    stall_s: float = 30.0
    """Without a byte for so long, a try is over."""
    slow_bytes_per_s: float = 100_000.0
    """With less than this over ``slow_s``, a try is over too. Waiting for a sink does not count."""
    slow_s: float = 60.0
    barren_tries: int = 3
    """Tries in a row that bring nothing new, after which it is given up; each that brings something is forgiven."""
    tries: int = 12
    pause_s: float = 1.0
    """Before the second try; twice that before the third, and so on up to ten times."""
    most_bytes: int = 64 << 30


LIMITS = Limits()


async def download(
    artifact: Artifact, folder: Path, say: Say, *, sink: Sink | None = None, limits: Limits = LIMITS
) -> Path:
    """Brings the file to ``folder/NAME`` and returns that path: whole, of the stated SHA-256, on the disk for good.

    What came of it before stays in ``NAME.part`` and is gone on from where the source's file is the same; so call it
    again after any failure. Whoever calls sees to it that nobody else uses ``folder``. A file with another hash is
    deleted and fetched anew, once (with a sink: StartAnew). Raises FetchFailed, NoRoom, OSError, BadArchive.
    """
    if not _plain(artifact.name):
        raise FetchFailed(f"{shown(artifact.url)} calls its file {artifact.name!r}, which is no plain file name")
    part = Part(folder, artifact.name, artifact.sha256)
    try:
        return await _Download(artifact, part, say, sink, limits).run()
    finally:
        part.close()


class _Download:
    def __init__(self, artifact: Artifact, part: Part, say: Say, sink: Sink | None, limits: Limits) -> None:
        self._artifact = artifact
        self._part = part
        self._say = say
        self._sink = sink
        self._limits = limits
        self._total = artifact.size_bytes
        self._pace = Pace()
        self._refused: BadArchive | None = None
        self._encoding = ""

    async def run(self) -> Path:
        if self._total is not None and self._total > self._limits.most_bytes:
            raise self._too_large(self._total)
        part, artifact, wanted = self._part, self._artifact, self._artifact.sha256.lower()
        there = await in_thread(lambda stop: part.open())
        if self._total is not None and there > self._total:
            await in_thread(lambda stop: part.restart())
        await self._bring()
        if part.digest != wanted:
            got = part.digest
            await in_thread(lambda stop: part.discard())
            if self._sink is not None:
                raise StartAnew(self._wrong(got))
            self._say(f"{artifact.name} came with another sha256 than its publisher states: fetching it anew")
            await in_thread(lambda stop: part.open())
            await self._bring()
            if part.digest != wanted:
                got = part.digest
                await in_thread(lambda stop: part.discard())
                raise FetchFailed(self._wrong(got))
        path = await in_thread(lambda stop: part.settle())
        if self._refused is not None:
            raise self._refused
        return path

    async def _bring(self) -> None:
        """Everything of it onto the disk and through the hash, in as many tries as it takes."""
        if (self._part.complete and await self._is_whole()) or self._part.size_bytes == self._total:
            await self._replay()
            return
        if urlsplit(self._artifact.url).scheme == "file":
            await self._copy()
            return
        part = self._part
        async with Transport(self._artifact.access, patience_s=self._limits.stall_s) as transport:
            barren = 0
            for number in range(1, self._limits.tries + 1):
                before = part.size_bytes
                try:
                    await self._try(transport)
                    return
                except Broken as error:
                    came = part.size_bytes > before
                    barren = 0 if came else barren + 1
                    if barren >= self._limits.barren_tries or number == self._limits.tries:
                        raise FetchFailed(self._given_up(error)) from None
                    self._say(
                        f"downloading {self._artifact.name} {self._progress(part.size_bytes)}: {error}; trying again"
                    )
                await asyncio.sleep(self._limits.pause_s * min(2**barren, 10))

    async def _is_whole(self) -> bool:
        """Whether what lay there under the file's own name is the file. If not, it is forgotten."""
        while await in_thread(lambda stop: self._part.catch_up()):
            self._show("checking")
        if self._part.digest != self._artifact.sha256.lower():
            await in_thread(lambda stop: self._part.restart())
            return False
        self._part.rewind()
        return True

    # -- one try

    async def _try(self, transport: Transport) -> None:
        part = self._part
        there = part.size_bytes
        headers = dict(self._artifact.headers)
        if there:
            headers["Range"] = f"bytes={there}-"
            if (known := part.validator.if_range) is not None:
                headers["If-Range"] = known
        async with transport.get(self._artifact.url, headers) as response:
            passed_over = await self._begin(response, there)
            if passed_over is None:
                await self._replay()
                return
            await self._reserve()
            await self._replay()
            try:
                await self._receive(response, passed_over)
            except _Excess:
                await in_thread(lambda stop: part.discard())
                raise
        if self._total is not None and part.hashed_bytes < self._total:
            raise Broken(f"{host_of(self._artifact.url)} ended it early")

    async def _begin(self, response: aiohttp.ClientResponse, there: int) -> int | None:
        """How many bytes of the answer are to be passed over; None: the part is the whole file already."""
        part = self._part
        validator = Validator(etag=response.headers.get("ETag"), last_modified=response.headers.get("Last-Modified"))
        self._encoding = response.headers.get("Content-Encoding", "")
        if response.status == 416 and there:
            _, total = _content_range(response)
            if total == there:
                return None
            await self._restart(f"asked for what follows byte {there}, it says that there are {total or 'fewer'}")
            raise Broken(f"{host_of(self._artifact.url)} has no byte {there} of it")
        if response.status == 206 and there:
            start, total = _content_range(response)
            if start != there or not part.validator.agrees(validator):
                await self._restart("it goes on with another file than the one that came so far")
                raise Broken(f"{host_of(self._artifact.url)} has another file there now")
            self._take_total(total)
            return 0
        if response.status != 200:
            raise refusal(response.status, response.reason or "", self._artifact.name, str(response.url))
        self._total = self._artifact.size_bytes
        self._take_total(response.content_length)
        if part.hashed_bytes and part.validator.agrees(validator):
            return part.hashed_bytes  # it knows no ranges, and the same bytes come again
        if there:
            await self._restart("it is another file there now")
        await in_thread(lambda stop: part.begin(validator))
        return 0

    async def _restart(self, why: str) -> None:
        """From the first byte. A sink that has had some can't take that back."""
        if self._sink is not None and self._part.hashed_bytes:
            await in_thread(lambda stop: self._part.discard())
            raise StartAnew(f"downloading {self._artifact.name} starts anew: {why}")
        await in_thread(lambda stop: self._part.restart())

    def _take_total(self, total: int | None) -> None:
        if total is None:
            return
        if self._artifact.size_bytes is not None and total != self._artifact.size_bytes:
            raise FetchFailed(
                f"{shown(self._artifact.url)} has {megabytes(total)} ({total} bytes), and {self._artifact.name} is "
                f"stated to have {self._artifact.size_bytes}: it is not that file, or somebody answers in its place"
            )
        if total > self._limits.most_bytes:
            raise self._too_large(total)
        self._total = total

    async def _reserve(self) -> None:
        total = self._total
        if total is not None:
            await in_thread(lambda stop: self._part.reserve(total))

    # -- bytes

    async def _receive(self, response: aiohttp.ClientResponse, passed_over: int) -> None:
        """Reads ahead while the last piece is written, hashed and taken by the sink."""
        ahead: asyncio.Queue[bytes | Broken | FetchFailed] = asyncio.Queue(maxsize=1)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(response, passed_over, ahead), name=f"read {self._artifact.name}")
                tasks.create_task(self._keep_all(ahead), name=f"keep {self._artifact.name}")
        except* Exception as failures:
            failure: BaseException = failures
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
        else:
            return
        raise failure

    async def _read(
        self, response: aiohttp.ClientResponse, passed_over: int, ahead: asyncio.Queue[bytes | Broken | FetchFailed]
    ) -> None:
        """An empty piece says that it is all; an error, that it is all that comes in this try."""
        try:
            async with aclosing(self._pieces(response, passed_over)) as pieces:
                async for piece in pieces:
                    await ahead.put(piece)
        except (Broken, FetchFailed) as error:
            await ahead.put(error)
        else:
            await ahead.put(b"")

    async def _keep_all(self, ahead: asyncio.Queue[bytes | Broken | FetchFailed]) -> None:
        while piece := await ahead.get():
            if not isinstance(piece, bytes):
                raise piece
            await self._keep(piece)

    async def _pieces(self, response: aiohttp.ClientResponse, passed_over: int) -> AsyncGenerator[bytes, None]:
        came = self._part.hashed_bytes - passed_over
        async with aclosing(self._watched(response)) as pieces:
            async for piece in pieces:
                came += len(piece)
                if self._total is not None and came > self._total:
                    raise self._excess(f"the {self._total} bytes that it should have")
                if came > self._limits.most_bytes:
                    raise self._excess(f"{megabytes(self._limits.most_bytes)}, the most that is ever fetched")
                if passed_over >= len(piece):
                    passed_over -= len(piece)
                    continue
                yield piece[passed_over:]
                passed_over = 0

    async def _watched(self, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises Broken where it stalls, crawls or breaks off."""
        limits, loop = self._limits, asyncio.get_running_loop()
        rate = Rate(limits.slow_s)
        while (slow := rate.bytes_per_s) is None or slow >= limits.slow_bytes_per_s:
            since = loop.time()
            try:
                async with asyncio.timeout(limits.stall_s):
                    piece = await response.content.readany()
            except TimeoutError:
                raise Broken(f"no byte for {limits.stall_s:g} s") from None
            except (aiohttp.ClientError, OSError) as error:
                if left := _left(response.content):
                    yield left
                raise explain(error, self._artifact.url) from None
            if not piece:
                return
            rate.count(loop.time() - since, len(piece))
            yield piece
        raise Broken(f"only {slow / 1000:.0f} kB/s over {limits.slow_s:g} s")

    def _excess(self, limit: str) -> _Excess:
        return _Excess(f"{shown(self._artifact.url)} sends more than {limit}: it is not {self._artifact.name}")

    async def _keep(self, piece: bytes) -> None:
        if self._sink is None:
            await in_thread(lambda stop: self._part.write(piece))
        else:
            results = await asyncio.gather(
                in_thread(lambda stop: self._part.write(piece)), self._feed(piece), return_exceptions=True
            )
            for failure in results:
                if isinstance(failure, BaseException):
                    raise failure
        self._show()

    async def _feed(self, piece: bytes) -> None:
        if self._sink is None or self._refused is not None:
            return
        try:
            await self._sink.write(piece)
        except BadArchive as error:
            self._refused = error

    async def _replay(self) -> None:
        """What lay on the disk already, through the hash and to the sink."""
        while piece := await in_thread(lambda stop: self._part.catch_up()):
            await self._feed(piece)
            self._show("checking")

    async def _copy(self) -> None:
        """From a file of this machine (or of what is mounted on it)."""
        parts = urlsplit(self._artifact.url)
        source = Path(unquote(parts.path))
        await in_thread(lambda stop: self._part.restart())
        try:
            file = await in_thread(lambda stop: source.open("rb", buffering=0))
        except OSError as error:
            raise FetchFailed(f"{source} can't be read: {error.strerror}") from None
        with file:
            self._take_total(source.stat().st_size)
            await self._reserve()
            while piece := await in_thread(lambda stop: file.read(CHUNK_BYTES)):
                await self._keep(piece)

    # -- words

    def _show(self, doing: str = "downloading") -> None:
        done, total = self._part.hashed_bytes, self._total
        if self._pace.due(100 * done // total if total else 0):
            self._say(f"{doing} {self._artifact.name} {self._progress(done)}")

    def _progress(self, done: int) -> str:
        return f"({megabytes(self._total)}, {100 * done // self._total} %)" if self._total else f"({megabytes(done)})"

    def _given_up(self, error: Broken) -> str:
        kept = self._part.size_bytes
        after = f"; what came {self._progress(kept)} is kept, and the next try goes on from there" if kept else ""
        return f"downloading {self._artifact.name} from {host_of(self._artifact.url)} failed: {error}{after}"

    def _wrong(self, got: str) -> str:
        encoded = f" (its server calls it Content-Encoding: {self._encoding})" if self._encoding else ""
        return (
            f"{self._artifact.name} from {shown(self._artifact.url)}{encoded} is not the file that its publisher "
            f"states: sha256 {self._artifact.sha256} was expected and {got} came; it was deleted and nothing was "
            "installed. If a mirror or a proxy serves it, mend that"
        )

    def _too_large(self, size_bytes: int) -> FetchFailed:
        most = megabytes(self._limits.most_bytes)
        return FetchFailed(f"{self._artifact.name} has {megabytes(size_bytes)}, more than {most}: it is not fetched")


class Rate:
    """Bytes per second over the last ``window_s`` of waiting for them."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._waited_s = 0.0
        self._bytes = 0
        self._counts: deque[tuple[float, int]] = deque()

    def count(self, waited_s: float, size_bytes: int) -> None:
        self._waited_s += waited_s
        self._bytes += size_bytes
        grain = self._window_s / 60
        if self._counts and self._waited_s - self._counts[-1][0] < grain:
            at, counted = self._counts.pop()
            self._counts.append((at, counted + size_bytes))
        else:
            self._counts.append((self._waited_s, size_bytes))
        while self._counts[0][0] <= self._waited_s - self._window_s:
            self._bytes -= self._counts.popleft()[1]

    @property
    def bytes_per_s(self) -> float | None:
        """None until a whole window has been waited through."""
        return self._bytes / self._window_s if self._waited_s >= self._window_s else None


def _content_range(response: aiohttp.ClientResponse) -> tuple[int | None, int | None]:
    """Where a partial answer starts, and how large the whole is; None for what it does not say."""
    found = _RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
    if found is None:
        return None, None
    start, total = found.groups()
    return int(start) if start else None, int(total) if total != "*" else None


def _left(body: aiohttp.StreamReader) -> bytes:
    """What had come before the connection broke: it is kept there, and withheld from whoever asks in the usual way."""
    body.set_exception(None)  # type: ignore[arg-type]
    return body.read_nowait()


def _plain(name: str) -> bool:
    return 0 < len(name) < 200 and name.isprintable() and "/" not in name and "\\" not in name and name[0] != "."
