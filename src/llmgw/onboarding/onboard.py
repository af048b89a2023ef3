"""A machine that answers by ssh becomes a node: it gets llmgw, makes its key, has it signed here, and registers.

llmgw comes before the identity, since the node makes its key with it: what is signed here comes from there, and
nothing that is secret ever travels. The agent's file comes before it, too, since it says where the key is kept. While
the agent registers, the rest of the machine learns to trust the authority.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from llmgw.link.course import parse_server
from llmgw.link.enrolment import Enrolment, EnrolmentError, clocks_differ, trusting
from llmgw.onboarding import scripts
from llmgw.onboarding.course import Say, Step, StepFailed
from llmgw.onboarding.node_file import CONFIG, WRITER, Overrides, node_file
from llmgw.onboarding.release import ARCHITECTURES, INSTALLED, Build, asset_of, folder_of
from llmgw.onboarding.remote import Login, Ran, Remote, Unreachable
from llmgw.onboarding.signing_here import SigningHere
from llmgw.pki.names import PkiError

WAIT_S = 180.0
REGISTERED_S = 30.0
FETCH_S = 900.0
FIRST_START_S = 180.0
"""How long the first start of a release may take: it unpacks itself."""
CLOCK_S = 300.0
"""By how much two clocks may differ before certificates are not believed."""
_LOOK_AGAIN_S = 0.5
_MIB = 1 << 20
_NEEDED_KIB = {"/usr/local": 512 * 1024, "/etc": 1024, "/var/lib": 64 * 1024}
"""A release, its copy while it arrives and what it unpacks; an agent's file; its state."""


Listed = Callable[[], Awaitable[str | None]]
"""Whether the control plane lists the node: None where it does, else what it says of it. Raises Unlisted."""


class Unlisted(Exception):
    """The control plane can't be asked from here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that is to be. ``listed``: None where this machine has no access to the admin API."""

    node: str
    login: Login
    servers: Sequence[str]
    build: Build
    releases: str
    signing: SigningHere
    overrides: Overrides = field(default_factory=Overrides)
    listed: Listed | None = None
    wait_s: float = WAIT_S
    registered_s: float = REGISTERED_S


class Onboarding:
    """One machine on its way. ``steps`` are to be run in order, once; what they found out is told by the rest."""

    def __init__(self, plan: Plan, remote: Remote) -> None:
        self._plan = plan
        self._remote = remote
        self._login = plan.login
        self._host = ""
        self._machine = ""
        self._installed = ""
        self._since = 0.0
        self.serial = ""
        """Of the certificate that the node has now."""
        self.engine_problems: list[str] = []
        """What is wrong with the engines that were named, for people."""

    def steps(self) -> Sequence[Step]:
        plan = self._plan
        what = f"{plan.build}" if plan.build.is_release else f"{plan.build} (a copy of {plan.build.file})"
        names = ", ".join(self.opted_out)
        return [
            Step(name=f"Ask {' and '.join(plan.servers)}", do=self._ask),
            Step(name=f"Wait for ssh of {self._login}", do=self._wait, needs="a key that is let in"),
            Step(name="Look at the machine", do=self._look, needs="sudo without a password, systemd, room"),
            Step(name=f"Install {what}", do=self._install),
            Step(name=f"Write {CONFIG}", do=self._write_file),
            Step(name="Have the node's key signed", do=self._identify, needs="the authority, here"),
            *([Step(name=f"Try {names}", do=self._try_engines)] if names else ()),
            Step(name="Install and start the service llmgw-agent", do=self._serve),
            Step(name="Trust the authority on the whole machine", do=self._trust),
            Step(name="See the node registered", do=self._register),
        ]

    @property
    def _named(self) -> Sequence[tuple[str, str, str]]:
        """Engines that the operator named: the name, the program, the module that it has to have."""
        said = self._plan.overrides
        named = (
            ("llamacpp", said.llamacpp_bin, ""),
            ("vllm", said.vllm_bin, ""),
            ("sglang", said.sglang_python, "sglang"),
        )
        return [(name, program, module) for name, program, module in named if program]

    @property
    def opted_out(self) -> Sequence[str]:
        """Engines that the agent does not install, since the operator named one."""
        return [name for name, *_ in self._named]

    # -- the steps

    async def _ask(self, say: Say) -> None:
        """Nodes verify the address that they dial: one that no certificate has would be refused by each of them."""
        for address in self._plan.servers:
            server = parse_server(address)
            look = f"openssl s_client -connect {server.host}:{server.port} -showcerts </dev/null"
            try:
                answer = await Enrolment(server, trusting(self._plan.signing.roots)).authority()
            except EnrolmentError as error:
                if error.reason is not None and error.reason.verify_code is not None:
                    raise StepFailed(f"{error}: the node would refuse it, too", look=look) from error
                say(f"{error}. That may be otherwise from the node")
                continue
            if difference := clocks_differ(answer.time, datetime.now(UTC)):
                raise StepFailed(f"{address}: {difference}", look="date; timedatectl")

    async def _wait(self, say: Say) -> None:
        limit_s = self._plan.wait_s
        try:
            await self._remote.wait(limit_s)
        except Unreachable as error:
            look = self._login.shown("true")
            if error.final:
                raise StepFailed(str(error), look=look) from error
            raise StepFailed(f"cannot reach {self._login} over ssh after {limit_s:g}s: {error}", look=look) from error

    async def _look(self, say: Say) -> None:
        began = time.time()
        ran = await self._root(scripts.LOOK)
        if ran.status:
            raise self._no_root(ran)
        facts = [line.partition("=")[::2] for line in ran.output.splitlines()]
        found = dict(facts)
        self._host, self._machine = found.get("host", ""), found.get("machine", "")
        self._installed = found.get("installed", "")
        self._check_kind(found)
        if not found.get("time", "").isdigit():
            raise StepFailed(f"`date` of {self._login.host} tells no time", look=self._login.shown("date +%s"))
        self._check_clock(float(found["time"]) - (began + time.time()) / 2)
        self._check_room([value for name, value in facts if name == "free"])
        if self._host != self._plan.node:
            say(f"its host name is {self._host}, not {self._plan.node}: the agent's file will say which node it is")

    async def _install(self, say: Say) -> None:
        build = self._plan.build
        if build.file is None:
            ran = await self._fetched(build.version)
            say(f"it is there already: {INSTALLED}" if ran.output.strip() == "unchanged" else f"{INSTALLED}")
        elif build.sha256 == self._installed:
            say(f"it is there already: {INSTALLED}")
        else:
            say(f"{build.version} is no release: {build.file} is copied ({build.size_bytes / _MIB:.0f} MiB)")
            ran = await self._root(scripts.COPY, build.sha256, data=build.file.read_bytes(), limit_s=FETCH_S)
            self._expect(ran, f"{INSTALLED} can't be written", "df -h /usr/local")
        ran = await self._root(f"{INSTALLED} --version", limit_s=FIRST_START_S)
        self._expect(ran, f"{INSTALLED} does not run there", f"sudo {INSTALLED} --version")
        if (said := ran.output.strip()) != str(build):
            raise StepFailed(
                f"{INSTALLED} says that it is {said!r}, and {build} was installed",
                look=self._login.shown(f"ls -l {INSTALLED}; {INSTALLED} --version"),
            )

    async def _fetched(self, version: str) -> Ran:
        where = folder_of(self._plan.releases, version)
        ran = await self._root(scripts.FETCH, where, asset_of(version, self._machine), limit_s=FETCH_S)
        self._expect(ran, "the node could not fetch the release", f"curl -fsSLI {where}/checksums.txt")
        return ran

    async def _write_file(self, say: Say) -> None:
        plan = self._plan
        text = node_file(plan.node, plan.servers, plan.overrides, says_id=self._host != plan.node)
        ran = await self._root(scripts.WRITE, str(CONFIG), WRITER, data=text.encode())
        self._expect(ran, f"{CONFIG} can't be written", "ls -ld /etc/llmgw; df -h /etc")
        if "unchanged" in ran.output:
            say("it says that already")
        if "kept" in ran.output:
            say(f"what somebody else had written there is kept as {CONFIG}.replaced")

    async def _identify(self, say: Say) -> None:
        node, signing = self._plan.node, self._plan.signing
        asked = await self._root(f'{INSTALLED} agent request --config "$1" --node "$2"', str(CONFIG), node)
        self._expect(asked, "the node could not make a key", f"sudo {INSTALLED} agent request --node {node}")
        try:
            certificate, self.serial = signing.sign(asked.output, node)
        except PkiError as error:
            raise StepFailed(f"the node's request was not signed: {error}") from error
        given = f"{certificate}{signing.roots}".encode()
        ran = await self._root(f'{INSTALLED} agent accept --config "$1"', str(CONFIG), data=given)
        self._expect(ran, "the node did not take its certificate", "sudo ls -l /var/lib/llmgw-agent/identity")
        for line in ran.output.splitlines():
            say(line)

    async def _trust(self, say: Say) -> None:
        ran = await self._root(scripts.TRUST, data=self._plan.signing.roots.encode())
        if ran.status:
            say(f"not done: {ran.last_words}. Other programs there do not trust the authority; llmgw itself does")

    async def _try_engines(self, say: Say) -> None:
        for name, program, module in self._named:
            ran = await self._root(scripts.ENGINE, program, module, limit_s=610)
            if ran.status:
                look = self._login.shown(f"ldd {program}")
                problem = f"{name}: {program} does not run: {ran.last_words} (look with `{look}`)"
                self.engine_problems.append(problem)
                say(f"{problem}. The node registers without this engine")

    async def _serve(self, say: Say) -> None:
        self._since = time.time() - 1
        # Anew also where it runs: that it registers is to prove the certificate that it has got now.
        ran = await self._root(f'{INSTALLED} agent install --config "$1" --restart', str(CONFIG))
        if ran.status:
            _, said = await self._state()
            raise StepFailed(
                f"the service does not run: {said[-1] if said else ran.last_words}",
                look=self._login.shown("systemctl status llmgw-agent; journalctl -u llmgw-agent -n 50"),
            )
        for line in ran.output.splitlines():
            say(line)

    async def _register(self, say: Say) -> None:
        end = time.monotonic() + self._plan.registered_s
        while True:
            seen = await self._seen(say)
            if seen is None:
                return
            if time.monotonic() + _LOOK_AGAIN_S > end:
                raise StepFailed(
                    f"{self._plan.node} did not register within {self._plan.registered_s:g} s: {seen}",
                    look=self._login.shown("journalctl -u llmgw-agent -n 50"),
                )
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _seen(self, say: Say) -> str | None:
        """None once the node is registered; else what the control plane and the agent say."""
        state, said = await self._state()
        status = state.get("StatusText", "")
        if not status.startswith("connected to "):
            if state.get("ActiveState") == "active":
                return f"the agent says: {status or 'nothing yet'}"
            return f"the service is {state.get('ActiveState')}: {said[-1] if said else status or 'it says nothing'}"
        if self._plan.listed is None:
            say(f"the agent on the node says: {status}")
            return None
        try:
            words = await self._plan.listed()
        except Unlisted as error:
            say(f"the agent on the node says: {status} (the control plane can't be asked from here: {error})")
            return None
        if words is None:
            say(f"the control plane lists it; the agent says: {status}")
        return words

    async def _state(self) -> tuple[dict[str, str], list[str]]:
        """The service as systemd shows it, and the last that the agent wrote."""
        ran = await self._root(scripts.STATE, f"{self._since:.0f}")
        lines = [line.partition("=")[::2] for line in ran.output.splitlines()]
        return dict(lines), [value for name, value in lines if name == "said"]

    # -- what can be wrong with a machine

    def _no_root(self, ran: Ran) -> StepFailed:
        user, host = self._login.user, self._login.host
        return StepFailed(
            f"{user} can't become root on {host}: {ran.last_words}. It needs sudo without a password "
            f"(`{user} ALL=(ALL) NOPASSWD:ALL` in /etc/sudoers.d/{user}), or --ssh-user root",
            look=self._login.shown("sudo -n true"),
        )

    def _check_kind(self, found: dict[str, str]) -> None:
        look = self._login.shown("uname -sm")
        if found.get("system") != "Linux":
            raise StepFailed(f"{self._login.host} runs {found.get('system')}: nodes run Linux", look=look)
        build = self._plan.build
        if build.is_release and self._machine not in ARCHITECTURES:
            raise StepFailed(
                f"{self._login.host} is {self._machine}, and releases are for {' and '.join(ARCHITECTURES)}", look=look
            )
        if build.architecture not in (None, self._machine):
            raise StepFailed(
                f"{self._login.host} is {self._machine}, and {build.file} is for {build.architecture}: give a build "
                "for this architecture with --binary",
                look=look,
            )
        if "systemd" not in found:
            raise StepFailed(
                f"systemd does not run on {self._login.host}: the agent is a service of it",
                look=self._login.shown("ls -d /run/systemd/system"),
            )

    def _check_clock(self, ahead_s: float) -> None:
        if abs(ahead_s) > CLOCK_S:
            way = "ahead of" if ahead_s > 0 else "behind"
            raise StepFailed(
                f"the clock of {self._login.host} is {abs(ahead_s):.0f} s {way} this machine's: certificates would not "
                f"be believed beyond {CLOCK_S:g} s. Set it (`sudo timedatectl set-ntp true`), and run this again",
                look=self._login.shown("date; timedatectl"),
            )

    def _check_room(self, free: Sequence[str]) -> None:
        for line in free:
            folder, _, kib = line.partition(" ")
            there = folder == "/usr/local" and self._installed and self._installed == self._plan.build.sha256
            needed = 0 if there else _NEEDED_KIB.get(folder, 0)
            if kib.isdigit() and int(kib) < needed:
                raise StepFailed(
                    f"{folder} of {self._login.host} has {int(kib) // 1024} MiB free, and {needed // 1024} MiB are "
                    "needed: nothing was written",
                    look=self._login.shown(f"df -h {folder}"),
                )

    # -- on the machine

    async def _root(self, script: str, *words: str, data: bytes = b"", limit_s: float = 120.0) -> Ran:
        try:
            return await self._remote.root(script, *words, data=data, limit_s=limit_s)
        except Unreachable as error:
            raise StepFailed(str(error), look=self._login.shown("true")) from error

    def _expect(self, ran: Ran, what: str, look: str) -> None:
        if ran.status:
            raise StepFailed(f"{what}: {ran.last_words}", look=self._login.shown(look))
