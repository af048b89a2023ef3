"""Why a program is not proved, in words; with a real llama-server where it must be one."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from llmgw.agent.fetch.child import Ended
from llmgw.agent.install.faults import NotProved
from llmgw.agent.install.prove import prove, why_ended
from llmgw.agent.install.trial import own
from llmgw.agent.supervisor.engine_user import prepare
from llmgw.engines.registry import engine

from .conftest import Installed

LLAMA = engine("llamacpp")
SERVER = Path("/opt/llama/llama-server")

HEALTHY = """
case "$1" in
--version) echo "version: 0.6.0-dev (build 11434, commit 7e4c0a9)" >&2 ;;
--help) echo "--port PORT  --device <dev1,dev2,..>" ;;
--list-devices) {devices} ;;
*) echo "no further" ; exit 1 ;;
esac
"""

# What llama-server prints with one card; without a driver that works it names none.
ONE_CARD = """
ggml_cuda_init: found 1 CUDA devices:
  Device 0: NVIDIA H200, compute capability 9.0, VMM: yes
Available devices:
  CUDA0: NVIDIA H200 (143156 MiB, 142556 MiB free)
"""
NO_CARD = """
ggml_cuda_init: failed to initialize CUDA: CUDA driver version is insufficient for CUDA runtime version
Available devices:
  (none)
"""


def played(folder: Path, devices: str, *, cuda: bool = True) -> Path:
    """A program that says what llama-server says, as far as the devices; no further."""
    program = folder / "llama-server"
    (folder / "devices").write_text(devices)
    program.write_text("#!/bin/sh\n" + HEALTHY.format(devices=f"cat {folder}/devices"))
    program.chmod(0o755)
    if cuda:
        shutil.copy(Path("/bin/true"), folder / "libggml-cuda.so")
    return program


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (Ended(-signal.SIGILL, ""), "was killed by SIGILL: this processor lacks instructions"),
        (
            Ended(1, "make_cpu_buft_list: no CPU backend found\nsrv: exiting due to model loading error\n"),
            f"no CPU backend (libggml-cpu*.so) that this processor can run lies in {SERVER.parent}",
        ),
        (Ended(None, "still at it\n"), "did not end within 20 s: still at it"),
        (Ended(1, "\nerror: invalid argument: --odd\n"), "ended with status 1: error: invalid argument: --odd"),
        (Ended(-signal.SIGSEGV, ""), "was killed by SIGSEGV"),
        (Ended(1, f"{SERVER}: /lib/libc.so.6: version `GLIBC_2.39' not found (required by x)"), "needs GLIBC_2.39"),
    ],
)
async def test_why_it_ended_in_words(ended: Ended, words: str) -> None:
    assert words in str(await why_ended("loading a tiny model", SERVER, ended, 20.0))


async def test_a_library_that_the_loader_misses_is_known_by_its_package() -> None:
    said = f"{SERVER}: error while loading shared libraries: libgomp.so.1: cannot open shared object file\n"
    failure = await why_ended("x --version", SERVER, Ended(127, said), 20.0)
    assert [library.name for library in failure.missing] == ["libgomp.so.1"]


@pytest.mark.parametrize(("devices", "gpus"), [(NO_CARD, 1), (ONE_CARD, 2)])
async def test_a_cuda_build_must_see_all_cards(devices: str, gpus: int, tmp_path: Path) -> None:
    with pytest.raises(NotProved, match=r"--list-devices names \d of the \d NVIDIA GPUs of this machine") as caught:
        await prove(LLAMA, played(tmp_path, devices), tmp_path / "proofs", gpus=gpus)
    if devices is NO_CARD:
        assert "CUDA driver version is insufficient" in str(caught.value)


@pytest.mark.parametrize(("devices", "gpus", "cuda"), [(ONE_CARD, 1, True), (NO_CARD, 1, False), (NO_CARD, 0, True)])
async def test_others_need_not(devices: str, gpus: int, cuda: bool, tmp_path: Path) -> None:
    """It comes as far as the token, which this one can't give."""
    with pytest.raises(NotProved, match=r"loading a tiny model ended with status 1: no further"):
        await prove(LLAMA, played(tmp_path, devices, cuda=cuda), tmp_path / "proofs", gpus=gpus)


async def test_parts_that_were_left_out_are_named(installed: Installed, tmp_path: Path) -> None:
    """Somebody copied the program and forgot what lies beside it."""
    shutil.copytree(Path(installed.program.argv[0]).parent, tmp_path / "bin", symlinks=True)
    for path in (tmp_path / "bin").glob("libggml-cpu*"):
        path.unlink()
    with pytest.raises(NotProved, match=r"libggml-cpu\.so.*is a part of llama\.cpp and belongs beside the program"):
        await prove(LLAMA, tmp_path / "bin/llama-server", tmp_path / "proofs")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: users and mounts")
async def test_a_real_one_answers_as_the_user_that_engines_run_as(installed: Installed, tmp_path: Path) -> None:
    """pytest's folders are closed to that user, as a home is; the view that it gets opens the way."""
    assert prepare("llmgw-engine").name == "llmgw-engine"
    own(tmp_path / "proofs", "llmgw-engine")
    proof = await prove(LLAMA, Path(installed.program.argv[0]), tmp_path / "proofs", gpus=0)
    assert proof.version == "571d0d5"
    assert list((tmp_path / "proofs").iterdir()) == []
