"""What an agent says of its own faults is said as in production: as plain text, without the values of variables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def plain_tracebacks() -> Iterator[None]:
    """Rendered ones cost a second each, and look at objects that other threads change meanwhile."""
    before = structlog.get_config()
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.processors.add_log_level, renderer], cache_logger_on_first_use=False)
    yield
    structlog.configure(**before)
