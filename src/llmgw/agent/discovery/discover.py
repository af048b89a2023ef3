"""All of discovery put together. Cheap enough for every minute: files, one child process where there are GPUs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from llmgw.agent.discovery.cgroups import read_limits
from llmgw.agent.discovery.cpu import read_cpu
from llmgw.agent.discovery.disk import read_disk
from llmgw.agent.discovery.gpus import carried_over
from llmgw.agent.discovery.infiniband import check_fabrics, find_hcas, warn_about_hcas, warn_about_silence, with_rates
from llmgw.agent.discovery.memory import read_memory
from llmgw.agent.discovery.nccl import warn_about_nccl
from llmgw.agent.discovery.network import Management, find_management
from llmgw.agent.discovery.nvidia import find_gpus
from llmgw.agent.discovery.settings import DiscoverySettings
from llmgw.agent.discovery.system import (
    read_hostname,
    read_kernel,
    read_libc,
    read_os_release,
    warn_about_identity,
)
from llmgw.cluster.model import Cpu, Inventory


@dataclass(frozen=True, slots=True)
class _Machine:
    hostname: str
    os: str
    kernel: str
    libc: str
    cpu: Cpu
    memory_bytes: int
    warnings: tuple[str, ...]


async def discover(settings: DiscoverySettings, previous: Inventory | None = None) -> Inventory:
    """What this machine is, with a warning in words for all that is wrong with it.

    Raises DiscoveryRefused where ``settings.fabrics`` name an adapter that the machine does not have.
    With ``previous`` (this machine's inventory of a minute ago) such an adapter is a warning, since it was there
    at the start; GPUs whose driver has stopped answering are kept, each with that as its problem; and so is the
    management address while no way to a control plane shows.

    The same machine in the same condition gives an equal value: warnings hold no times, pids or counters.
    """
    machine = await asyncio.to_thread(_read_machine, settings)
    management, hcas, gpus = await asyncio.gather(
        find_management(settings, _management(previous)),
        find_hcas(settings.ib_root),
        find_gpus(settings, machine.memory_bytes, machine.cpu.architecture),
    )
    if hcas is None:
        hcas = previous.hcas if previous is not None else ()
        of_hcas = warn_about_silence(settings.ib_root)
    else:
        if previous is None:
            check_fabrics(settings.fabrics, hcas, settings.ib_root)
        of_hcas = warn_about_hcas(settings.fabrics, hcas, settings.ib_root)
    gpus = carried_over(gpus, previous)
    return Inventory(
        hostname=machine.hostname,
        os=machine.os,
        kernel=machine.kernel,
        libc=machine.libc,
        cpu=machine.cpu,
        memory_bytes=machine.memory_bytes,
        mgmt_addr=management.address,
        mgmt_interface=management.interface,
        gpus=gpus.gpus or (),
        gpu_source=gpus.source,
        driver=gpus.driver,
        hcas=hcas,
        fabrics=with_rates(settings.fabrics, hcas),
        labels=dict(settings.labels),
        ports=settings.ports,
        launch_modes=dict(settings.launch_modes),
        warnings=(*machine.warnings, *gpus.warnings, *of_hcas, *management.warnings),
    )


async def links_changed(settings: DiscoverySettings, known: Inventory) -> bool:
    """Whether the management address or a port of an adapter is not what it was. Cheap enough for every heartbeat.

    Adapters that do not answer are no change: the next whole look says so.
    """
    management, hcas = await asyncio.gather(find_management(settings, _management(known)), find_hcas(settings.ib_root))
    moved = (management.address, management.interface) != (known.mgmt_addr, known.mgmt_interface)
    return moved or (hcas is not None and hcas != known.hcas)


def _management(known: Inventory | None) -> Management | None:
    return None if known is None else Management(known.mgmt_addr, known.mgmt_interface)


def _read_machine(settings: DiscoverySettings) -> _Machine:
    root = settings.root
    limits = read_limits(root)
    cpu, of_cpu = read_cpu(root, limits)
    disk = read_disk(settings.weights_dir)
    return _Machine(
        hostname=read_hostname(root),
        os=read_os_release(root).pretty,
        kernel=read_kernel(root),
        libc=read_libc(root),
        cpu=cpu,
        memory_bytes=read_memory(root, limits).total_bytes,
        warnings=(
            *of_cpu,
            *warn_about_identity(root),
            *((disk.problem,) if disk.problem else ()),
            *warn_about_nccl(root, settings.fabrics),
        ),
    )
