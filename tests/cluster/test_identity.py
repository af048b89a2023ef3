"""An agent that can't get in: what an operator finds in its log, and in the control plane's."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from llmgw.pki.authority import Authority
from tests.cluster.lab import SIM, Lab, eventually

DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    lab = Lab.make(SIM, agents_host="0.0.0.0")
    try:
        lab.server()
        yield lab
    finally:
        lab.close()


def another_authority(lab: Lab, node: str, folder: Path) -> str:
    Authority.create(folder / "foreign", cluster="lab").issue_client(node, folder / "tls")
    (folder / "tls" / "ca.pem").write_bytes((lab.root / "pki" / "ca.pem").read_bytes())
    return node


def expired(lab: Lab, node: str, folder: Path) -> str:
    past = datetime.now(UTC) - 2 * DAY
    Authority.load(lab.root / "pki").issue_client(node, folder / "tls", lifetime_s=3600, now=past)
    return node


def not_yet_valid(lab: Lab, node: str, folder: Path) -> str:
    Authority.load(lab.root / "pki").issue_client(node, folder / "tls", now=datetime.now(UTC) + 2 * DAY)
    return node


def of_somebody_else(lab: Lab, node: str, folder: Path) -> str:
    Authority.load(lab.root / "pki").issue_client("somebody-else", folder / "tls")
    return "somebody-else"


@pytest.mark.parametrize(
    ("make", "agent_says", "server_says"),
    [
        (of_somebody_else, ("somebody-else", "issue-client"), ("somebody-else", "of-somebody-else")),
        (another_authority, ("not by the authority in", "issued by"), ("leads from its certificate to our authority",)),
        (expired, ("expired", "issue-client"), ("expired",)),
        (not_yet_valid, ("not valid before", "clock"), ("not valid yet", "clock")),
    ],
)
def test_a_certificate_that_does_not_let_it_in(shared: Lab, tmp_path: Path, make, agent_says, server_says) -> None:  # type: ignore[no-untyped-def]
    node = make.__name__.replace("_", "-")
    server = shared.procs[0]
    before = len(server.output())
    holder = make(shared, node, tmp_path)
    agent = start(shared, node, tmp_path, holder)
    try:
        for words in agent_says:
            eventually(lambda words=words: words in agent.output(), f"{words!r} in the agent's log", 20)
        for words in server_says:
            eventually(lambda words=words: words in server.output()[before:], f"{words!r} in the server's log", 20)
        assert agent.popen.poll() is None
        assert node not in {each["id"] for each in shared.get("nodes")}
        assert "Traceback" not in agent.output() + server.output()
    finally:
        agent.kill()


def test_a_server_certificate_that_lacks_the_dialled_address(shared: Lab, tmp_path: Path) -> None:
    Authority.load(shared.root / "pki").issue_client("wrong-address", tmp_path / "tls")
    agent = start(shared, "wrong-address", tmp_path, "wrong-address", host="127.0.0.2")
    try:
        eventually(lambda: "127.0.0.2" in agent.output() and "--san" in agent.output(), "the agent's log says so", 20)
        assert "localhost" in agent.output()
    finally:
        agent.kill()


def test_a_second_machine_with_the_id_of_one_that_is_there(shared: Lab, tmp_path: Path) -> None:
    """The first is left alone; the event names both addresses."""
    from llmgw.link.client import ClientIdentity, LinkClient
    from llmgw.link.messages import Hello

    issued = Authority.load(shared.root / "pki").issue_client("twin", tmp_path / "tls")
    identity = ClientIdentity(ca=issued.ca, cert=issued.cert, key=issued.key)

    def link(fingerprint: str) -> LinkClient:
        return LinkClient(
            role="node",
            id="twin",
            servers=(f"https://127.0.0.1:{shared.ports['agents']}",),
            tls=identity,
            hello=lambda: Hello(role="node", id="twin", fingerprint=fingerprint, boot_id=fingerprint, probed=True),
            vitals=lambda: None,
            on_frame=lambda frame: None,
            on_state=lambda state: None,
        )

    first, second = link("machine-1"), link("machine-2")
    first.start()
    try:
        eventually(lambda: first.state.connected, "the first is in")
        session = first.state.session
        second.start()
        events = eventually(
            lambda: [event for event in shared.events("peer.refused") if event["subject"] == "twin"],
            "the second is refused",
        )
        assert events[-1]["words"].count("127.0.0.1:") >= 2
        eventually(lambda: "another machine" in second.state.words, "it is told why")
        assert not second.state.connected
        assert first.state.connected
        assert first.state.session == session
    finally:
        first.stop()
        second.stop()


def start(lab: Lab, node: str, folder: Path, holder: str, host: str = "127.0.0.1"):  # type: ignore[no-untyped-def]
    tls = folder / "tls"
    path = folder / "agent.yaml"
    path.write_text(
        f"server: https://{host}:{lab.ports['agents']}\nnode_id: {node}\n"
        f"tls: {{ca: {tls}/ca.pem, cert: {tls}/{holder}.pem, key: {tls}/{holder}-key.pem}}\n"
        f"weights_dir: {folder}/weights\nengines_dir: {folder}/engines\n"
        f"supervisor: {{work_dir: {folder}/work}}\nreconnect_base: 200ms\n"
    )
    return lab.run(f"agent-{node}", "agent", "--config", str(path))
