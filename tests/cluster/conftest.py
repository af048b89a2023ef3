from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.lab import Lab


@pytest.fixture
def lab() -> Iterator[Lab]:
    found = Lab.make()
    try:
        yield found
    finally:
        found.close()
