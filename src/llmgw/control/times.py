"""Times as the admin API writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(at: float) -> str:
    """A wall-clock Unix time as RFC 3339 UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
