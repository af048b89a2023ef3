"""A virtual machine from nothing to where it answers by ssh with the host key that was made for it."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmgw.onboarding.answering import SSH_PORT, NoAnswer, remember, taken, wait_for
from llmgw.onboarding.cloud_init import seed_of
from llmgw.onboarding.course import Say, Step, StepFailed
from llmgw.onboarding.host_key import HostKey, fingerprint_of, new_host_key
from llmgw.onboarding.image import Image, ImageRefused, stated
from llmgw.onboarding.machine import Machine
from llmgw.onboarding.making import (
    CDROM,
    DISK,
    EMPTY_CDROM,
    Mark,
    cdrom,
    disks,
    finished,
    frame,
    mark_of,
    new_mac,
    new_mark,
)
from llmgw.onboarding.pci import refusal
from llmgw.onboarding.proxmox import Guest, Proxmox, ProxmoxError, Storage, patiently, seed_name
from llmgw.onboarding.seed import seed_image

WAIT_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    machine: Machine
    keys: tuple[str, ...]
    """Public keys that are let in as the machine's ssh user."""
    image: Image
    known_hosts: Path
    """Where the machine's host key is written for ssh of this machine."""
    wait_s: float = WAIT_S
    port: int = SSH_PORT


class Provisioning:
    """One machine that is being made. ``steps`` are to be run in order, once."""

    def __init__(self, plan: Plan, proxmox: Proxmox) -> None:
        self.plan = plan
        self._machine = plan.machine
        self._proxmox = proxmox
        self._key: HostKey = new_host_key()
        self._mark: Mark = new_mark(plan.machine.name, self._key.public)
        self._mac = new_mac()
        self._dns: tuple[str, ...] = ()
        self._image = ""
        self._seed = ""
        self._passed: dict[str, str] = {}
        self._resumed = False

    @property
    def host_key(self) -> str:
        """The machine's public host key."""
        return self._mark.host_key

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.host_key)

    def steps(self) -> Sequence[Step]:
        machine, vm = self._machine, f"VM {self._machine.vmid}"
        place = f"{machine.storage} and {machine.bridge}"
        return (
            Step(name=f"Look at what there is for {vm}", do=self._look, needs=f"Proxmox, {place}, a free address"),
            Step(name=f"Have the image {self.plan.image.name}", do=self._bring, check=self._is_made),
            Step(name=f"Create {vm}", do=self._create, check=self._is_made, undo=self._remove),
            Step(name=f"Make its disk ({machine.disk_gib} GiB)", do=self._make_disk, check=self._is_made),
            Step(
                name="Write the data of its first boot",
                do=self._write_seed,
                check=self._is_made,
                undo=self._drop_seed,
                needs="a storage for CD images",
            ),
            Step(name=f"Start {vm}", do=self._start, check=self._is_made),
            Step(
                name=f"Wait until {machine.host} answers",
                do=self._wait,
                settles=True,
                needs=f"ssh, a way to {machine.host}",
            ),
            Step(name="Take the data of its first boot away", do=self._finish),
        )

    # -- the steps

    async def _look(self, say: Say) -> None:
        machine = self._machine
        try:
            if await self._settled_by(await self._proxmox.guests(), say):
                return
            self._check_storage(await self._proxmox.storages())
            bridges = await self._proxmox.bridges()
            if bridges is not None and machine.bridge not in bridges:
                raise StepFailed(
                    f"there is no bridge {machine.bridge} on {self._proxmox.node}: --bridge names one of "
                    f"{', '.join(sorted(bridges)) or 'none that it has'}"
                )
            self._dns = machine.dns or await self._name_servers()
            if machine.gpus:
                words = refusal(machine.gpus, await self._proxmox.pci_devices())
                if words is not None:
                    raise StepFailed(f"--gpu: {words}", look="pvesh get /nodes/localhost/hardware/pci")
                self._passed = dict(await self._proxmox.pass_through(machine.gpus))
        except ProxmoxError as error:
            raise _failed(error) from error
        if await taken(machine.host, self.plan.port):
            raise StepFailed(
                f"some machine has the address {machine.host} already: two of one address are both out of reach",
                look=f"ssh-keyscan {machine.host}",
            )

    async def _settled_by(self, guests: Sequence[Guest], say: Say) -> bool:
        """Whether the machine is there already, made by a run before that did not see it answer."""
        machine = self._machine
        for guest in guests:
            if guest.vmid == machine.vmid:
                await self._resume(guest, say)
            elif guest.name == machine.name:
                raise StepFailed(
                    f"there is a machine {machine.name} already: VM {guest.vmid} on {guest.node}. One name is one "
                    "node: name this one otherwise, or remove that one first",
                    look=self._proxmox.command("config", str(guest.vmid)),
                )
        return self._resumed

    async def _resume(self, guest: Guest, say: Say) -> None:
        vmid = str(guest.vmid)
        look = self._proxmox.command("config", vmid)
        known = f"VM {vmid} exists already ({guest.name or 'without a name'}, on {guest.node})"
        try:
            config = await self._proxmox.config(guest.vmid)
        except ProxmoxError as error:
            if error.kind not in ("missing", "failed", "denied"):
                raise
            config = {}
        mark = mark_of(config.get("description", ""))
        if mark is None:
            raise StepFailed(
                f"{known}, and to adopt a machine is no decision for a program: name another --vmid", look=look
            )
        if mark.name != self._machine.name or not await self._proxmox.running(guest.vmid):
            raise StepFailed(
                f"{known}: a run before was broken off while it made it. If none is at it now, remove it: "
                f"{self._proxmox.command('destroy', vmid, '--purge', '1')}",
                look=look,
            )
        say(f"VM {vmid} runs, made by a run before that did not see it answer: going on from there")
        self._mark, self._resumed = mark, True
        self._seed = config.get(CDROM, "").partition(",")[0]

    def _check_storage(self, storages: Sequence[Storage]) -> None:
        machine, node = self._machine, self._proxmox.node
        wanted = [each for each in storages if each.name == machine.storage]
        usable = sorted(each.name for each in storages if "images" in each.content and each.active)
        if not wanted or not wanted[0].active or "images" not in wanted[0].content:
            why = "is not there" if not wanted else "is not active" if not wanted[0].active else "takes no disks"
            raise StepFailed(
                f"the storage {machine.storage} {why} on {node}: --storage names one of {', '.join(usable) or 'none'}",
                look="pvesm status --content images",
            )

    async def _name_servers(self) -> tuple[str, ...]:
        servers = tuple(await self._proxmox.name_servers())
        usable = tuple(server for server in servers if not ipaddress.ip_address(server).is_loopback)
        if not usable:
            raise StepFailed(
                f"the host's own name server ({', '.join(servers) or 'none'}) is none that the machine could ask: "
                "name one with --dns"
            )
        return usable

    async def _bring(self, say: Say) -> None:
        try:
            self._image = await self._proxmox.bring(await stated(self.plan.image), say)
        except ImageRefused as error:
            raise StepFailed(str(error)) from error
        except ProxmoxError as error:
            raise _failed(error) from error

    async def _create(self, say: Say) -> None:
        options = frame(self._machine, mac=self._mac, dns=self._dns, description=str(self._mark))

        async def once() -> None:
            try:
                await self._proxmox.create(self._machine.vmid, options, self.plan.keys)
            except ProxmoxError as error:
                if error.kind == "busy":
                    await self._remove()
                raise

        try:
            await patiently(once, self._proxmox.patience, say)
        except ProxmoxError as error:
            if error.kind == "exists":
                raise StepFailed(
                    f"somebody else made VM {self._machine.vmid} meanwhile, and to adopt a machine is no decision for "
                    f"a program: name another --vmid ({error})"
                ) from error
            raise _failed(error) from error

    async def _make_disk(self, say: Say) -> None:
        vmid = self._machine.vmid
        options = disks(self._machine, image=self._image, passed=self._passed)
        await self._patiently(lambda: self._proxmox.change(vmid, options), say)
        await self._patiently(lambda: self._proxmox.resize(vmid, DISK, f"{self._machine.disk_gib}G"), say)

    async def _write_seed(self, say: Say) -> None:
        seed = seed_of(self._machine, self.plan.keys, self._dns, self._mac, self._key)
        image = seed_image(seed.files())

        async def once() -> None:
            self._seed = await self._proxmox.put_seed(seed_name(self._machine.name), image)
            await self._proxmox.change(self._machine.vmid, cdrom(self._seed))

        await self._patiently(once, say)

    async def _start(self, say: Say) -> None:
        await self._patiently(lambda: self._proxmox.start(self._machine.vmid), say)

    async def _wait(self, say: Say) -> None:
        machine = self._machine
        try:
            await wait_for(machine.host, self.host_key, limit_s=self.plan.wait_s, port=self.plan.port)
        except NoAnswer as error:
            raise StepFailed(
                f"{error}. VM {machine.vmid} is left as it is: run the same command again to go on waiting, or remove "
                f"it with `{self._proxmox.command('destroy', str(machine.vmid), '--purge', '1')}`",
                look=self._proxmox.command("terminal", str(machine.vmid)),
            ) from error
        try:
            await remember(machine.host, machine.name, self.host_key, self.plan.known_hosts, self.plan.port)
        except (OSError, NoAnswer) as error:
            say(f"its host key could not be written to {self.plan.known_hosts} ({error})")

    async def _finish(self, say: Say) -> None:
        options = {"description": finished(self._machine.name), CDROM: EMPTY_CDROM}
        await self._patiently(lambda: self._proxmox.change(self._machine.vmid, options), say)
        if self._seed and not self._seed.startswith("none"):
            await self._patiently(lambda: self._proxmox.drop_seed(self._seed), say)

    # -- what they share

    async def _is_made(self) -> bool:
        return self._resumed

    async def _patiently(self, what: Callable[[], Awaitable[None]], say: Say) -> None:
        try:
            await patiently(what, self._proxmox.patience, say)
        except ProxmoxError as error:
            raise _failed(error) from error

    async def _remove(self) -> None:
        """Removes the machine where this run made it, and only there."""
        vmid = self._machine.vmid
        try:
            if all(guest.vmid != vmid for guest in await self._proxmox.guests()):
                return
            config = await self._proxmox.config(vmid)
            mark = mark_of(config.get("description", ""))
            if mark is None or mark.run != self._mark.run:
                return
            if config.get("lock") == "create":
                await self._proxmox.unlock(vmid)
            if await self._proxmox.running(vmid):
                await patiently(lambda: self._proxmox.stop(vmid), self._proxmox.patience, _hushed)
            await patiently(lambda: self._proxmox.destroy(vmid), self._proxmox.patience, _hushed)
        except ProxmoxError as error:
            if error.kind == "missing":
                return
            remedy = self._proxmox.command("destroy", str(vmid), "--purge", "1")
            raise StepFailed(f"VM {vmid} could not be removed: {error}; remove it yourself: {remedy}") from error

    async def _drop_seed(self) -> None:
        if not self._seed:
            return
        try:
            await self._proxmox.drop_seed(self._seed)
        except ProxmoxError as error:
            raise StepFailed(f"{self._seed} could not be deleted, and holds a host key: {error}") from error


def _failed(error: ProxmoxError) -> StepFailed:
    return StepFailed(str(error), look=error.look)


def _hushed(words: str) -> None:
    return None
