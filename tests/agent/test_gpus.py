"""Before an engine is started the memory of its GPUs is seen to be free: a script stands in for the driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.agent.gpus import GpuMemory
from llmgw.cluster.model import DesiredShard, Placement, ShardState
from tests.agent.node import Node, clear, opened, sim

from .discovery.machines import write_script

FIRST, SECOND = "GPU-11111111-aaaa", "GPU-22222222-bbbb"
MIB_IN_ALL = 81559


class Driver:
    """What nvidia-smi says, until the test has it say something else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked = folder / "asked"
        self.program = write_script(
            folder / "nvidia-smi",
            f'echo "$*" >> {self.asked}\n'
            f'case "$*" in *--query-gpu=uuid,memory.used,memory.total*) cat {folder}/memory;; '
            f"*--query-compute-apps=gpu_uuid,pid,process_name*) cat {folder}/holders;; esac",
        )
        self.says({}, "")

    def says(self, used_mib: dict[str, int | str], holders: str = "") -> None:
        rows = {FIRST: 4, SECOND: 4, **used_mib}
        whole = self.folder / "memory.new"
        whole.write_text("".join(f"{uuid}, {used}, {MIB_IN_ALL}\n" for uuid, used in rows.items()))
        (self.folder / "holders").write_text(holders)
        whole.replace(self.folder / "memory")

    def memory(self, **options: float) -> GpuMemory:
        return GpuMemory(self.program, **{"ask_every_s": 0.02, **options})


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    folder = tmp_path / "driver"
    folder.mkdir()
    return Driver(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    clear(tmp_path)


def on_gpus(shard: DesiredShard, *numbers: int) -> DesiredShard:
    uuids = tuple({0: FIRST, 3: SECOND}[number] for number in numbers)
    return replace(shard, placement=replace(shard.placement, gpus=numbers, gpu_uuids=uuids))


def placed(*uuids: str) -> Placement:
    return Placement(node="n1", gpus=tuple(range(len(uuids))), gpu_uuids=uuids)


async def says(node: Node, words: str) -> None:
    await node.until(lambda: any(words in shard.why for shard in node.converge.shards()), words)


async def test_the_next_generation_waits_until_the_driver_has_given_the_memory_back(
    folder: Path, driver: Driver
) -> None:
    async with opened(folder, gpu_memory=driver.memory(wait_s=60)) as node:
        node.want(on_gpus(sim(1), 0, 3))
        await node.one(ShardState.READY, 1)
        driver.says({SECOND: 70000}, f"{SECOND}, 4242, /usr/bin/python3.11\n")
        node.want(on_gpus(sim(2), 0, 3))
        await says(
            node,
            "waiting for its GPUs to become free: GPU 3 has 68.4 of 79.6 GiB in use, by pid 4242 (python3.11)",
        )
        assert not node.supervisor.running()
        driver.says({})
        await node.one(ShardState.READY, 2)


async def test_what_stays_in_use_is_refused_in_words(folder: Path, driver: Driver) -> None:
    driver.says({FIRST: 8157, SECOND: 40000})
    async with opened(folder, gpu_memory=driver.memory(wait_s=0.1)) as node:
        node.want(on_gpus(sim(1), 0, 3))
        failed = await node.one(ShardState.FAILED)
        assert failed.why == (
            "GPU 0 has 8.0 of 79.6 GiB in use; GPU 3 has 39.1 of 79.6 GiB in use, after a wait of 0 s: "
            "end what holds it (see nvidia-smi)"
        )
        assert not failed.port_taken
        assert not node.supervisor.running()


async def test_a_gpu_of_others_holds_nobody_up(folder: Path, driver: Driver) -> None:
    driver.says({SECOND: 81000})
    async with opened(folder, gpu_memory=driver.memory(wait_s=0.1)) as node:
        node.want(on_gpus(sim(1), 0))
        await node.one(ShardState.READY)


async def test_who_needs_no_gpu_asks_no_driver(folder: Path, driver: Driver) -> None:
    async with opened(folder, gpu_memory=driver.memory()) as node:
        node.want(sim(1))
        await node.one(ShardState.READY)
    assert not driver.asked.exists()


async def test_a_tenth_of_it_in_use_is_free_still(driver: Driver) -> None:
    driver.says({FIRST: MIB_IN_ALL // 10})
    assert await driver.memory().in_use(placed(FIRST)) == ""
    driver.says({FIRST: MIB_IN_ALL // 10 + 1})
    assert await driver.memory().in_use(placed(FIRST)) == "GPU 0 has 8.0 of 79.6 GiB in use"


@pytest.mark.parametrize(
    ("said", "holders", "words"),
    [
        ("[N/A]", "", ""),
        ("", "", ""),
        (70000, "", "GPU 0 has 68.4 of 79.6 GiB in use"),
        (70000, "No running processes found\n", "GPU 0 has 68.4 of 79.6 GiB in use"),
        (70000, f"{FIRST}, 7, [Not Found]\n", "GPU 0 has 68.4 of 79.6 GiB in use, by pid 7"),
        (70000, f"{FIRST}, 7, /a/b, c d\n{FIRST}, 8, x\n{SECOND}, 9, y\n", "by pid 7 (b, c d), pid 8 (x)"),
    ],
)
async def test_what_the_driver_says(driver: Driver, said: int | str, holders: str, words: str) -> None:
    driver.says({FIRST: said}, holders)
    found = await driver.memory().in_use(placed(FIRST))
    assert found.endswith(words)
    assert bool(found) is bool(words)


@pytest.mark.parametrize(
    "script",
    [
        "echo 'Failed to initialize NVML: Unknown Error'; exit 255",
        f"echo '0, {FIRST}, NVIDIA H100 80GB HBM3, 81559'",
        "sleep 600",
        "exec /nowhere",
    ],
    ids=["an error", "a stand-in's devices", "nothing for ever", "no program"],
)
async def test_where_nothing_is_known_nothing_is_held_against_a_gpu(tmp_path: Path, script: str) -> None:
    program = write_script(tmp_path / "nvidia-smi", script)
    assert await GpuMemory(program, limit_s=0.3).in_use(placed(FIRST)) == ""


async def test_no_nvidia_smi_and_parts_of_a_gpu(tmp_path: Path, driver: Driver) -> None:
    assert await GpuMemory(str(tmp_path / "nothing")).in_use(placed(FIRST)) == ""
    assert await driver.memory().in_use(placed("MIG-33333333-cccc")) == ""
    assert not driver.asked.exists(), "it takes no part's name for an id"
