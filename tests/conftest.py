"""What holds for all tests: plain logs, and a skip that nobody wrote down is a failure where LLMGW_SKIPS=fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from tests.exploring import TIMES

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell that is not interactive: programs under test would never hear a Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is the machine's to say.
settings.register_profile("llmgw", deadline=None, derandomize=TIMES == 0)
settings.load_profile("llmgw")

ALLOWED = Path(__file__).with_name("allowed-skips.txt")


WAITING = ("tests/cluster/net/", "tests/cluster/", "tests/up/", "tests/agent/", "tests/link/")
"""Where most tests wait, for processes and for clocks: begun first, they wait beside those that compute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Within a room the order stays, and so it does within a file."""

    def rank(item: pytest.Item) -> int:
        return next((index for index, room in enumerate(WAITING) if item.nodeid.startswith(room)), len(WAITING))

    items.sort(key=rank)


def _allowed() -> tuple[str, ...]:
    lines = (line.partition("#")[0].strip() for line in ALLOWED.read_text().splitlines())
    return tuple(line for line in lines if line)


@pytest.fixture(autouse=True)
def plain_tracebacks() -> Iterator[None]:
    """What a program says of its own faults is plain text, as in production.

    With the values of all variables it costs seconds each, and looks at objects that other threads change meanwhile.
    """
    before = structlog.get_config()
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.processors.add_log_level, renderer], cache_logger_on_first_use=False)
    yield
    structlog.configure(**before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    strict = os.environ.get("LLMGW_SKIPS") == "fail"
    if strict and report.skipped and not hasattr(report, "wasxfail") and not item.nodeid.startswith(_allowed()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"skipped, and not in {ALLOWED.name}: {reason}"
    return report
