"""``python -m llmgw.simulator``, and what ``llmgw sim`` calls."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from llmgw.simulator.faults import FaultKind
from llmgw.simulator.options import Options, parse

STOP_S = 0.5
"""How long a stop waits for requests in flight before it ends them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT. The process's exit status: 0 stopped, 1 the port can't be had, 2 bad usage."""
    options = parse(sys.argv[1:] if argv is None else argv)
    if options.fault is not None and options.fault.kind is FaultKind.EXIT_AT_START:
        print("llmgw-sim: simulated fault: exit at start", file=sys.stderr, flush=True)
        return int(options.fault.number)
    return asyncio.run(serve(options))


async def serve(options: Options) -> int:
    # Imported late: --help, --version and refusals need no web server.
    from aiohttp import web

    from llmgw.simulator.server import Server

    server = Server(options)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=STOP_S,
        keepalive_timeout=75.0,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, options.host, options.port)
        try:
            await site.start()
        except OSError as error:
            words = os.strerror(error.errno) if error.errno else str(error)
            print(f"llmgw-sim: can't listen on {options.host}:{options.port}: {words}", file=sys.stderr, flush=True)
            return 1
        host, port = runner.addresses[0][:2]
        print(f"llmgw-sim: listening on http://{host}:{port}, model {options.model}", flush=True)
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(server.load())
            await stop.wait()
            loading.cancel()
    finally:
        await runner.cleanup()
    print("llmgw-sim: stopped", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
