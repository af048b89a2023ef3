"""What a lock must be, which one a machine takes, and that those which are shipped are such."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import Cpu, Gpu, Inventory
from llmgw.engines.python_locks import FIRST_LINE, BadLock, NoLock, choose, misfit, read_lock

FOLDER = Path(__file__).parents[2] / "deploy" / "engines"
SHIPPED = {path.name: read_lock(path.read_text()) for path in sorted(FOLDER.glob("*.lock"))}
HASH = "0" * 64
HEAD = f"""{FIRST_LINE}
# engine: vllm
# version: 0.32.0
# build: cuda
# architecture: x86_64
# python: 3.11
# glibc: 2.34
# driver: 580
# unpacked-bytes: 9000
"""
CPU_NODE = Inventory(
    hostname="n",
    os="Debian",
    kernel="6",
    libc="glibc 2.36",
    cpu=Cpu(model="some", architecture="x86_64", cores=2),
    memory_bytes=1,
    mgmt_addr="10.0.0.1",
)
GPU_NODE = replace(CPU_NODE, driver="580.65.06", gpus=(Gpu(index=0, uuid="GPU-1", name="H100", memory_bytes=1),))


def test_one_is_read_whole() -> None:
    first = f"vllm==0.32.0 \\\n    --hash=sha256:{HASH} \\\n    --hash=sha256:{HASH}\n    # via nobody\n"
    text = f"{HEAD}{first}a.b_c==1\\\n --hash=sha256:{HASH}"
    lock = read_lock(text)
    assert lock.packages == (("vllm", "0.32.0"), ("a.b_c", "1"))
    assert (lock.glibc, lock.driver, lock.unpacked_bytes) == ((2, 34), 580, 9000)
    assert lock.folder == f"0.32.0-cuda-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "its first line is ''"),
        ("vllm==0.32.0\n", "its first line is 'vllm==0.32.0'"),
        (HEAD, "it names no package"),
        (HEAD.replace("# engine: vllm\n", ""), "it does not say its engine"),
        (HEAD.replace("vllm", "tgi"), "its engine is 'tgi'"),
        (HEAD.replace("cuda", "rocm"), "its build is 'rocm'"),
        (HEAD.replace("# driver: 580\n", ""), "it does not say its driver"),
        (HEAD.replace("0.32.0", "../../etc"), "its version is '../../etc'"),
        (f"{HEAD}vllm==0.32.0\n", "line 10: vllm==0.32.0 needs its hashes"),
        (f"{HEAD}vllm==0.32.0 --hash=sha256:{HASH}0\n", "needs its hashes"),
        (f"{HEAD}vllm==0.32.0 --hash=md5:{HASH}\n", "needs its hashes"),
        (f"{HEAD}vllm>=0.32.0 --hash=sha256:{HASH}\n", "'vllm>=0.32.0' is not NAME==VERSION"),
        (f"{HEAD}vllm @ https://a/b.whl --hash=sha256:{HASH}\n", "line 10: 'vllm' is not NAME==VERSION"),
        (f"{HEAD}./vllm.whl --hash=sha256:{HASH}\n", "is not NAME==VERSION"),
        (f"{HEAD}--index-url https://a.example\n", "line 10: --index-url is an option"),
        (f"{HEAD}-r other.txt\n", "-r is an option"),
        (f"{HEAD}vllm==0.32.0 --hash=sha256:{HASH} --config-settings a=b\n", "needs its hashes, and nothing else"),
        (f"{HEAD}vllm==0.32.0 \\\n", "line 10: it ends in the middle of a requirement"),
    ],
)
def test_anything_else_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(BadLock) as refusal:
        read_lock(text)
    assert words in str(refusal.value)


@given(st.integers(0, 600))
def test_one_that_was_cut_is_refused_or_names_less(at: int) -> None:
    whole = f"{HEAD}vllm==0.32.0 \\\n    --hash=sha256:{HASH}\nother==1.0 --hash=sha256:{HASH}\n"
    try:
        lock = read_lock(whole[:at])
    except BadLock:
        return
    assert lock.packages in ((("vllm", "0.32.0"),), (("vllm", "0.32.0"), ("other", "1.0")))


def test_a_node_takes_the_build_for_its_driver() -> None:
    spec = EngineSpec(name="vllm", version="0.32.0", source="index")
    assert choose(SHIPPED.values(), spec, CPU_NODE).build == "cpu"
    assert choose(SHIPPED.values(), spec, GPU_NODE).build == "cuda"
    assert choose(SHIPPED.values(), replace(spec, build="cpu"), GPU_NODE).build == "cpu"
    assert choose(SHIPPED.values(), replace(spec, build="cpu"), GPU_NODE, "cuda").build == "cuda"


@pytest.mark.parametrize(
    ("spec", "node", "words"),
    [
        ({"version": "0.1.0"}, CPU_NODE, "has no lock of vllm 0.1.0: it has 0.31.0 and 0.32.0 and 0.33.0"),
        (
            {"version": "0.33.0"},
            CPU_NODE,
            "for cpu on x86_64 (this node has no NVIDIA GPU that can be used): it has cuda on x86_64",
        ),
        ({"version": "0.31.0"}, GPU_NODE, "for cuda on x86_64 (this node has NVIDIA GPUs): it has cpu on x86_64"),
        ({}, replace(GPU_NODE, driver="570.1"), "needs NVIDIA driver 580 or newer, and this machine has 570.1"),
        ({"version": "0.33.0", "build": "cpu"}, GPU_NODE, "for cpu on x86_64 (the cluster's file says so)"),
        ({"build": "cuda"}, CPU_NODE, "needs an NVIDIA driver, and none is loaded"),
        ({}, replace(CPU_NODE, libc="glibc 2.31"), "needs glibc 2.34 or newer, and this machine has glibc 2.31"),
        ({}, replace(CPU_NODE, libc="musl 1.2"), "needs glibc 2.34 or newer, and this machine has musl 1.2"),
        ({}, replace(CPU_NODE, cpu=replace(CPU_NODE.cpu, architecture="aarch64")), "for cpu on aarch64"),
    ],
)
def test_where_none_is_for_it_the_words_say_which_there_are(spec: dict[str, str], node: Inventory, words: str) -> None:
    asked = EngineSpec(**{"name": "vllm", "version": "0.32.0", "source": "index", **spec})  # type: ignore[arg-type]
    with pytest.raises(NoLock) as refusal:
        choose(SHIPPED.values(), asked, node)
    assert words in str(refusal.value)


def test_a_driver_that_does_not_say_its_version_is_taken_on_trust() -> None:
    assert misfit(SHIPPED["vllm-0.32.0-cuda-x86_64.lock"], replace(GPU_NODE, driver="unknown")) is None


@pytest.mark.parametrize("name", SHIPPED)
def test_those_that_are_shipped_are_named_after_what_they_say(name: str) -> None:
    lock = SHIPPED[name]
    assert name == f"{lock.engine}-{lock.version}-{lock.build}-{lock.architecture}.lock"
    packages = dict(lock.packages)
    wanted = lock.version if lock.build == "cuda" else f"{lock.version}+cpu"
    assert packages[lock.engine] == wanted
    assert "torch" in packages
    assert "://" not in lock.text, "where packages come from is the node's own business"


def test_those_that_are_shipped_are_part_of_the_package() -> None:
    assert {"vllm-0.31.0-cpu-x86_64.lock", "vllm-0.32.0-cpu-x86_64.lock", "sglang-0.5.23-cuda-x86_64.lock"} <= set(
        SHIPPED
    )
    assert FOLDER.resolve() == Path(__file__).parents[2] / "src" / "llmgw" / "engines" / "locks"
