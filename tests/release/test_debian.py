"""Where Debian's packages are taken from: the machine's own sources say it."""

from __future__ import annotations

from pathlib import Path

import pytest
from deploy.release.debian import DebianRefused, mirror_of


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sources.list", "# deb http://no.test/debian\ndeb http://mirror.test/debian bookworm main\n"),
        ("sources.list", "deb [signed-by=/k.gpg] http://mirror.test/debian/ bookworm main\n"),
        ("sources.list.d/debian.sources", "Types: deb\nURIs: http://mirror.test/debian\nSuites: bookworm\n"),
    ],
)
def test_the_archive_of_the_machine(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/other.list").write_text("deb https://other.test/node_20.x nodistro main\n")
    (tmp_path / name).write_text(text)
    assert mirror_of(tmp_path) == "http://mirror.test"


def test_a_machine_that_knows_of_none(tmp_path: Path) -> None:
    with pytest.raises(DebianRefused, match="LLMGW_DEBIAN_MIRROR=URL"):
        mirror_of(tmp_path)
