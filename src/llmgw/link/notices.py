"""Says a thing once: a failure that comes back every second is one line, and later how often it came."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

MAX_KEYS = 4096


@dataclass(slots=True)
class _Seen:
    what: Hashable
    said_at_s: float
    unsaid: int = 0


class Notices:
    """``window_s``: how long a key stays quiet after it was said."""

    def __init__(self, window_s: float = 600.0) -> None:
        self._window_s = window_s
        self._seen: dict[Hashable, _Seen] = {}

    def due(self, key: Hashable, what: Hashable, now_s: float) -> int | None:
        """How often the same came unsaid since it was last said, if it is to be said now; None: keep quiet.

        ``what`` is the news about ``key``: where it differs from the last time, it is said at once.
        """
        seen = self._seen.get(key)
        if seen is not None and seen.what == what and now_s - seen.said_at_s < self._window_s:
            seen.unsaid += 1
            return None
        if len(self._seen) >= MAX_KEYS:
            self._seen.pop(next(iter(self._seen)))
        self._seen.pop(key, None)
        self._seen[key] = _Seen(what, now_s)
        return seen.unsaid if seen else 0

    def forget(self, key: Hashable) -> None:
        """What the key was about is over: its next time is news again."""
        self._seen.pop(key, None)

    def forget_all(self) -> None:
        self._seen.clear()
