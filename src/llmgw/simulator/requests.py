"""What clients may ask of the simulated engine: read strictly, refused in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmgw.simulator.text import count_tokens, prompt_of


class BadRequest(Exception):
    """Answered as an error object. ``status`` and ``type`` are those that llama-server would give."""

    def __init__(self, message: str, *, status: int = 400, type: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.type = type


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A chat or a completion."""

    prompt: str
    prompt_tokens: int
    max_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    chat: bool


def read_json(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadRequest("the body is no JSON object")
    return document


def read_chat(body: Mapping[str, Any]) -> Generation:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise BadRequest("Expected 'messages' to be an array")
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise BadRequest("Expected 'messages' to be an array of at least one object")
    _refuse(body, "tools", "functions")
    return _generation(body, prompt_of(messages), chat=True)


def read_completion(body: Mapping[str, Any]) -> Generation:
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise BadRequest("Expected 'prompt' to be a string")
    _refuse(body, "suffix", "echo")
    return _generation(body, prompt, chat=False)


def _generation(body: Mapping[str, Any], prompt: str, *, chat: bool) -> Generation:
    if body.get("n") not in (None, 1):
        raise BadRequest("The simulated engine gives one choice only: leave 'n' out")
    limit = _limit(body, "max_completion_tokens")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("Expected 'stream_options' to be an object")
    return Generation(
        prompt=prompt,
        prompt_tokens=count_tokens(prompt),
        max_tokens=limit if limit is not None else _limit(body, "max_tokens"),
        stop=_strings(body, "stop"),
        ignore_eos=_flag(body, "ignore_eos"),
        stream=_flag(body, "stream"),
        include_usage=_flag(options, "include_usage"),
        chat=chat,
    )


def read_inputs(body: Mapping[str, Any], key: str) -> list[str]:
    """A text or an array of texts."""
    given = body.get(key)
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given and all(isinstance(item, str) for item in given):
        return given
    raise BadRequest(f"Expected '{key}' to be a string or an array of strings")


def read_dimensions(body: Mapping[str, Any], default: int, most: int) -> int:
    given = body.get("dimensions")
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= most:
        raise BadRequest(f"Expected 'dimensions' to be a number from 1 to {most}")
    return given


def _refuse(body: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if body.get(key):
            raise BadRequest(f"The simulated engine does not know '{key}'")


def _limit(body: Mapping[str, Any], key: str) -> int | None:
    given = body.get(key)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < -1:
        raise BadRequest(f"Expected '{key}' to be a whole number")
    return None if given == -1 else given


def _flag(body: Mapping[str, Any], key: str) -> bool:
    given = body.get(key)
    if given is None or isinstance(given, bool):
        return bool(given)
    raise BadRequest(f"Expected '{key}' to be a boolean")


def _strings(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    given = body.get(key)
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list) and all(isinstance(item, str) for item in given):
        return tuple(given)
    raise BadRequest(f"Expected '{key}' to be a string or an array of strings")
