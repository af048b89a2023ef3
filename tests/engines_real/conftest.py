from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.net.lab import NetLab
from tests.engines_real import patches
from tests.engines_real.cluster import RealLab
from tests.engines_real.figures import Figures

ASKED_FOR = "LLMGW_REAL_ENGINES"

collect_ignore_glob = [] if os.environ.get(ASKED_FOR) else ["test_*.py"]


@pytest.fixture(scope="session")
def figures() -> Iterator[Figures]:
    """What was measured, printed at the end."""
    found = Figures()
    yield found
    print(f"\n{found}")


@pytest.fixture(scope="session")
def engines_dir() -> Iterator[Path]:
    """Where all agents of this run install. ``LLMGW_REAL_ENGINES=FOLDER`` keeps it, and takes what is there already."""
    named = os.environ[ASKED_FOR]
    folder = Path(named) if named.startswith("/") else Path(tempfile.mkdtemp(prefix="llmgw-real-", dir="/var/tmp"))
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    yield folder
    if str(folder) != named:
        shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheels that no index has, where agents find them: beside those that this machine's pip finds already."""
    folder = tmp_path_factory.mktemp("wheels")
    patches.write(folder)
    before = os.environ.get("PIP_FIND_LINKS", "")
    os.environ["PIP_FIND_LINKS"] = f"{before} {folder}".strip()
    yield folder
    os.environ["PIP_FIND_LINKS"] = before


@pytest.fixture
def build(engines_dir: Path) -> Iterator[Callable[[str, str], RealLab]]:
    """Builds a cluster on loopback whose nodes install into ``engines_dir``: of models and engines, as in the file."""
    labs: list[RealLab] = []

    def make(models: str, engines: str) -> RealLab:
        labs.append(RealLab.of(models, engines, engines_dir))
        return labs[-1]

    try:
        yield make
    finally:
        for lab in labs:
            lab.close()


@pytest.fixture
def build_net(engines_dir: Path) -> Iterator[Callable[[str, str], NetLab]]:
    """The same with machines in network namespaces."""
    missing = [tool for tool in ("ip", "nft", "nsenter", "unshare") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and {', '.join(missing) or 'network namespaces'} (iproute2, nftables, util-linux)")
    labs: list[NetLab] = []

    def make(models: str, engines: str) -> NetLab:
        labs.append(NetLab.build(models))
        file = labs[-1].server_file
        file.write_text(file.read_text().replace("engines: {}\n", f"engines: {engines}\n"))
        return labs[-1]

    try:
        yield make
    finally:
        for lab in labs:
            lab.close()


_ORDER = ("test_vllm", "test_sglang", "test_two_nodes", "test_engine_check")
"""The later ones use what the earlier ones have had installed."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _ORDER.index(item.path.stem) if item.path.stem in _ORDER else -1)
