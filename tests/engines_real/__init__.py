"""Engines themselves, installed by agents: ``make test-engines``. They take minutes and gigabytes."""

from pathlib import Path

SGLANG_VERSION = "0.5.23"
SGLANG_LOCK = Path(__file__).parent / f"sglang-{SGLANG_VERSION}-cpu-x86_64.lock"
