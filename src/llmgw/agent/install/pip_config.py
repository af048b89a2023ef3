"""Where this machine's packages come from: what pip goes by, told to uv, which reads none of it by itself."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Mapping

from llmgw.agent.fetch.child import run

_LINE = re.compile(r"(?P<section>[\w:.-]+?)\.(?P<key>[a-z-]+)=(?P<value>.+)")
_SECTIONS = ("global", "install", ":env:")
"""Those that hold for an installation; the later one wins."""

_NAMES = {
    "index-url": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", "UV_INDEX"),
    "find-links": ("UV_FIND_LINKS",),
    "no-index": ("UV_NO_INDEX",),
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "proxy": ("ALL_PROXY",),
    "timeout": ("UV_HTTP_TIMEOUT",),
}
"""To uv's name, and others that say the same: where one of them is set, it stays as it is."""

_LISTS = {"extra-index-url": " ", "find-links": ",", "trusted-host": " "}
"""What pip takes with blanks between, and what stands between them for uv."""

_KEPT = (
    *("UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX", "UV_OFFLINE"),
    *("UV_INSECURE_HOST", "UV_HTTP_", "UV_REQUEST_TIMEOUT", "UV_KEYRING_PROVIDER", "UV_CONCURRENT_", "UV_CONFIG_FILE"),
    *("UV_NATIVE_TLS", "UV_SYSTEM_CERTS"),
)
"""How the names of uv's variables begin that say where packages come from. Others would make it do something else."""

_SPOIL = ("UV_", "PYTHON", "VIRTUAL_ENV", "CONDA_", "RUST_LOG", "FORCE_COLOR")

_LIMIT_S = 60.0


async def environment(own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for uv: this process's own, and what pip's configuration adds to it."""
    asked = await run(
        [sys.executable, "-I", "-m", "pip", "config", "list"],
        env={**own, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        limit_s=_LIMIT_S,
    )
    settings = read_settings(asked.output.splitlines()) if asked.status == 0 else {}
    kept = {name: value for name, value in own.items() if name.startswith(_KEPT) or not name.startswith(_SPOIL)}
    # pip takes the best of all indexes, and so may this: by its hash no file can be another.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **for_uv(settings, kept), **kept, "NO_COLOR": "1"}


def read_settings(lines: Iterable[str]) -> dict[str, str]:
    """What holds for an installation, of what ``pip config list`` prints."""
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in lines:
        match = _LINE.fullmatch(line.strip())
        if match is None or match["section"] not in found:
            continue
        try:
            value = ast.literal_eval(match["value"])
        except (SyntaxError, ValueError):
            continue
        found[match["section"]][match["key"]] = str(value)
    return {key: value for section in _SECTIONS for key, value in found[section].items()}


def for_uv(settings: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """pip's settings as uv's variables, but for what ``own`` says already."""
    variables: dict[str, str] = {}
    for key, names in _NAMES.items():
        value = settings.get(key, "").split()
        if not value or any(name in own for name in names):
            continue
        name = "SSL_CERT_DIR" if key == "cert" and os.path.isdir(value[0]) else names[0]
        variables[name] = _LISTS.get(key, " ").join(value)
    if variables.get("UV_NO_INDEX", "1").lower() in ("0", "no", "false", "off"):
        del variables["UV_NO_INDEX"]
    return variables
