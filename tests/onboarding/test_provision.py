"""A machine on a Proxmox, by `qm` and by the API: what is asked of it, what goes wrong, and what is left then."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, unquote

import pytest
import yaml

from llmgw.onboarding.course import CourseFailed, run_course
from llmgw.onboarding.image import Image
from llmgw.onboarding.making import mark_of
from llmgw.onboarding.proxmox import Proxmox
from tests.onboarding.answering_machine import needs_sshd, serve
from tests.onboarding.provisioning import KEY, Heard, Site, over_api, site
from tests.onboarding.proxmox.host import GIB

Reached = Callable[[], AbstractAsyncContextManager[Proxmox]]


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = site(tmp_path, monkeypatch)
    yield made
    made.machines.end()


@pytest.fixture(params=["qm", "api"])
def reached(request: pytest.FixtureRequest, at: Site) -> Reached:
    @asynccontextmanager
    async def by_qm() -> AsyncIterator[Proxmox]:
        yield at.qm()

    return by_qm if request.param == "qm" else lambda: over_api(at)


async def refused(at: Site, reached: Reached, **changes: object) -> CourseFailed:
    async with reached() as proxmox:
        made = at.provisioning(proxmox, **changes)  # type: ignore[arg-type]
        with pytest.raises(CourseFailed) as failure:
            await at.run(made, proxmox)
    return failure.value


def nothing_left(at: Site) -> bool:
    return at.host.vms() == {} and at.host.disks() == {} and at.host.isos() == []


@needs_sshd
async def test_a_machine_is_made_and_answers_with_the_key_that_was_made_for_it(at: Site, reached: Reached) -> None:
    async with reached() as proxmox:
        made = at.provisioning(proxmox, vlan=7, cores=8, memory_mib=32768, disk_gib=60)
        await at.run(made, proxmox)
    config = at.host.vms()[144]
    assert at.host.is_running(144)
    mac = config["net0"].removeprefix("virtio=").partition(",")[0]
    assert config == {
        "name": "llmgw-node04",
        "description": "llmgw-node04: a node of llmgw",
        "tags": "llmgw",
        "ostype": "l26",
        "cpu": "host",
        "cores": "8",
        "memory": "32768",
        "balloon": "0",
        "onboot": "1",
        "scsihw": "virtio-scsi-pci",
        "net0": f"virtio={mac},bridge=vmbr0,tag=7",
        "serial0": "socket",
        "vga": "serial0",
        "ciuser": "llmgw",
        "ciupgrade": "0",
        "ipconfig0": "ip=127.0.0.1/24,gw=127.0.0.254",
        "nameserver": "10.0.0.2",
        "sshkeys": config["sshkeys"],
        "scsi0": "local-lvm:vm-144-disk-0,discard=on,size=2048M",
        "boot": "order=scsi0",
        "scsi1": "none,media=cdrom",
    }
    assert unquote(config["sshkeys"]) == f"{KEY}\n"
    assert at.host.disks() == {"vm-144-disk-0": 60 * GIB}
    assert at.host.isos() == []
    seed = at.machines.seed(144)
    assert set(seed) == {"user-data", "meta-data", "network-config"}
    card = yaml.safe_load(seed["network-config"])["config"][0]
    assert card["mac_address"] == mac.lower()
    assert at.known_hosts.read_text() == f"[127.0.0.1]:{at.port},[llmgw-node04]:{at.port} {made.host_key}\n"
    assert [outcome for _, outcome in at.heard.ended] == ["done"] * 8


async def test_the_words_for_qm_are_those_of_its_manual(at: Site) -> None:
    """The order of the reference: create, disk, size, first boot's data, start. The keys are in a file that is gone."""
    await refused(at, lambda: _only(at.qm()), wait_s=0.0)
    done = [words for words in at.host.log() if words[0] == "qm"]
    assert [words[1] for words in done] == ["create", "set", "resize", "set", "start"]
    create = done[0]
    assert create[2] == "144"
    keys = create[create.index("--sshkeys") + 1]
    assert keys.startswith("/")
    assert not Path(keys).exists()
    assert done[1][2:5] == ["144", "--scsi0", f"local-lvm:0,import-from={at.image},discard=on"]
    assert done[2] == ["qm", "resize", "144", "scsi0", "40G"]
    assert done[3] == ["qm", "set", "144", "--scsi1", "local:iso/llmgw-llmgw-node04-cidata.iso,media=cdrom"]


async def test_the_api_is_sent_keys_that_are_encoded_twice_and_waits_for_each_task(at: Site) -> None:
    await refused(at, lambda: over_api(at), wait_s=0.0)
    body = next(
        body for method, path, body in at.api.requests if (method, path) == ("POST", "/api2/json/nodes/pve1/qemu")
    )
    (once,) = parse_qs(body, strict_parsing=True)["sshkeys"]
    assert "+" not in once
    assert " " not in once
    assert "/" not in once
    assert unquote(once) == f"{KEY}\n"
    assert all(task["status"] == "stopped" for task in at.api.tasks.values())
    disk = next(body for _, path, body in at.api.requests if path.endswith("/144/config") and "scsi0" in body)
    assert parse_qs(disk)["scsi0"][0].startswith("local-lvm:0,import-from=local:import/llmgw-debian-12-")


async def test_the_data_of_the_first_boot_is_for_nobody_else(at: Site) -> None:
    await refused(at, lambda: _only(at.qm()), wait_s=0.0)
    (name,) = at.host.isos()
    assert stat.S_IMODE((at.host.folder / "vz/template/iso" / name).stat().st_mode) == 0o600


async def test_an_existing_number_is_refused(at: Site, reached: Reached) -> None:
    at.host.write_vm(144, {"name": "mail", "memory": "512", "description": "do not touch"})
    failure = await refused(at, reached)
    assert "VM 144 exists already (mail, on pve1), and to adopt a machine is no decision for a program" in str(failure)
    assert at.host.vms() == {144: {"name": "mail", "memory": "512", "description": "do not touch"}}
    assert at.host.isos() == []


async def test_a_number_of_a_container_on_another_node_is_taken_too(at: Site, reached: Reached) -> None:
    assert "VM 101 exists already (db, on pve2)" in str(await refused(at, reached, vmid=101))


async def test_a_name_is_one_machine(at: Site, reached: Reached) -> None:
    at.host.write_vm(150, {"name": "llmgw-node04"})
    assert "there is a machine llmgw-node04 already: VM 150 on pve1" in str(await refused(at, reached))


@pytest.mark.parametrize("how", ["lock", "storage-lock"])
async def test_what_somebody_else_locks_is_tried_again(at: Site, reached: Reached, how: str) -> None:
    for fault in ("create", "disk", "resize", "set", "start"):
        at.host.will_fail(fault, how, times=2)
    failure = await refused(at, reached, wait_s=0.0)
    assert "did not answer by ssh" in str(failure)
    assert at.host.is_running(144)
    assert sum(words.startswith("locked by somebody else") for words in at.heard.said) == 10


async def test_a_lock_is_not_waited_for_forever(at: Site, reached: Reached) -> None:
    at.host.will_fail("disk", "lock", times=99)
    assert "got timeout" in str(await refused(at, reached))
    assert nothing_left(at)


async def test_a_lock_that_is_really_held(at: Site, reached: Reached) -> None:
    """By another process, for longer than Proxmox itself waits for it."""
    at.machines.silent()
    with at.host.lock_of(144).open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        class Releasing(Heard):
            def say(self, words: str) -> None:
                super().say(words)
                if "got timeout" in words:
                    fcntl.flock(held, fcntl.LOCK_UN)

        async with reached() as proxmox, proxmox:
            heard = Releasing()
            with pytest.raises(CourseFailed, match="did not answer by ssh"):
                await run_course(at.provisioning(proxmox, wait_s=0.0).steps(), heard)
    assert sum(words.startswith("locked by somebody else") for words in heard.said) == 1


async def test_a_half_made_machine_of_this_run_is_removed_and_made_again(at: Site) -> None:
    at.host.will_fail("create", "half", times=2)
    at.machines.silent()
    await refused(at, lambda: _only(at.qm()), wait_s=0.0)
    done = [words[1] for words in at.host.log() if words[0] == "qm"]
    assert done[:7] == ["create", "unlock", "destroy", "create", "unlock", "destroy", "create"]
    assert at.host.is_running(144)


async def test_by_the_api_a_locked_half_is_said_to_be_left(at: Site) -> None:
    """A token may unlock nothing: what can't be removed is named, with the command that does it."""
    at.host.will_fail("create", "half")
    failure = await refused(at, lambda: over_api(at))
    assert "qm unlock 144" in str(failure)
    assert "qm destroy 144 --purge 1" in str(failure)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("disk", "no space left on device"),
        ("resize", "lvresize failed"),
        ("set", "device refused"),
        ("start", "start failed: QEMU exited with code 1"),
    ],
)
async def test_what_fails_for_good_leaves_nothing(at: Site, reached: Reached, fault: str, words: str) -> None:
    at.host.will_fail(fault, f"words:{words}")
    failure = await refused(at, reached)
    assert words in str(failure)
    assert failure.left == ()
    assert nothing_left(at)
    assert "taken back" in {outcome for _, outcome in at.heard.ended}


async def test_a_cd_that_can_not_be_written(at: Site) -> None:
    at.host.will_fail("iso", "words:write failed: No space left on device")
    assert "No space left on device" in str(await refused(at, lambda: over_api(at)))
    assert nothing_left(at)
    place = at.host.folder / "vz/template/iso"
    place.rmdir()
    place.write_text("a file where a folder should be")
    assert "can't be written" in str(await refused(at, lambda: _only(at.qm())))
    assert at.host.vms() == {}


async def test_too_many_processors_fail_at_the_start_and_leave_nothing(at: Site, reached: Reached) -> None:
    failure = await refused(at, reached, cores=32)
    assert "MAX 16 vcpus allowed per VM on this node" in str(failure)
    assert nothing_left(at)


async def test_a_disk_smaller_than_its_image(at: Site, reached: Reached) -> None:
    assert "shrinking disks is not supported" in str(await refused(at, reached, disk_gib=1))
    assert nothing_left(at)


async def test_who_loses_the_race_for_a_number_touches_nothing(at: Site, reached: Reached) -> None:
    at.host.will_fail("create", "race")
    failure = await refused(at, reached)
    assert "somebody else made VM 144 meanwhile" in str(failure)
    assert at.host.vms() == {144: {"name": "somebody-elses", "memory": "512"}}


async def test_a_machine_that_took_the_number_of_a_failing_run_stays(at: Site) -> None:
    """It is removed by its mark, never by its number."""
    at.host.will_fail("disk", "words:broken")

    class Meddling(type(at.qm())):  # type: ignore[misc]
        async def change(self, vmid: int, options: object) -> None:
            at.host.write_vm(vmid, {"name": "theirs"})
            await super().change(vmid, options)

    proxmox = Meddling(images=at.folder / "cache", sysfs=at.folder / "sys")
    failure = await refused(at, lambda: _only(proxmox))
    assert "broken" in str(failure)
    assert at.host.vms() == {144: {"name": "theirs"}}


async def test_an_answer_that_is_lost_leaves_no_machine(at: Site) -> None:
    at.api.lose.add("/api2/json/nodes/pve1/qemu/144/config")
    failure = await refused(at, lambda: over_api(at))
    assert "can't be reached" in str(failure)
    assert at.host.vms() == {}


async def test_a_storage_a_bridge_and_a_name_server_that_are_not_there(at: Site, reached: Reached) -> None:
    assert "the storage ceph is not there on" in str(await refused(at, reached, storage="ceph"))
    assert "--storage names one of local-lvm" in str(await refused(at, reached, storage="ceph"))
    assert "the storage local takes no disks" in str(await refused(at, reached, storage="local"))
    assert "there is no bridge vmbr9 on" in str(await refused(at, reached, bridge="vmbr9"))
    assert at.host.vms() == {}


async def test_a_host_that_asks_itself_for_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = site(tmp_path, monkeypatch, dns={"dns1": "127.0.0.53"})
    failure = await refused(at, lambda: _only(at.qm()))
    assert "the host's own name server (127.0.0.53) is none that the machine could ask" in str(failure)


async def test_no_place_for_a_cd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storages = {"local-lvm": {"content": "images"}, "nas": {"content": "backup,import"}}
    at = site(tmp_path, monkeypatch, storages=storages)
    for reached in (lambda: _only(at.qm()), lambda: over_api(at)):
        assert "takes CD images (content type iso)" in str(await refused(at, reached))
        assert nothing_left(at)


@needs_sshd
async def test_a_machine_that_does_not_answer_is_left_and_waited_for_by_the_next_run(
    at: Site, reached: Reached
) -> None:
    at.machines.silent()
    failure = await refused(at, reached, wait_s=0.0)
    assert "VM 144 is left as it is" in str(failure)
    assert failure.look.startswith("qm terminal 144")
    mark = mark_of(at.host.vms()[144]["description"])
    assert mark is not None
    before = at.host.vms()
    await at.machines.booted(144)
    serve(at.host.folder, 144)
    async with reached() as proxmox:
        made = at.provisioning(proxmox)
        await at.run(made, proxmox)
    assert made.host_key == mark.host_key
    assert at.host.vms()[144] == before[144] | {
        "description": "llmgw-node04: a node of llmgw",
        "scsi1": "none,media=cdrom",
    }
    assert at.host.isos() == []
    assert [outcome for _, outcome in at.heard.ended].count("there already") == 5


async def test_a_run_that_was_killed_is_told_of_with_the_way_out(at: Site, reached: Reached) -> None:
    await refused(at, reached, wait_s=0.0)
    (at.host.folder / "vms/144.running").unlink()
    failure = await refused(at, reached)
    assert "a run before was broken off while it made it" in str(failure)
    assert "qm destroy 144 --purge 1" in str(failure)
    assert 144 in at.host.vms()


@needs_sshd
async def test_another_host_key_is_not_the_machine(at: Site, reached: Reached) -> None:
    at.machines.foreign()
    failure = await refused(at, reached, wait_s=2.5)
    assert "shows another host key" in str(failure)
    assert not at.known_hosts.exists()


@needs_sshd
async def test_an_address_that_answers_already(at: Site, reached: Reached) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", at.port)
    async with server:
        failure = await refused(at, reached)
    assert "some machine has the address 127.0.0.1 already" in str(failure)
    assert nothing_left(at)


async def test_what_was_broken_off_is_taken_back(at: Site, reached: Reached) -> None:
    async with reached() as proxmox:
        made = at.provisioning(proxmox)
        begun = asyncio.Event()
        heard = at.heard = Heard()
        say = heard.begin

        def begin(number: int, of: int, name: str) -> None:
            say(number, of, name)
            if name.startswith("Make its disk"):
                begun.set()

        heard.begin = begin  # type: ignore[method-assign]

        async def run() -> None:
            async with proxmox:
                await run_course(made.steps(), heard)

        task = asyncio.create_task(run())
        await asyncio.wait_for(begun.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert nothing_left(at)


async def test_an_image_that_is_another(at: Site, reached: Reached) -> None:
    failure = await refused(at, reached, image=Image(path=at.image, digest="0" * 64))
    assert "0" * 64 in str(failure)
    assert hashlib.sha256(at.image.read_bytes()).hexdigest() in str(failure)
    assert nothing_left(at)
    assert list((at.host.folder / "vz/import").iterdir()) == []


async def test_an_image_is_uploaded_once(at: Site) -> None:
    async with over_api(at) as proxmox, proxmox:
        first = await proxmox.bring(Image(path=at.image), at.heard.say)
        again = await proxmox.bring(Image(path=at.image), at.heard.say)
    assert first == again
    assert at.heard.said[-1] == f"{at.image.name} is on local already"
    assert sum(path.endswith("/upload") for _, path, _ in at.api.requests) == 1


async def test_the_host_downloads_an_image_itself(at: Site) -> None:
    digest = hashlib.sha256(at.image.read_bytes()).hexdigest()
    image = Image(url=f"https://images.example/{at.image.name}", digest=digest)
    async with over_api(at) as proxmox, proxmox:
        volume = await proxmox.bring(image, at.heard.say)
    assert volume == f"local:import/llmgw-debian-12-genericcloud-amd64-{digest[:16]}.qcow2"
    assert (at.host.folder / "vz/import" / volume.rpartition("/")[2]).read_bytes() == at.image.read_bytes()


@asynccontextmanager
async def _only(proxmox: Proxmox) -> AsyncIterator[Proxmox]:
    yield proxmox
