"""What holds for all tests: a skip that nobody wrote down is a failure where LLMGW_SKIPS=fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell that is not interactive: programs under test would never hear a Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

ALLOWED = Path(__file__).with_name("allowed-skips.txt")


def _allowed() -> tuple[str, ...]:
    lines = (line.partition("#")[0].strip() for line in ALLOWED.read_text().splitlines())
    return tuple(line for line in lines if line)


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
