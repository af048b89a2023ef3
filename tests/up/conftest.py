from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.up.person import Person

LOCK = Path(tempfile.gettempdir()) / "llmgw-tests-up.lock"


@pytest.fixture
def person() -> Iterator[Person]:
    """A home of its own, closed to everybody else, as homes are.

    One after another where tests run on several cores: each takes the ports that a cluster of one prefers.
    """
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        someone = Person(Path(tempfile.mkdtemp(prefix="llmgw-home-")))
        try:
            yield someone
        finally:
            someone.close()
