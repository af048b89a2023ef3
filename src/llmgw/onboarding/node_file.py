"""The agent's file of a node that is onboarded: what can't be found out on the machine, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmgw.config import parse_agent

CONFIG = Path("/etc/llmgw/agent.yaml")
WRITER = "llmgw-onboard-node"
DEFAULT_HCAS = ("mlx5_0", "mlx5_1")
_FABRIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class BadFabric(ValueError):
    """``--fabric`` can't be meant so; the message says why."""


@dataclass(frozen=True, slots=True)
class FabricOption:
    """``NAME[:hca,hca]``. Without adapters: the two that such machines usually have."""

    name: str
    hcas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the operator said of the machine. Each is one to be kept true by hand: what is left out is found out."""

    fabrics: Sequence[FabricOption] = ()
    mgmt_addr: str | None = None
    mgmt_interface: str | None = None
    llamacpp_bin: str | None = None
    vllm_bin: str | None = None
    sglang_python: str | None = None
    nvidia_smi: str | None = None
    ib_root: str | None = None


def parse_fabrics(options: Sequence[str]) -> tuple[FabricOption, ...]:
    """Raises BadFabric."""
    found = tuple(_fabric(option) for option in options)
    names = [fabric.name for fabric in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadFabric(f"--fabric {twice} is given twice: name all its adapters at once, `{twice}:mlx5_0,mlx5_1`")
    bare = [fabric.name for fabric in found if not fabric.hcas]
    if len(bare) > 1:
        raise BadFabric(
            f"--fabric {' and --fabric '.join(bare)} would take the same adapters ({', '.join(DEFAULT_HCAS)}): say "
            f"which are whose, such as `--fabric {bare[0]}:mlx5_0 --fabric {bare[1]}:mlx5_1`"
        )
    owners: dict[str, str] = {}
    for fabric in found:
        for hca in fabric.hcas or DEFAULT_HCAS:
            if hca in owners:
                raise BadFabric(f"adapter {hca} is under two fabrics, {owners[hca]} and {fabric.name}: it is on one")
            owners[hca] = fabric.name
    return found


def _fabric(option: str) -> FabricOption:
    name, colon, rest = option.partition(":")
    hcas = tuple(part.strip() for part in rest.split(",")) if colon else ()
    if not _FABRIC.fullmatch(name) or (colon and not all(hcas)):
        raise BadFabric(f"--fabric {option!r} is not NAME or NAME:ADAPTER,ADAPTER, such as ib-a:mlx5_0,mlx5_1")
    if len(set(hcas)) < len(hcas):
        raise BadFabric(f"--fabric {option!r} names an adapter twice")
    return FabricOption(name, hcas)


def node_file(node: str, servers: Sequence[str], overrides: Overrides, *, says_id: bool) -> str:
    """The text of ``agent.yaml``. ``says_id``: the machine's host name is another. Raises ConfigError.

    JSON's strings are YAML's, too.
    """
    lines = [
        f"# The agent of node {node}. Written by {WRITER}, which writes it anew each time it is run for this node.",
        "# What is not said here is found out on the machine.",
        f"server: {_list(servers)}",
        'tls: {ca: "/etc/llmgw/ca.pem", cert: "/etc/llmgw/agent.pem", key: "/etc/llmgw/agent-key.pem"}',
    ]
    if says_id:
        lines.append(f"node_id: {json.dumps(node)}")
    if overrides.mgmt_addr:
        lines.append(f"mgmt_addr: {json.dumps(overrides.mgmt_addr)}")
    if overrides.mgmt_interface:
        lines.append(f"mgmt_interface: {json.dumps(overrides.mgmt_interface)}")
    if overrides.fabrics:
        lines.append("fabrics:")
        lines += [
            f"  - {{name: {json.dumps(fabric.name)}, hcas: {_list(fabric.hcas or DEFAULT_HCAS)}}}"
            for fabric in overrides.fabrics
        ]
    lines += _section("discovery", {"nvidia_smi": overrides.nvidia_smi, "ib_root": overrides.ib_root})
    lines += _section(
        "engines",
        {
            "llamacpp": {"bin": overrides.llamacpp_bin},
            "vllm": {"bin": overrides.vllm_bin},
            "sglang": {"python": overrides.sglang_python},
        },
    )
    text = "\n".join(lines) + "\n"
    parse_agent(text, str(CONFIG))
    return text


def _section(name: str, values: dict[str, str | None] | dict[str, dict[str, str | None]]) -> list[str]:
    said = []
    for key, value in values.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{inner}: {json.dumps(text)}" for inner, text in value.items() if text)
            said += [f"  {key}: {{{inner}}}"] if inner else []
        elif value:
            said.append(f"  {key}: {json.dumps(value)}")
    return [f"{name}:", *said] if said else []


def _list(words: Sequence[str]) -> str:
    return json.dumps(list(words))
