"""Missing libraries: what the loader says of them, and which package of which distribution has them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from llmgw.agent.discovery.system import OsRelease, parse_os_release
from llmgw.agent.install.faults import MissingLibrary, NotProved
from llmgw.agent.install.libraries import lacking, read_ldd, require_libraries, why_not_started
from llmgw.agent.install.providers import System

SERVER, BACKEND = Path("/opt/llama/llama-server"), Path("/opt/llama/libggml-cuda.so")

TWO_FILES = f"""{SERVER}:
\tlinux-vdso.so.1 (0x00007f3ba361a000)
\tlibllama.so.0 => /opt/llama/libllama.so.0 (0x00007f3ba3580000)
\tlibgomp.so.1 => not found
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f3ba2e00000)
\t/lib64/ld-linux-x86-64.so.2 (0x00007f3ba361c000)
{BACKEND}:
\tlibcuda.so.1 => not found
\tlibgomp.so.1 => not found
"""

RELEASES = {
    "Debian 12": 'ID=debian\nVERSION_ID="12"\n',
    "Debian 13": 'ID=debian\nVERSION_ID="13"\n',
    "Debian sid": 'PRETTY_NAME="Debian GNU/Linux forky/sid"\nID=debian\n',
    "Ubuntu 22.04": 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="22.04"\n',
    "Ubuntu 24.04": 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n',
    "Fedora 43": "ID=fedora\nVERSION_ID=43\n",
    "Rocky 9": 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.6"\n',
    "RHEL 10": 'ID="rhel"\nID_LIKE="centos fedora"\nVERSION_ID="10.1"\n',
}


def programs(folder: Path, **scripts: str) -> str:
    """A PATH with these scripts alone, and a shell for them."""
    for name, script in scripts.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    return str(folder)


def system(release: str, folder: Path, **scripts: str) -> System:
    return System(parse_os_release(RELEASES[release]), programs(folder, **scripts))


def test_what_ldd_says_of_several_files() -> None:
    linkage = read_ldd(TWO_FILES, (SERVER, BACKEND))
    assert dict(linkage.missing) == {"libgomp.so.1": [SERVER, BACKEND], "libcuda.so.1": [BACKEND]}
    assert linkage.found == {Path("/opt/llama/libllama.so.0"), Path("/lib/x86_64-linux-gnu/libc.so.6")}
    assert linkage.too_old is None


def test_what_ldd_says_of_one_file() -> None:
    assert dict(read_ldd("\tlibgomp.so.1 => not found\n", (SERVER,)).missing) == {"libgomp.so.1": [SERVER]}


def test_symbols_that_this_system_is_too_old_for() -> None:
    said = f"{SERVER}: /lib/libc.so.6: version `GLIBC_2.39' not found (required by {SERVER})\n"
    assert read_ldd(said, (SERVER,)).too_old == "GLIBC_2.39"


@pytest.mark.parametrize(
    ("release", "openssl", "gomp", "gcc", "rdma"),
    [
        ("Debian 12", "libssl3", "libgomp1", "libgcc-s1", "librdmacm1"),
        ("Debian 13", "libssl3t64", "libgomp1", "libgcc-s1", "librdmacm1t64"),
        ("Debian sid", "libssl3t64", "libgomp1", "libgcc-s1", "librdmacm1t64"),
        ("Ubuntu 22.04", "libssl3", "libgomp1", "libgcc-s1", "librdmacm1"),
        ("Ubuntu 24.04", "libssl3t64", "libgomp1", "libgcc-s1", "librdmacm1t64"),
        ("Fedora 43", "openssl-libs", "libgomp", "libgcc", "librdmacm"),
        ("Rocky 9", "openssl-libs", "libgomp", "libgcc", "librdmacm"),
        ("RHEL 10", "openssl-libs", "libgomp", "libgcc", "librdmacm"),
    ],
)
def test_the_package_on_each_distribution(
    release: str, openssl: str, gomp: str, gcc: str, rdma: str, tmp_path: Path
) -> None:
    here = system(release, tmp_path, apt_get="", dnf="")
    libraries = ("libssl.so.3", "libcrypto.so.3", "libgomp.so.1", "libgcc_s.so.1", "librdmacm.so.1")
    assert [here.known(library) for library in libraries] == [openssl, openssl, gomp, gcc, rdma]


async def test_a_relative_of_ubuntu_is_asked_which_of_both_names_it_has(tmp_path: Path) -> None:
    apt_cache = '[ "$3" = libssl3t64 ] && echo "Package: libssl3t64"'
    mint = System(
        OsRelease(id="linuxmint", id_like=("ubuntu", "debian"), version_id="22"),
        programs(tmp_path, apt_get="", apt_cache=apt_cache),
    )
    assert mint.known("libssl.so.3") is None
    assert (await mint.provider("libssl.so.3")).package == "libssl3t64"


@pytest.mark.parametrize(
    ("library", "package"),
    [("libjansson.so.4", "libjansson4"), ("libX11.so.6", "libx11-6"), ("libicudata.so.72", "libicudata72")],
)
async def test_apt_is_asked_for_what_is_named_after_the_library(library: str, package: str, tmp_path: Path) -> None:
    here = system("Debian 12", tmp_path, apt_get="", apt_cache=f'[ "$3" = {package} ] && echo "Package: {package}"')
    assert (await here.provider(library)).package == package


async def test_apt_file_knows_better_where_it_is(tmp_path: Path) -> None:
    found = "echo 'other: /usr/lib/libicudata.so.72.1'; echo 'libicu72: /usr/lib/x86_64-linux-gnu/libicudata.so.72'"
    here = system("Debian 12", tmp_path, apt_get="", apt_cache="exit 1", apt_file=found)
    assert (await here.provider("libicudata.so.72")).package == "libicu72"


async def test_nothing_known_says_how_to_search(tmp_path: Path) -> None:
    provider = await system("Debian 12", tmp_path, apt_get="", apt_cache="exit 100").provider("libodd.so.1")
    assert provider.package is None
    assert "apt-file search libodd.so.1" in provider.advice


async def test_dnf_is_asked_what_provides_the_library(tmp_path: Path) -> None:
    said = "echo 'jansson-2.14.1-2.fc43.x86_64 : C library for encoding, decoding and manipulating JSON data'"
    here = system("Fedora 43", tmp_path, dnf=f'[ "$3" = "libjansson.so.4()(64bit)" ] && {said}')
    assert (await here.provider("libjansson.so.4")).package == "jansson"
    here = system("Fedora 43", tmp_path, dnf="echo 'Error: No matches found'; exit 1")
    assert "dnf provides" in (await here.provider("libodd.so.1")).advice


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("libcuda.so.1", "comes with the NVIDIA driver"),
        ("libcudart.so.12", "CUDA runtime"),
        ("libamdhip64.so.6", "ROCm"),
        ("libggml-cpu.so.0", "is a part of llama.cpp"),
        ("libssl.so.1.1", "OpenSSL 1.1"),
    ],
)
async def test_what_no_package_has(library: str, words: str, tmp_path: Path) -> None:
    provider = await system("Debian 12", tmp_path, apt_get="").provider(library)
    assert (provider.package, words in provider.advice) == (None, True), provider


async def test_the_words_name_library_package_and_command(tmp_path: Path) -> None:
    failure = await lacking(
        {"libgomp.so.1": SERVER, "libssl.so.3": SERVER}, system("Ubuntu 24.04", tmp_path, apt_get="")
    )
    assert str(failure) == (
        f"libgomp.so.1, which {SERVER} needs, can't be found: it is in the package libgomp1; "
        f"libssl.so.3, which {SERVER} needs, can't be found: it is in the package libssl3t64 "
        "(apt-get install libgomp1 libssl3t64)"
    )
    assert failure.packages == ("libgomp1", "libssl3t64")
    assert failure.missing[0] == MissingLibrary(name="libgomp.so.1", wanted_by=SERVER, package="libgomp1")


async def test_where_a_part_is_in_no_package_none_is_installed(tmp_path: Path) -> None:
    here = system("Debian 12", tmp_path, apt_get="")
    failure = await lacking({"libgomp.so.1": SERVER, "libcuda.so.1": BACKEND}, here)
    assert failure.packages == ()
    assert "NVIDIA driver" in str(failure)
    assert "libgomp1" in str(failure)


async def test_a_loader_that_complains_at_the_start(tmp_path: Path) -> None:
    said = f"{SERVER}: error while loading shared libraries: libgomp.so.1: cannot open shared object file: No such file"
    failure = await why_not_started("x", said, SERVER)
    assert failure is not None
    assert [library.name for library in failure.missing] == ["libgomp.so.1"]
    module = "ImportError: libnuma.so.1: cannot open shared object file: No such file or directory"
    failure = await why_not_started("x", module, SERVER)
    assert failure is not None
    assert [library.name for library in failure.missing] == ["libnuma.so.1"]
    assert await why_not_started("x", "segmentation fault", SERVER) is None


# -- real programs


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that needs libown.so.1, and a backend beside it that needs libcuda.so.1. Neither library is there."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("linked")

    def build(*arguments: str, text: str) -> None:
        (folder / "text.c").write_text(text)
        subprocess.run([str(compiler), "text.c", *arguments], cwd=folder, check=True, capture_output=True)

    for name in ("libown.so.1", "libcuda.so.1"):
        build("-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", name, text="int one(void) { return 1; }")
    build("-o", "program", "-Wl,--no-as-needed", "./libown.so.1", text="int main(void) { return 0; }")
    build("-shared", "-fPIC", "-Wl,--no-as-needed", "-o", "libbackend.so", "./libcuda.so.1", text="int two;")
    for name in ("libown.so.1", "libcuda.so.1"):
        (folder / name).unlink()
    return folder


async def test_the_loader_of_this_system_is_asked(linked: Path, tmp_path: Path) -> None:
    here = system("Debian 12", tmp_path, apt_get="", apt_cache="exit 100")
    with pytest.raises(NotProved, match=r"libown\.so\.1, which .*/program needs, can't be found") as caught:
        await require_libraries(linked / "program", (linked / "libbackend.so",), system=here)
    assert [library.name for library in caught.value.missing] == ["libcuda.so.1", "libown.so.1"]


async def test_without_cards_their_libraries_are_not_missed(linked: Path, tmp_path: Path) -> None:
    here = system("Debian 12", tmp_path, apt_get="", apt_cache="exit 100")
    with pytest.raises(NotProved) as caught:
        await require_libraries(linked / "program", (linked / "libbackend.so",), system=here, cards=False)
    assert [library.name for library in caught.value.missing] == ["libown.so.1"]
    found = await require_libraries(Path("/bin/sh"), (linked / "libbackend.so",), system=here, cards=False)
    assert any(path.name == "libc.so.6" for path in found)
