import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deploy.release import elf

PYTHON = Path(sys.executable).resolve()


def test_a_program_says_what_it_needs() -> None:
    found = elf.read(PYTHON.read_bytes())
    assert "libc.so.6" in found.needed
    assert found.glibc >= (2, 2)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="compares with readelf")
def test_it_agrees_with_readelf() -> None:
    said = subprocess.run(["readelf", "-dVW", PYTHON], capture_output=True, text=True, check=True).stdout
    found = elf.read(PYTHON.read_bytes())
    needed = [line.split("[")[1].rstrip("]") for line in said.splitlines() if "(NEEDED)" in line]
    assert list(found.needed) == needed
    assert found.versions == {
        line.split("Name: ")[1].split()[0] for line in said.splitlines() if "Name: " in line and "Flags:" in line
    }


@pytest.mark.parametrize("cut", [0, 3, 20, 63, 64, 5000])
def test_what_is_damaged_is_said(cut: int) -> None:
    with pytest.raises(elf.BadElf):
        elf.read(PYTHON.read_bytes()[:cut])


def test_versions_are_compared_as_numbers() -> None:
    found = elf.Elf("amd64", (), frozenset({"GLIBC_2.4", "GLIBC_2.34", "GLIBC_2.2.5", "GLIBCXX_3.4.30"}), "")
    assert found.glibc == (2, 34)
