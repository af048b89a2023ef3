"""What the simulated engine says: a function of the prompt alone, the same on every replica and in every run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

_VOCABULARY = """
the a one this every some no another node rank replica shard model token prompt answer stream queue lease epoch
cluster gateway engine agent fabric port light river stone garden letter window winter morning harbour mountain
runs waits answers starts stops moves holds keeps finds counts reads writes opens turns and or but while where
slowly early often never again quietly soon here there
"""
_WORDS = _VOCABULARY.split()

VECTOR_LENGTH = 64


def prompt_of(messages: Sequence[Any]) -> str:
    """The text of a chat: ``role: content`` line by line. Parts that are not text count by their JSON."""
    return "\n".join(f"{message.get('role', '')}: {_content(message.get('content'))}" for message in messages)


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else json.dumps(content, sort_keys=True)
    parts = (part.get("text") if isinstance(part, dict) else None for part in content)
    return " ".join(
        part if isinstance(part, str) else json.dumps(whole, sort_keys=True)
        for part, whole in zip(parts, content, strict=True)
    )


def count_tokens(prompt: str) -> int:
    """A word is a token, and each prompt begins with one that opens it."""
    return len(prompt.split()) + 1


def tokens(prompt: str, most: int | None, stop: Sequence[str], endless: bool) -> tuple[list[str], str]:
    """The answer's tokens, and why it ended: ``stop`` or ``length``.

    ``most`` limits their number; with ``endless`` (``ignore_eos``) the answer goes on until then.
    """
    if endless and most is not None:
        wanted, reason = most, "length"
    else:
        natural = 16 + _digest(prompt)[0] % 49
        wanted, reason = (natural, "stop") if most is None or natural <= most else (most, "length")
    words = _stream(prompt)
    said = [next(words) if at == 0 else f" {next(words)}" for at in range(wanted)]
    return _cut(said, stop, reason)


def _cut(said: list[str], stop: Sequence[str], reason: str) -> tuple[list[str], str]:
    text = "".join(said)
    ends = [at for at in (text.find(word) for word in stop if word) if at >= 0]
    if not ends:
        return said, reason
    kept: list[str] = []
    room = min(ends)
    for token in said:
        if room <= 0:
            break
        kept.append(token[:room])
        room -= len(token)
    return kept, "stop"


def _stream(prompt: str) -> Iterator[str]:
    block, at = _digest(prompt), 0
    while True:
        for byte in block:
            yield _WORDS[byte % len(_WORDS)]
        at += 1
        block = _digest(f"{at}\n{prompt}")


def vector(text: str, length: int = VECTOR_LENGTH) -> list[float]:
    """A unit vector of ``length`` numbers."""
    numbers: list[float] = []
    at = 0
    while len(numbers) < length:
        block = _digest(f"vector {at}\n{text}")
        numbers += [byte / 127.5 - 1.0 for byte in block]
        at += 1
    del numbers[length:]
    norm = math.sqrt(sum(number * number for number in numbers)) or 1.0
    return [number / norm for number in numbers]


def score(query: str, document: str) -> float:
    """How alike the two are: the cosine of their vectors."""
    return sum(a * b for a, b in zip(vector(query), vector(document), strict=True))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
