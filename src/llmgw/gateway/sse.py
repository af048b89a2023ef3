"""The little that the gateway understands of a server-sent event stream. Nothing is re-encoded.

Events end with a blank line, and lines with LF, CRLF or CR. Pieces are passed on up to the last whole event that they
hold: no client can use a part of an event, and an error event can only be read if it does not follow one.
"""

from __future__ import annotations

import re

from llmgw.gateway.errors import error_body, normalised

HELD_LIMIT = 64 * 1024
"""Bytes of one event held at most; a larger event is passed on as it comes."""

_DONE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]")
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"[^"]')
_EVENT = re.compile(rb"[^\r\n](?:.*?)(?:\r\n\r\n|\n\r?\n|\r\r|$)", re.DOTALL)


def split(data: bytes) -> tuple[bytes, bytes]:
    """``data`` as (whole events, the beginning of one that has not ended)."""
    end = max(_after(data, b"\n\n"), _after(data, b"\n\r\n"), _after(data, b"\r\r"))
    rest = data[end:]
    # A comment is a keep-alive: it must not wait for what may come minutes later.
    while rest.startswith(b":"):
        line_end = max(rest.find(b"\n"), rest.find(b"\r") if b"\n" not in rest else -1)
        if line_end < 0:
            break
        end += line_end + 1
        rest = data[end:]
    return data[:end], rest


def _after(data: bytes, mark: bytes) -> int:
    """Where the last ``mark`` in ``data`` ends; 0 where there is none."""
    at = data.rfind(mark)
    return at + len(mark) if at >= 0 else 0


def says_done(data: bytes) -> bool:
    return _DONE.search(data) is not None


def says_finished(data: bytes) -> bool:
    """A chunk with a ``finish_reason``: the answer is whole even where the engine leaves ``[DONE]`` out."""
    return _FINISHED.search(data) is not None


def error_event(message: str, code: str) -> bytes:
    """An event that the official clients raise as ``APIError``. No ``[DONE]`` follows it: the answer is not whole."""
    return b"data: " + error_body(message, type="server_error", code=code) + b"\n\n"


def with_errors_normalised(events: bytes) -> tuple[bytes, bool]:
    """Whole events with errors of the older form rewritten, and whether there is an error among them."""
    failed = False
    out: list[bytes] = []
    at = 0
    for match in _EVENT.finditer(events):
        event = match[0]
        if b'"error"' not in event:
            continue
        data = b"\n".join(line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:"))
        rewritten = normalised(data)
        if rewritten is not None:
            out += (events[at : match.start()], b"data: ", rewritten, b"\n\n")
            at = match.end()
            failed = True
        elif data.lstrip().startswith(b'{"error"'):
            failed = True
    if not out:
        return events, failed
    out.append(events[at:])
    return b"".join(out), failed
