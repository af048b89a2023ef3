from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.up.person import Person


@pytest.fixture
def person() -> Iterator[Person]:
    """A home of its own, closed to everybody else, as homes are."""
    someone = Person(Path(tempfile.mkdtemp(prefix="llmgw-home-")))
    try:
        yield someone
    finally:
        someone.close()
