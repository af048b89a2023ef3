"""A rank above 0: it dials rank 0, takes part in every token, and has no port of its own."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import secrets
import time

from llmgw.simulator.console import say
from llmgw.simulator.faults import BadFault, FaultKind, parse_fault
from llmgw.simulator.leader import STOPPED
from llmgw.simulator.options import Options
from llmgw.simulator.rendezvous import (
    HANDSHAKE_S,
    LINE_BYTES,
    Channel,
    Ended,
    Frame,
    Gone,
    prove,
    split_address,
)
from llmgw.simulator.work import Work
from llmgw.version import VERSION

RETRY_S = 0.2
DIAL_S = 5.0


async def follow(options: Options, work: Work) -> None:
    """Until this rank has to end: raises Ended, or is cancelled where it is to stop."""
    channel = await _join(options)
    last_words = STOPPED
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(channel.beat())
            await _Following(options, work, channel, tasks).listen()
    except* Gone as group:
        gone = group.exceptions[0]
        raise Ended(f"rank 0 at {options.dist_init} is gone: {gone}") from None
    except* Ended as group:
        last_words = str(group.exceptions[0])
        raise
    finally:
        channel.send("end", words=last_words)
        channel.close()


# -- joining


class _Again(Exception):
    """This attempt came to nothing; the message says how, and the next may do better."""


async def _join(options: Options) -> Channel:
    deadline = time.monotonic() + options.start_timeout_s
    said = ""
    while True:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await _dial(options)
        except _Again as error:
            words = str(error)
        except TimeoutError:
            words = said or "no answer"
        if time.monotonic() >= deadline:
            raise Ended(f"rank 0 at {options.dist_init} was not joined in {options.start_timeout_s:g} s: {words}")
        if words != said:
            said = words
            say(f"rank {options.rank} of {options.nodes} dials rank 0 at {options.dist_init}: {words}; trying on")
        await asyncio.sleep(RETRY_S)


async def _dial(options: Options) -> Channel:
    assert options.dist_init is not None
    host, port = split_address(options.dist_init)
    try:
        async with asyncio.timeout(DIAL_S):
            streams = await asyncio.open_connection(host, port, limit=LINE_BYTES, local_addr=_source(options, host))
    except TimeoutError:
        raise _Again(f"no answer within {DIAL_S:g} s") from None
    except OSError as error:
        raise _Again(os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)) from None
    channel = Channel(*streams)
    joined = False
    try:
        if options.fault is not None and options.fault.kind is FaultKind.HANG_IN_RENDEZVOUS:
            await asyncio.Event().wait()
        async with asyncio.timeout(HANDSHAKE_S):
            await _introduce(options, channel)
        joined = True
    except TimeoutError:
        raise _Again(f"it took the connection and said nothing for {HANDSHAKE_S:g} s") from None
    except Gone as error:
        raise _Again(str(error)) from None
    finally:
        if not joined:
            channel.close()
    say(f"rank {options.rank} of {options.nodes} has joined rank 0 at {options.dist_init}")
    return channel


def _source(options: Options, rank_0: str) -> tuple[str, int] | None:
    """The address that others know this node by: firewalls and words go by it. Loopback reaches no other node."""
    try:
        own = ipaddress.ip_address(options.host)
        reachable = not own.is_loopback or ipaddress.ip_address(rank_0).is_loopback
    except ValueError:  # a name, which the system may resolve to any of its addresses
        return None
    return (options.host, 0) if reachable and not own.is_unspecified else None


async def _introduce(options: Options, channel: Channel) -> None:
    challenge = await _expect(channel, "challenge")
    who = {"rank": options.rank, "nodes": options.nodes, "model": options.model}
    proof = prove(options.rendezvous_key, str(challenge.get("nonce")), **who)  # type: ignore[arg-type]
    nonce = secrets.token_hex(16)
    channel.send("hello", version=VERSION, nonce=nonce, proof=proof, **who)
    welcome = await _expect(channel, "welcome")
    due = prove(options.rendezvous_key, nonce, rank=0, nodes=options.nodes, model=options.model)
    if not hmac.compare_digest(str(welcome.get("proof")).encode(), due.encode()):
        raise Ended(f"what listens at {options.dist_init} is not rank 0 of this replica: its rendezvous key is another")


async def _expect(channel: Channel, type: str) -> Frame:
    frame = await channel.receive()
    if frame["type"] == "refused":
        raise Ended(f"rank 0 at {channel.peer} refused this rank: {frame.get('words')}")
    if frame["type"] == "end":
        raise Gone(str(frame.get("words")))
    if frame["type"] != type:
        raise Gone(f"it said {frame['type']!r} where {type!r} was expected")
    return frame


# -- taking part


class _Following:
    def __init__(self, options: Options, work: Work, channel: Channel, tasks: asyncio.TaskGroup) -> None:
        self._options = options
        self._work = work
        self._channel = channel
        self._tasks = tasks

    async def listen(self) -> None:
        while True:
            frame = await self._channel.receive()
            match frame["type"]:
                case "load":
                    self._tasks.create_task(self._load())
                case "step":
                    self._tasks.create_task(self._step(frame["number"]))
                case "fault":
                    self._strike(frame.get("kind"))
                    self._channel.send("struck", number=frame["number"])
                case "end":
                    words, status = frame.get("words"), frame.get("status")
                    ended = f"rank 0 at {self._options.dist_init} has ended: {words}"
                    raise Ended(ended, status if isinstance(status, int) else 1)

    async def _load(self) -> None:
        await asyncio.sleep(self._options.load_time_s)
        try:
            self._work.strike(self._options.fault)
        except BadFault as error:
            raise Ended(str(error)) from None
        say(f"rank {self._options.rank} of {self._options.nodes} has loaded {self._options.model}")
        self._channel.send("loaded")

    async def _step(self, number: int) -> None:
        """A rank that hangs does not answer, as one that is stuck in a collective would not."""
        if await self._work.take_part():
            self._channel.send("done", number=number)

    def _strike(self, kind: str | None) -> None:
        self._work.strike(parse_fault(kind) if kind is not None else None)
