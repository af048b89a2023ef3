"""Runs the long-lived processes: logging, the event loop, and exit codes for what keeps them from starting."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog
import uvloop

from llmgw.config import ConfigError, load_agent, load_server


def set_up_logging() -> None:
    """One line per event on standard error: time in UTC, level, words, key=value. Colours on a terminal alone."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
            if sys.stderr.isatty()
            else structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def run_server(path: Path, new_admin_token: bool) -> int:
    from llmgw.control.main import ServerRefused, serve

    set_up_logging()
    try:
        config = load_server(path)
        _run(serve(path, config, new_admin_token=new_admin_token))
    except (ConfigError, ServerRefused) as error:
        return _refuse(error)
    return 0


def run_gateway(path: Path) -> int:
    from llmgw.gateway.gateway import StartError
    from llmgw.gateway.main import run, settings_of
    from llmgw.gateway.settings import GatewaySettings
    from llmgw.store import state_dir
    from llmgw.store.base import StoreError

    set_up_logging()
    try:

        def read() -> GatewaySettings:
            config = load_server(path)
            return settings_of(config, state_dir(config.store))

        return run(read(), read)
    except (ConfigError, StartError, StoreError) as error:
        return _refuse(error)


def run_agent(path: Path) -> int:
    from llmgw.agent.main import AgentRefused, serve

    set_up_logging()
    try:
        _run(serve(load_agent(path)))
    except (ConfigError, AgentRefused) as error:
        return _refuse(error)
    return 0


def _run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def _refuse(error: Exception) -> int:
    print(error, file=sys.stderr)
    return 1
