"""What must not be forgotten: one Store in domain verbs, with SQLite and memory behind it."""

from __future__ import annotations

from llmgw.store.opening import open_store, state_dir

__all__ = ["open_store", "state_dir"]
