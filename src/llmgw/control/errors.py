"""What the admin API answers where it can't do what was asked: one shape, ``{"error": {...}}``."""

from __future__ import annotations


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
    known_words = f"known: {', '.join(sorted(known)[:20])}" if known else f"there is no {what} yet"
    return ApiError(404, f"{what}_not_found", f"no {what} is called {name[:100]!r}", known_words)
