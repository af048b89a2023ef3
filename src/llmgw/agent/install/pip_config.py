"""Where this machine's packages come from: what pip goes by, told to uv, which reads none of it by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping

from llmgw.agent.fetch.pip_settings import pip_settings

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


async def environment(own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for uv: this process's own, and what pip's configuration adds to it. Raises FetchFailed."""
    settings = await pip_settings("install", own)
    kept = {name: value for name, value in own.items() if name.startswith(_KEPT) or not name.startswith(_SPOIL)}
    # pip takes the best of all indexes, and so may this: by its hash no file can be another.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **for_uv(settings, kept), **kept, "NO_COLOR": "1"}


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
