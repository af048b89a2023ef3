"""``python -m llmgw.simulator``, and what ``llmgw sim`` calls."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from llmgw.simulator.console import complain, say
from llmgw.simulator.faults import BadFault, FaultKind
from llmgw.simulator.leader import listening
from llmgw.simulator.options import Options, parse
from llmgw.simulator.rendezvous import Ended, join_address
from llmgw.simulator.work import Work
from llmgw.simulator.worker import follow

if TYPE_CHECKING:
    from llmgw.simulator.server import Server

STOP_S = 0.5
"""How long a stop waits for requests in flight before it ends them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT, or until another rank has gone.

    The process's exit status: 0 stopped, or rank 0 was; 1 a port can't be had, or another rank is missing; 2 bad usage.
    """
    options = parse(sys.argv[1:] if argv is None else argv)
    if options.fault is not None and options.fault.kind is FaultKind.EXIT_AT_START:
        complain("simulated fault: exit at start")
        return int(options.fault.number)
    return asyncio.run(serve(options))


async def serve(options: Options) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    ends: list[Ended] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            life = tasks.create_task(_live(options))
            await stop.wait()
            life.cancel()
    except* Ended as group:
        ends = _leaves(group)
    for end in ends:
        (complain if end.status else say)(str(end))
    if not ends:
        say("stopped")
    return max((end.status for end in ends), default=0)


def _leaves(group: BaseExceptionGroup[Ended]) -> list[Ended]:
    """Two ranks may go at once; the words of each are worth having."""
    found: list[Ended] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


async def _live(options: Options) -> None:
    """This rank's life. Raises Ended."""
    if options.nodes == 1:
        await _serve_alone(options)
    elif options.rank == 0:
        await _lead(options)
    else:
        await follow(options, Work(options))


async def _serve_alone(options: Options) -> None:
    from llmgw.simulator.server import Server

    server = Server(options, Work(options))
    async with _listening(options, server):
        await asyncio.sleep(options.load_time_s)
        _open(server)
        await asyncio.Event().wait()


async def _lead(options: Options) -> None:
    from llmgw.simulator.server import Server

    with listening(options) as leader:
        server = Server(options, Work(options, leader))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leader.run())
            await leader.gather()
            _open(server)
            async with _listening(options, server):
                await asyncio.Event().wait()


def _open(server: Server) -> None:
    try:
        server.open()
    except BadFault as error:
        raise Ended(str(error)) from None


@asynccontextmanager
async def _listening(options: Options, server: Server) -> AsyncIterator[None]:
    # Imported late: --help, --version, refusals and ranks above 0 need no web server.
    from aiohttp import web

    runner = web.AppRunner(
        server.application(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=STOP_S,
        keepalive_timeout=75.0,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, options.host, options.port).start()
        except OSError as error:
            words = os.strerror(error.errno) if error.errno else str(error)
            raise Ended(f"can't listen on {join_address(options.host, options.port)}: {words}") from None
        host, port = runner.addresses[0][:2]
        say(f"listening on http://{join_address(host, port)}, model {options.model}")
        yield
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
