from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.engine import llama
from tests.cluster.net.lab import NetLab

__all__ = ["llama"]


@pytest.fixture
def build() -> Iterator[Callable[..., NetLab]]:
    """Builds clusters on networks of their own, and takes them down."""
    missing = [tool for tool in ("ip", "nft", "nsenter", "unshare") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and {', '.join(missing) or 'network namespaces'} (iproute2, nftables, util-linux)")
    labs: list[NetLab] = []

    def make(models: str, *, extra: str = "") -> NetLab:
        labs.append(NetLab.build(models, extra=extra))
        return labs[-1]

    try:
        yield make
    finally:
        for lab in labs:
            lab.close()
