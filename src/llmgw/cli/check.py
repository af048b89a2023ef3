"""``--check``: is this file one that would be taken, and if not, everything that is wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path

from llmgw.config import ConfigError, load_agent, load_server


def check_server(path: Path | str) -> int:
    """Prints what the control plane's file says, or its faults on stderr. The exit status: 0, or 1."""
    try:
        config = load_server(path)
    except ConfigError as error:
        return _refuse(error)
    models, engines = config.catalog.models, config.catalog.engines
    profiles = sum(len(model.profiles) for model in models)
    wanted = ", ".join(f"{engine.name} {engine.version}" for engine in engines) or "none"
    words = [f"cluster {config.cluster}", _counted(len(models), "model"), _counted(profiles, "profile")]
    print(f"{path}: ok ({', '.join(words)}; engines: {wanted})")
    return 0


def check_agent(path: Path | str) -> int:
    """Prints what the agent's file says, or its faults on stderr. The exit status: 0, or 1."""
    try:
        config = load_agent(path)
    except ConfigError as error:
        return _refuse(error)
    names = ", ".join(f"{fabric.name} ({', '.join(fabric.hcas)})" for fabric in config.fabrics)
    fabrics = _counted(len(config.fabrics), "fabric") + (f": {names}" if names else "")
    own = [name for name in ("vllm", "sglang", "llamacpp") if getattr(config.engines, name) is not None]
    words = [f"node {config.node_id or 'by its host name'}", "to " + ", ".join(config.servers), fabrics]
    print(f"{path}: ok ({'; '.join(words)}; engines of its own: {', '.join(own) or 'none'})")
    return 0


def _refuse(error: ConfigError) -> int:
    print(error, file=sys.stderr)
    return 1


def _counted(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"
