"""kill -9 in the middle of an install; many more of them: ``python -m tests.agent.install.soak --kills 200``."""

from __future__ import annotations

import asyncio
from pathlib import Path

from .conftest import Installed
from .soak import soak


async def test_kill_9_at_any_moment_leaves_nothing_that_counts(installed: Installed, tmp_path: Path) -> None:
    report = await asyncio.to_thread(soak, installed.binary, tmp_path, 3, 7)
    assert sum(report.kills.values()) == 3
