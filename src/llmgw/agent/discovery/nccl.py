"""NCCL's own file on a machine: it applies to every engine there, beside what llmgw tells them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from llmgw.agent.discovery.files import read_text
from llmgw.cluster.model import Fabric

_PLACE = "etc/nccl.conf"
_SETTING = re.compile(r"^\s*(NCCL_[A-Z0-9_]+)\s*=", re.MULTILINE)
_TOLD = frozenset({"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"})
"""Told to every rank over several nodes in its environment, which comes before the file."""


def warn_about_nccl(root: Path, fabrics: Sequence[Fabric]) -> tuple[str, ...]:
    """Of settings that nobody would think of when a rank hangs; none where no fabric is stated."""
    names = sorted(set(_SETTING.findall(read_text(root / _PLACE) or "")) - _TOLD)
    if not fabrics or not names:
        return ()
    return (
        f"/{_PLACE} sets {', '.join(names)} for every engine on this machine: make it the same on all nodes of a "
        "fabric, or remove it",
    )
