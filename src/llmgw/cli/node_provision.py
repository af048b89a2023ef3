"""``llmgw node provision`` and ``llmgw node add``, and the same as programs of their own."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from llmgw.cli import node as node_options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from llmgw.onboarding.course import Step
    from llmgw.onboarding.image import Image as DiskImage
    from llmgw.onboarding.machine import Machine
    from llmgw.onboarding.provision import Provisioning
    from llmgw.onboarding.proxmox import Proxmox, ProxmoxError

Name = Annotated[
    str, typer.Option("--name", help="The VM's name, its host name, its node id, its certificate's common name.")
]
Ip = Annotated[str, typer.Option("--ip", help="Its address with the length of its network, such as 10.0.0.144/24.")]
Vmid = Annotated[int | None, typer.Option("--vmid", help="The VM's number (left out: the last octet of --ip).")]
Gateway = Annotated[str | None, typer.Option("--gateway", help="(Left out: .1 of the network.)")]
Dns = Annotated[str | None, typer.Option("--dns", help="Its name servers (left out: the host's own).")]
Cores = Annotated[int, typer.Option("--cores", help="Processors.")]
Memory = Annotated[int, typer.Option("--memory", help="MiB.")]
Disk = Annotated[int, typer.Option("--disk", help="GiB.")]
Storage = Annotated[str, typer.Option("--storage", help="Where its disk lies.")]
Bridge = Annotated[str, typer.Option("--bridge", help="The bridge that it is on.")]
Vlan = Annotated[int | None, typer.Option("--vlan", help="Its VLAN (left out: none).")]
Image = Annotated[
    str | None,
    typer.Option("--image", help="FILE or URL of a cloud image (left out: the current Debian 12 generic cloud image)."),
]
ImageSha256 = Annotated[
    str | None, typer.Option("--image-sha256", help="What it is checked against (left out: the list beside its URL).")
]
Cpu = Annotated[str, typer.Option("--cpu", help="CPU type. Any but `host` may hide AVX2: inference five times slower.")]
SshKeys = Annotated[
    Path | None,
    typer.Option("--ssh-keys", help="Public keys that are let in (left out: ~/.ssh/authorized_keys of this machine)."),
]
Gpu = Annotated[
    list[str] | None,
    typer.Option("--gpu", help="PCI address of a device to pass through, such as 0000:41:00.0; repeatable."),
]
ApiUrl = Annotated[
    str | None, typer.Option("--api", help="https://HOST:8006, the REST API (left out: `qm` of this machine).")
]
ApiToken = Annotated[
    str | None,
    typer.Option("--api-token", envvar="LLMGW_API_TOKEN", help="USER@REALM!ID=SECRET, or @FILE that holds it."),
]
ApiCa = Annotated[
    Path | None,
    typer.Option("--api-ca", help="The authority of the API's certificate: /etc/pve/pve-root-ca.pem of the host."),
]
ApiNode = Annotated[
    str | None, typer.Option("--api-node", help="The cluster's node to make it on (left out: the one that answers).")
]
MadeUser = Annotated[str, typer.Option("--ssh-user", help="The user that it gets, with sudo without a password.")]


def register(app: typer.Typer) -> None:
    app.command("provision")(provision)
    app.command("add")(add)


def provision(
    name: Name,
    ip: Ip,
    vmid: Vmid = None,
    gateway: Gateway = None,
    dns: Dns = None,
    cores: Cores = 4,
    memory: Memory = 8192,
    disk: Disk = 40,
    storage: Storage = "local-lvm",
    bridge: Bridge = "vmbr0",
    vlan: Vlan = None,
    image: Image = None,
    image_sha256: ImageSha256 = None,
    cpu: Cpu = "host",
    ssh_user: MadeUser = "llmgw",
    ssh_keys: SshKeys = None,
    gpu: Gpu = None,
    api: ApiUrl = None,
    api_token: ApiToken = None,
    api_ca: ApiCa = None,
    api_node: ApiNode = None,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait until it answers.")] = 180.0,
    dry_run: node_options.DryRun = False,
) -> None:
    """Make a virtual machine on Proxmox that answers by ssh: on the host, or from elsewhere by its API."""
    made, proxmox = _provisioning(
        _machine_of(
            name=name,
            ip=ip,
            vmid=vmid,
            gateway=gateway,
            dns=dns,
            cores=cores,
            memory=memory,
            disk=disk,
            storage=storage,
            bridge=bridge,
            vlan=vlan,
            cpu=cpu,
            ssh_user=ssh_user,
            gpu=gpu,
        ),
        _image_of(image, image_sha256, gpu),
        ssh_keys,
        _proxmox_of(api, api_token, api_ca, api_node),
        wait_s=wait,
    )
    seconds = _run(made.steps(), proxmox, dry_run)
    if seconds is not None:
        _tell_made(made, seconds)
        typer.echo(
            f"next, where the authority is: llmgw-onboard-node --node {name} --addr {made.plan.machine.host} "
            f"{'' if ssh_user == 'llmgw' else f'--ssh-user {ssh_user} '}--server https://CONTROL-PLANE:7443"
        )


def add(
    name: Name,
    ip: Ip,
    server: Annotated[
        str | None,
        typer.Option("--server", help="https://HOST:PORT[,…] of all control planes; not with --provision-only."),
    ] = None,
    vmid: Vmid = None,
    gateway: Gateway = None,
    dns: Dns = None,
    cores: Cores = 4,
    memory: Memory = 8192,
    disk: Disk = 40,
    storage: Storage = "local-lvm",
    bridge: Bridge = "vmbr0",
    vlan: Vlan = None,
    image: Image = None,
    image_sha256: ImageSha256 = None,
    cpu: Cpu = "host",
    ssh_user: MadeUser = "llmgw",
    ssh_keys: SshKeys = None,
    gpu: Gpu = None,
    api: ApiUrl = None,
    api_token: ApiToken = None,
    api_ca: ApiCa = None,
    api_node: ApiNode = None,
    fabric: node_options.FabricNames = None,
    mgmt_addr: node_options.MgmtAddr = None,
    mgmt_if: node_options.MgmtIf = None,
    llamacpp_bin: node_options.LlamacppBin = None,
    vllm_bin: node_options.VllmBin = None,
    sglang_python: node_options.SglangPython = None,
    nvidia_smi: node_options.NvidiaSmi = None,
    ib_root: node_options.IbRoot = None,
    pki: node_options.Pki = node_options.DEFAULT_PKI,
    binary: node_options.Binary = None,
    releases: node_options.Releases = None,
    ssh_port: node_options.SshPort = 22,
    ssh_option: node_options.SshOptions = None,
    wait: node_options.Wait = 180.0,
    provision_only: Annotated[bool, typer.Option("--provision-only", help="Make the machine, and no more.")] = False,
    onboard_only: Annotated[bool, typer.Option("--onboard-only", help="The machine is there: make it a node.")] = False,
    dry_run: node_options.DryRun = False,
) -> None:
    """From nothing to a registered node: makes the virtual machine, then gives it an identity and an agent."""
    from llmgw.onboarding.node_file import Overrides
    from llmgw.onboarding.remote import Login

    if provision_only and onboard_only:
        raise typer.BadParameter("one of the two, or none", param_hint="--provision-only / --onboard-only")
    machine = _machine_of(
        name=name,
        ip=ip,
        vmid=vmid,
        gateway=gateway,
        dns=dns,
        cores=cores,
        memory=memory,
        disk=disk,
        storage=storage,
        bridge=bridge,
        vlan=vlan,
        cpu=cpu,
        ssh_user=ssh_user,
        gpu=gpu,
        any_number=onboard_only,
    )
    steps: list[Step] = []
    within: list[AbstractAsyncContextManager[object]] = []
    made = plan = None
    # All that both halves need is checked before anything is touched: half a node helps nobody.
    if not provision_only:
        if server is None:
            raise typer.BadParameter("where its agent finds the control planes is missing", param_hint="--server")
        plan = node_options.plan_of(
            node=name,
            servers=server,
            fabrics=fabric or [],
            overrides=Overrides(
                mgmt_addr=mgmt_addr,
                mgmt_interface=mgmt_if,
                llamacpp_bin=llamacpp_bin,
                vllm_bin=vllm_bin,
                sglang_python=sglang_python,
                nvidia_smi=nvidia_smi,
                ib_root=ib_root,
            ),
            login=Login(host=machine.host, user=ssh_user, port=ssh_port, options=tuple(ssh_option or ())),
            pki=pki,
            binary=binary,
            releases=releases,
            wait_s=wait,
        )
    if not onboard_only:
        made, proxmox = _provisioning(
            machine,
            _image_of(image, image_sha256, gpu),
            ssh_keys,
            _proxmox_of(api, api_token, api_ca, api_node),
            wait_s=wait,
            port=ssh_port,
            options=ssh_option or (),
        )
        steps += made.steps()
        within.append(proxmox)
        if plan is not None:
            _warn_of_keys(made.plan.keys)
    onboarding = None
    if plan is not None:
        onboarding, remote = node_options.onboarding_of(plan)
        steps += onboarding.steps()
        within.append(remote)
    seconds = _run(steps, _all(within), dry_run)
    if seconds is None:
        return
    if made is not None:
        _tell_made(made, seconds if plan is None else None)
    if onboarding is not None and plan is not None:
        node_options.tell_end(onboarding, plan, seconds)


def provision_program() -> None:
    """``llmgw-provision-node``."""
    app = typer.Typer(add_completion=False)
    app.command()(provision)
    app(prog_name="llmgw-provision-node")


def add_program() -> None:
    """``llmgw-add-node``."""
    app = typer.Typer(add_completion=False)
    app.command()(add)
    app(prog_name="llmgw-add-node")


# -- what the options mean


def _provisioning(
    machine: Machine,
    image: DiskImage,
    ssh_keys: Path | None,
    proxmox: Proxmox,
    *,
    wait_s: float,
    port: int = 22,
    options: Sequence[str] = (),
) -> tuple[Provisioning, Proxmox]:
    from llmgw.onboarding.machine import slow_cpu
    from llmgw.onboarding.provision import Plan, Provisioning

    plan = Plan(
        machine=machine,
        keys=_keys_of(ssh_keys),
        image=image,
        known_hosts=_known_hosts(options),
        wait_s=wait_s,
        port=port,
    )
    if (words := slow_cpu(machine.cpu)) is not None:
        typer.echo(f"warning: {words}", err=True)
    return Provisioning(plan, proxmox), proxmox


def _machine_of(
    *,
    name: str,
    ip: str,
    vmid: int | None,
    gateway: str | None,
    dns: str | None,
    cores: int,
    memory: int,
    disk: int,
    storage: str,
    bridge: str,
    vlan: int | None,
    cpu: str,
    ssh_user: str,
    gpu: Sequence[str] | None,
    any_number: bool = False,
) -> Machine:
    from llmgw.onboarding.machine import LOWEST_VMID, BadOption, machine

    try:
        return machine(
            name=name,
            ip=ip,
            # A machine that is there has a number, and it does not matter here.
            vmid=LOWEST_VMID if any_number and vmid is None else vmid,
            gateway=gateway,
            dns=dns,
            cores=cores,
            memory_mib=memory,
            disk_gib=disk,
            storage=storage,
            bridge=bridge,
            vlan=vlan,
            cpu=cpu,
            ssh_user=ssh_user,
            gpus=tuple(gpu or ()),
        )
    except BadOption as error:
        raise typer.BadParameter(error.words, param_hint=error.option) from error


def _image_of(image: str | None, sha256: str | None, gpu: Sequence[str] | None) -> DiskImage:
    from llmgw.onboarding.image import ImageRefused, image_of

    try:
        return image_of(image, sha256, hardware=bool(gpu))
    except ImageRefused as error:
        raise typer.BadParameter(str(error), param_hint="--image") from error


def _proxmox_of(api: str | None, token: str | None, ca: Path | None, node: str | None) -> Proxmox:
    from llmgw.onboarding.proxmox import ProxmoxError
    from llmgw.onboarding.proxmox_api import Api
    from llmgw.onboarding.proxmox_qm import Qm

    if api is None:
        if ca is not None or node is not None:
            raise typer.BadParameter("it says how the API is reached: name that with --api", param_hint="--api-…")
        return Qm()
    if token is None:
        raise typer.BadParameter("the API asks for a token: USER@REALM!ID=SECRET", param_hint="--api-token")
    if token.startswith("@"):
        try:
            token = Path(token[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"{token[1:]} can't be read: {error}", param_hint="--api-token") from error
    try:
        return Api(api, token, node=node, ca=ca)
    except ProxmoxError as error:
        raise typer.BadParameter(str(error)) from error


def _keys_of(file: Path | None) -> tuple[str, ...]:
    from llmgw.onboarding.machine import BadOption, authorized_keys

    path = file if file is not None else Path.home() / ".ssh/authorized_keys"
    try:
        return authorized_keys(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise typer.BadParameter(f"{path} can't be read: {why}", param_hint="--ssh-keys") from error
    except BadOption as error:
        raise typer.BadParameter(error.words, param_hint=error.option) from error


def _known_hosts(options: Sequence[str]) -> Path:
    """Where ssh of this machine looks for host keys."""
    for option in options:
        name, _, value = option.partition("=")
        if name.strip().lower() == "userknownhostsfile" and value.strip() not in ("", "none", "/dev/null"):
            return Path(value.split()[0]).expanduser()
    return Path.home() / ".ssh/known_hosts"


def _warn_of_keys(keys: Sequence[str]) -> None:
    """Says it before the machine is made, where nobody here may hold a key that it lets in."""
    import os

    if "SSH_AUTH_SOCK" in os.environ:
        return
    let_in = {tuple(key.split()[:2]) for key in keys}
    for path in (Path.home() / ".ssh").glob("*.pub"):
        try:
            if tuple(path.read_text(encoding="utf-8").split()[:2]) in let_in:
                return
        except (OSError, UnicodeDecodeError):
            continue
    typer.echo(
        "warning: none of the keys that the machine lets in lies in ~/.ssh here. Unless ssh is told of one otherwise, "
        "onboarding will not get in: add this machine's public key to --ssh-keys",
        err=True,
    )


# -- running


@asynccontextmanager
async def _all(contexts: Sequence[AbstractAsyncContextManager[object]]) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for context in contexts:
            await stack.enter_async_context(context)
        yield


def _run(steps: Sequence[Step], within: AbstractAsyncContextManager[object], dry_run: bool) -> float | None:
    """The seconds that it took; None where it was only shown."""
    from llmgw.cli.course_shown import dry_run as show
    from llmgw.cli.course_shown import run_shown
    from llmgw.onboarding.proxmox import ProxmoxError

    if dry_run:
        show(steps)
        return None
    try:
        return run_shown(steps, within)
    except ProxmoxError as error:
        _refuse(error)


def _refuse(error: ProxmoxError) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    if error.look:
        typer.echo(f"look with: {error.look}", err=True)
    raise typer.Exit(1)


def _tell_made(made: Provisioning, seconds: float | None) -> None:
    machine = made.plan.machine
    took = "" if seconds is None else f", {seconds:.1f} s in all"
    typer.echo(f"VM {machine.vmid} is {machine.name} at {machine.host}{took}; its host key is {made.fingerprint}")
    typer.echo(f"for known_hosts of other machines: {machine.host},{machine.name} {made.host_key}")
