"""Where the admin API is and which token opens it: from options, LLMGW_* variables, or a context file.

A context file is JSON, 0600: ``{"server": URL, "token": TOKEN, "ca": PATH or null}``. ``llmgw up`` writes one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from llmgw.private_file import write_private


class ContextError(Exception):
    """There is no usable context; the message says how to give one."""


@dataclass(frozen=True, slots=True)
class Context:
    server: str
    token: str = field(repr=False)
    ca: str | None = None


def default_context_path(env: Mapping[str, str] = os.environ) -> Path:
    if named := env.get("LLMGW_CONTEXT"):
        return Path(named)
    base = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME", "/")) / ".config")
    return Path(base) / "llmgw" / "context.json"


def find_context(
    server: str | None = None,
    token: str | None = None,
    ca: str | None = None,
    path: Path | None = None,
    env: Mapping[str, str] = os.environ,
) -> Context:
    """Options win over LLMGW_SERVER, LLMGW_TOKEN and LLMGW_CA, those over the context file."""
    server = server or env.get("LLMGW_SERVER")
    token = token or env.get("LLMGW_TOKEN")
    ca = ca or env.get("LLMGW_CA")
    if server and token:
        return Context(server, token, ca)
    file = path or default_context_path(env)
    try:
        known = _read(file)
    except FileNotFoundError:
        missing = "the control plane's address" if not server else "the admin token"
        raise ContextError(
            f"{missing} is not known: give --server and --token, or LLMGW_SERVER and LLMGW_TOKEN, "
            f"or a context file ({file} does not exist; `llmgw up` writes one)"
        ) from None
    # A token is for one server: with another address on the command line the file's token must not go there.
    if server and server.rstrip("/") != known.server.rstrip("/") and not token:
        raise ContextError(f"no token for {server}: the context file {file} is for {known.server}; give --token")
    return Context(server or known.server, token or known.token, ca or known.ca)


def write_context(context: Context, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(path, json.dumps(asdict(context), indent=2) + "\n")


def _read(path: Path) -> Context:
    try:
        document = json.loads(path.read_text())
        server, token, ca = document["server"], document["token"], document.get("ca")
        if not isinstance(server, str) or not isinstance(token, str) or not isinstance(ca, str | None):
            raise TypeError("each of its values should be a text")
        return Context(server, token, ca)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ContextError(
            f'the context file {path} can\'t be read ({error}): it should be {{"server": ..., "token": ...}}'
        ) from error
