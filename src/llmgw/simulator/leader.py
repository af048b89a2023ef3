"""Rank 0's side of the rendezvous: it waits for the workers, has each take part in every token, and ends with any."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmgw.simulator.console import say
from llmgw.simulator.faults import FaultKind
from llmgw.simulator.options import Options
from llmgw.simulator.ranks import NoSuchRank
from llmgw.simulator.rendezvous import (
    HANDSHAKE_S,
    LINE_BYTES,
    Channel,
    Ended,
    Frame,
    Gone,
    join_address,
    prove,
    split_address,
)
from llmgw.version import VERSION

STOPPED = "it was stopped"


class _Turned(Exception):
    """Whoever dialled is none of this replica's workers; the message says why."""


@dataclass(slots=True)
class _Worker:
    rank: int
    channel: Channel
    address: str
    loaded: bool = False
    steps: int = 0
    asked: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """What it has not answered yet, by number."""

    def abandon(self, gone: Gone) -> None:
        for answer in self.asked.values():
            if not answer.done():
                answer.set_exception(gone)
                answer.exception()  # who asked may have left
        self.asked.clear()


class Leader:
    """One for the life of the process. ``run`` has to run beside everything else, and raises Ended."""

    def __init__(self, options: Options, listening: socket.socket) -> None:
        self._options = options
        self._listening = listening
        self._workers: dict[int, _Worker] = {}
        self._news = asyncio.Event()
        self._numbers = itertools.count(1)
        self._farewell: tuple[str, int] = (STOPPED, 0)
        """What the workers are told when this rank ends, and the status that they end with."""
        self._lost: Gone | None = None

    @property
    def where(self) -> str:
        host, port = self._listening.getsockname()[:2]
        return join_address(host, port)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                connection, _ = await loop.sock_accept(self._listening)
                tasks.create_task(self._admit(connection))

    # -- whoever dials

    async def _admit(self, connection: socket.socket) -> None:
        channel = Channel(*await asyncio.open_connection(sock=connection, limit=LINE_BYTES))
        try:
            if self._hangs():
                await asyncio.Event().wait()
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    worker = await self._greet(channel)
            except TimeoutError:
                say(f"{channel.peer} dialled {self.where} and said nothing for {HANDSHAKE_S:g} s")
                return
            except (Gone, _Turned) as error:
                say(f"{channel.peer} dialled {self.where} and was not taken in: {error}")
                return
            await self._hold(worker)
        finally:
            words, status = self._farewell
            channel.send("end", words=words, status=status)
            channel.close()

    def _hangs(self) -> bool:
        fault = self._options.fault
        return fault is not None and fault.kind is FaultKind.HANG_IN_RENDEZVOUS

    async def _greet(self, channel: Channel) -> _Worker:
        options, nonce = self._options, secrets.token_hex(16)
        channel.send("challenge", nonce=nonce)
        hello = await channel.receive()
        if words := self._objection(hello, nonce):
            channel.send("refused", words=words)
            raise _Turned(words)
        theirs = str(hello.get("nonce"))
        answer = prove(options.rendezvous_key, theirs, rank=0, nodes=options.nodes, model=options.model)
        channel.send("welcome", proof=answer)
        worker = _Worker(hello["rank"], channel, channel.peer)
        self._workers[worker.rank] = worker
        self._news.set()
        return worker

    def _objection(self, hello: Frame, nonce: str) -> str | None:
        """Why this is none of the workers that are waited for; None where it is one."""
        options, rank = self._options, hello.get("rank")
        if hello["type"] != "hello":
            return f"it said {hello['type']!r} where `hello` was expected"
        if hello.get("version") != VERSION:
            return f"it is llmgw-sim {hello.get('version')}, and rank 0 is {VERSION}: all ranks must be the same build"
        if hello.get("model") != options.model:
            return f"it runs the model {hello.get('model')!r}, and this replica runs {options.model!r}"
        if hello.get("nodes") != options.nodes:
            return f"it was started for {hello.get('nodes')} nodes, and this replica has {options.nodes}"
        if not isinstance(rank, int) or not 1 <= rank < options.nodes:
            return f"it calls itself rank {rank}, and the workers' ranks go from 1 to {options.nodes - 1}"
        due = prove(options.rendezvous_key, nonce, rank=rank, nodes=options.nodes, model=options.model)
        if not hmac.compare_digest(str(hello.get("proof")).encode(), due.encode()):
            return "its rendezvous key is another: it belongs to another replica, or to another generation of this one"
        if rank in self._workers:
            return f"rank {rank} has joined already, from {self._workers[rank].address}"
        return None

    # -- a worker that has joined

    async def _hold(self, worker: _Worker) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(worker.channel.beat())
                await self._listen(worker)
        except* Gone as group:
            gone = group.exceptions[0]
            while isinstance(gone, BaseExceptionGroup):
                gone = gone.exceptions[0]
            words = f"rank {worker.rank} ({worker.address}) is gone: {gone}"
            self._farewell = (words, 1)
            self._lost = Gone(words)
            for each in self._workers.values():
                each.abandon(self._lost)
            raise Ended(words) from None

    async def _listen(self, worker: _Worker) -> None:
        while True:
            frame = await worker.channel.receive()
            match frame["type"]:
                case "loaded":
                    worker.loaded = True
                    self._news.set()
                case "done" | "struck" as type:
                    worker.steps += type == "done"
                    answer = worker.asked.pop(frame["number"], None)
                    if answer is not None and not answer.done():
                        answer.set_result(None)
                case "end":
                    raise Gone(str(frame.get("words")))

    def _ask(self, worker: _Worker, type: str, **fields: Any) -> asyncio.Future[None]:
        if self._lost is not None:
            raise self._lost
        number = next(self._numbers)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        worker.asked[number] = answer
        answer.add_done_callback(lambda _: worker.asked.pop(number, None))
        worker.channel.send(type, number=number, **fields)
        return answer

    # -- before it serves

    async def gather(self) -> None:
        """Returns when all workers have joined and loaded, and this rank has loaded too. Raises Ended."""
        await self._all_joined()
        say(f"all {self._options.nodes} ranks have joined at {self.where}: loading")
        for worker in self._workers.values():
            worker.channel.send("load")
        await asyncio.sleep(self._options.load_time_s)
        await self._until(self._loading, lambda ranks: f"waiting for {ranks} to load")

    async def _all_joined(self) -> None:
        timeout_s = self._options.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(self._absent, lambda ranks: f"waiting for {ranks} at {self.where}")
        except TimeoutError:
            words = f"{self._named(self._absent())} did not join at {self.where} within {timeout_s:g} s"
            self._farewell = (words, 1)
            raise Ended(words) from None

    async def _until(self, missing: Callable[[], Sequence[int]], words: Callable[[str], str]) -> None:
        """Returns once none is missing, and says who is whenever that changes."""
        said = None
        while ranks := missing():
            if ranks != said:
                said = ranks
                say(words(self._named(ranks)))
            self._news.clear()
            await self._news.wait()

    def _absent(self) -> list[int]:
        return [rank for rank in range(1, self._options.nodes) if rank not in self._workers]

    def _loading(self) -> list[int]:
        return [rank for rank, worker in sorted(self._workers.items()) if not worker.loaded]

    def _named(self, ranks: Sequence[int]) -> str:
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {self._options.nodes}"

    # -- while it serves

    async def step(self) -> None:
        await asyncio.gather(*(self._ask(worker, "step") for worker in self._workers.values()))

    async def strike(self, rank: int, fault: str | None) -> None:
        worker = self._workers.get(rank)
        if worker is None:
            raise NoSuchRank(f"there is no rank {rank}: ranks of this replica go from 0 to {self._options.nodes - 1}")
        await self._ask(worker, "fault", kind=fault)

    def shown(self) -> Sequence[dict[str, Any]]:
        return [
            {"rank": rank, "address": worker.address, "steps": worker.steps}
            for rank, worker in sorted(self._workers.items())
        ]


@contextlib.contextmanager
def listening(options: Options) -> Iterator[Leader]:
    """A leader whose rendezvous port is open. Raises Ended where it can't be had."""
    assert options.dist_init is not None
    host, port = split_address(options.dist_init)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        words = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise Ended(f"can't listen for the other ranks on {options.dist_init}: {words}") from None
    with listener:
        listener.setblocking(False)
        yield Leader(options, listener)
