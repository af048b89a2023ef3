"""``llmgw node onboard``, and the same as a program of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from llmgw.onboarding.node_file import Overrides
    from llmgw.onboarding.onboard import Listed, Onboarding, Plan
    from llmgw.onboarding.remote import Login, Remote

node_app = typer.Typer(no_args_is_help=True, help="Machines become nodes.")

Node = Annotated[str, typer.Option("--node", help="The node's id, its host name and its certificate's common name.")]
Addr = Annotated[str, typer.Option("--addr", help="How the machine is reached by ssh: an address or a name.")]
Server = Annotated[
    str,
    typer.Option("--server", help="https://HOST:PORT[,…] of all control planes, as agents dial them."),
]
FabricNames = Annotated[
    list[str] | None,
    typer.Option(
        "--fabric",
        help="NAME[:ADAPTER,ADAPTER], once for each; without adapters mlx5_0,mlx5_1 (left out: a node with no fabric, "
        "which holds replicas of one node only).",
    ),
]
MgmtAddr = Annotated[str | None, typer.Option("--mgmt-addr", help="Its management address (left out: found there).")]
MgmtIf = Annotated[str | None, typer.Option("--mgmt-if", help="Its management interface (left out: found there).")]
LlamacppBin = Annotated[
    str | None, typer.Option("--llamacpp-bin", help="A llama-server there, in place of the one that is installed.")
]
VllmBin = Annotated[str | None, typer.Option("--vllm-bin", help="A vllm there, in place of the one that is installed.")]
SglangPython = Annotated[
    str | None, typer.Option("--sglang-python", help="A Python there that has SGLang, in place of an installed one.")
]
NvidiaSmi = Annotated[
    str | None, typer.Option("--nvidia-smi", help="Where nvidia-smi is there (left out: the usual places).")
]
IbRoot = Annotated[
    str | None, typer.Option("--ib-root", help="Where adapters are there (left out: /sys/class/infiniband).")
]
Pki = Annotated[Path, typer.Option("--pki", help="The authority's directory, on this machine.")]
Binary = Annotated[
    Path | None,
    typer.Option("--binary", help="The llmgw to install: of a release the version counts, else it is copied."),
]
Releases = Annotated[
    str | None,
    typer.Option("--releases", envvar="LLMGW_RELEASES", help="URL of the folder that has one of each version."),
]
SshUser = Annotated[str, typer.Option("--ssh-user", help="Who logs in; needs sudo without a password.")]
SshPort = Annotated[int, typer.Option("--ssh-port", min=1, max=65535, help="Where its sshd listens.")]
SshOptions = Annotated[
    list[str] | None,
    typer.Option("--ssh-option", help="NAME=VALUE for `ssh -o`, such as ProxyJump=bastion; repeatable."),
]
Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for ssh.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the steps, and do none.")]

DEFAULT_PKI = Path("/etc/llmgw/pki")


@node_app.command("onboard")
def onboard(
    node: Node,
    addr: Addr,
    server: Server,
    fabric: FabricNames = None,
    mgmt_addr: MgmtAddr = None,
    mgmt_if: MgmtIf = None,
    llamacpp_bin: LlamacppBin = None,
    vllm_bin: VllmBin = None,
    sglang_python: SglangPython = None,
    nvidia_smi: NvidiaSmi = None,
    ib_root: IbRoot = None,
    pki: Pki = DEFAULT_PKI,
    binary: Binary = None,
    releases: Releases = None,
    ssh_user: SshUser = "llmgw",
    ssh_port: SshPort = 22,
    ssh_option: SshOptions = None,
    wait: Wait = 180.0,
    dry_run: DryRun = False,
) -> None:
    """Give a machine an identity and an agent, over ssh, from where the authority is. Safe to run again."""
    from llmgw.onboarding.node_file import Overrides
    from llmgw.onboarding.remote import Login

    plan = plan_of(
        node=node,
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
        login=Login(host=addr, user=ssh_user, port=ssh_port, options=tuple(ssh_option or ())),
        pki=pki,
        binary=binary,
        releases=releases,
        wait_s=wait,
    )
    onboarding, remote = onboarding_of(plan)
    from llmgw.cli.course_shown import dry_run as show
    from llmgw.cli.course_shown import run_shown

    if dry_run:
        show(onboarding.steps())
        return
    seconds = run_shown(onboarding.steps(), remote)
    tell_end(onboarding, plan, seconds)


def plan_of(
    *,
    node: str,
    servers: str,
    fabrics: Sequence[str],
    overrides: Overrides,
    login: Login,
    pki: Path,
    binary: Path | None,
    releases: str | None,
    wait_s: float,
) -> Plan:
    """All that onboarding is to do, checked before anything is touched. Ends the program where it can't be."""
    from dataclasses import replace

    from llmgw.config import ConfigError
    from llmgw.link.course import LinkError, parse_server
    from llmgw.onboarding.node_file import BadFabric, node_file, parse_fabrics
    from llmgw.onboarding.onboard import Plan
    from llmgw.onboarding.release import NoBinary, build_to_install
    from llmgw.onboarding.signing_here import NoAuthority, SigningHere
    from llmgw.pki.authority import check_node_id
    from llmgw.pki.names import PkiError
    from llmgw.version import version

    stated = tuple(part.strip() for part in servers.split(",") if part.strip())
    try:
        check_node_id(node)
    except PkiError as error:
        raise typer.BadParameter(str(error), param_hint="--node") from error
    try:
        if not stated:
            raise LinkError("https://HOST:PORT is expected")
        for each in stated:
            parse_server(each)
    except LinkError as error:
        raise typer.BadParameter(str(error), param_hint="--server") from error
    try:
        whole = replace(overrides, fabrics=parse_fabrics(fabrics))
    except BadFabric as error:
        raise typer.BadParameter(str(error), param_hint="--fabric") from error
    try:
        node_file(node, stated, whole, says_id=True)
        signing = SigningHere(pki)
        own = version()
        build = build_to_install(binary, own.text, own.file)
    except (ConfigError, NoAuthority, NoBinary) as error:
        _refuse(str(error))
    where = releases or own.releases
    if build.is_release and not where:
        _refuse(f"{build} is a release, and where releases are is not known here: give --releases URL")
    return Plan(
        node=node,
        login=login,
        servers=stated,
        build=build,
        releases=where,
        signing=signing,
        overrides=whole,
        listed=_listed(node),
        wait_s=wait_s,
    )


def onboarding_of(plan: Plan) -> tuple[Onboarding, Remote]:
    """The steps, and the connection that they go over, to be open while they run."""
    from llmgw.onboarding.onboard import Onboarding
    from llmgw.onboarding.remote import Remote

    remote = Remote(plan.login)
    return Onboarding(plan, remote), remote


def tell_end(onboarding: Onboarding, plan: Plan, seconds: float) -> None:
    typer.echo(f"node {plan.node} is registered, {seconds:.1f} s in all; its certificate is {onboarding.serial}")
    if opted_out := onboarding.opted_out:
        typer.echo(f"named by you, and not installed by the agent: {', '.join(opted_out)}")
    typer.echo("its agent now installs the engines that the cluster's file names: watch it with `llmgw ctl nodes`")
    for problem in onboarding.engine_problems:
        typer.echo(f"warning: {problem}. Until that is mended this engine is not reported", err=True)


def _listed(node: str) -> Listed | None:
    """How the control plane is asked for the node; None where this machine has no access to it."""
    from llmgw.client import AdminClient, AdminError, ContextError, find_context
    from llmgw.onboarding.onboard import Unlisted

    try:
        context = find_context()
    except ContextError:
        return None

    def ask() -> str | None:
        try:
            with AdminClient(context) as client:
                found = {each["id"]: each for each in client.get("nodes")}
        except AdminError as error:
            raise Unlisted(str(error)) from error
        if node not in found:
            return f"the control plane does not list {node}"
        return None if found[node]["connected"] else f"the control plane lists {node} as {found[node]['state']}"

    async def listed() -> str | None:
        return await asyncio.to_thread(ask)

    return listed


def _refuse(words: str) -> NoReturn:
    typer.echo(f"error: {words}", err=True)
    raise typer.Exit(1)


def onboard_program() -> None:
    """``llmgw-onboard-node``."""
    app = typer.Typer(add_completion=False)
    app.command()(onboard)
    app(prog_name="llmgw-onboard-node")
