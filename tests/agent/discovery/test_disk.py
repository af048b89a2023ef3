from __future__ import annotations

import os
from pathlib import Path

from llmgw.agent.discovery import read_vitals
from llmgw.agent.discovery.disk import read_disk


def test_the_file_system_of_the_weights(tmp_path: Path) -> None:
    disk = read_disk(tmp_path)
    found = os.statvfs(tmp_path)
    assert disk.total_bytes == found.f_blocks * found.f_frsize
    assert 0 < disk.free_bytes <= disk.total_bytes
    assert disk.problem is None


def test_a_folder_that_is_not_there_yet_counts_where_it_would_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "to/be/made", tmp_path / "file/below"):
        assert read_disk(path).total_bytes == read_disk(tmp_path).total_bytes
        assert read_disk(path).problem is None


def test_a_folder_that_can_not_be_read_has_no_room_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    disk = read_disk(tmp_path / "loop")
    assert disk.free_bytes == 0
    assert disk.problem == (
        f"weights_dir {tmp_path / 'loop'} can't be read (Too many levels of symbolic links): it counts as full"
    )


def test_vitals_are_never_zero(tmp_path: Path) -> None:
    vitals = read_vitals(tmp_path)
    assert 0 < vitals.memory_available_bytes <= vitals.memory_bytes
    assert 0 < vitals.disk_free_bytes <= vitals.disk_bytes
    assert vitals.load_1m >= 0
