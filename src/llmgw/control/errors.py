"""What the admin API answers where it can't do what was asked: one shape, ``{"error": {...}}``."""

from __future__ import annotations

from difflib import get_close_matches

NAMED = 20
"""So many of the names that there are stand in a refusal of another."""


class ApiError(Exception):
    """``message`` says what happened, ``hint`` what to do next; ``code`` is stable, for scripts."""

    def __init__(self, status: int, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.hint = hint

    @property
    def type(self) -> str:
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, dict[str, str]]:
        return {"error": {"message": self.message, "type": self.type, "code": self.code, "hint": self.hint}}


def not_found(what: str, name: str, known: list[str]) -> ApiError:
    return ApiError(404, f"{what}_not_found", f"no {what} is called {name[:100]!r}", _known(what, name[:100], known))


def _known(what: str, name: str, known: list[str]) -> str:
    if not known:
        return f"there is no {what} yet"
    named = sorted(known)[:NAMED]
    if len(known) == len(named):
        return f"known: {', '.join(named)}"
    close = get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}known: {', '.join(named)} and {len(known) - len(named)} more"
