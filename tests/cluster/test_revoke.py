"""A node that is revoked under load: cut off at once, out of the routing table, and built anew elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

from llmgw.pki.authority import Authority
from llmgw.pki.issuer import issue_issuer
from tests.cluster.lab import SIM, Lab, eventually
from tests.cluster.streams import ask, start_streams

NODES = "nodes: {suspect_after: 4s, lost_after: 8s}\n"


def ctl(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    context = lab.context()
    return subprocess.run(
        [sys.executable, "-m", "llmgw", "ctl", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "LLMGW_SERVER": context.server, "LLMGW_TOKEN": context.token},
        check=False,
    )


def test_a_node_that_is_revoked_under_load() -> None:
    lab = Lab.make(SIM, extra=NODES)
    try:
        lab.server()
        agents = {node: lab.agent(node) for node in ("n1", "n2")}
        eventually(lambda: [node["state"] for node in lab.get("nodes")] == ["ready", "ready"], "both are ready", 60)
        replica, key = lab.ready(), lab.key()
        gone = str(replica["placements"][0]["node"])
        other = "n2" if gone == "n1" else "n1"
        streams = start_streams(lab, key, 4, 200)
        with lab.admin() as client:
            answer = client.post(f"certificates/{gone}/revoke", {"why": "stolen"})

            def cut_off() -> bool:
                node = next(node for node in client.get("nodes") if node["id"] == gone)
                return node["state"] == "revoked" and not node["connected"]

            eventually(cut_off, "its stream is closed", 20, every_s=0.01)
        assert answer["closed"] is True
        ((id, state, why),) = [(each["id"], each["state"], each["why"]) for each in answer["replicas"]]
        assert id == replica["id"]
        assert state != "ready"
        assert why
        eventually(lambda: "(stolen)" in agents[gone].output(), "the agent's log says so", 20)

        def elsewhere() -> bool:
            found = lab.replica()
            return found.get("state") == "ready" and found["placements"][0]["node"] == other

        eventually(elsewhere, "what ran there runs elsewhere", 60)
        assert ask(lab, key).status_code == 200
        for stream in streams:
            stream.join()
            assert stream.done or stream.error, f"it ended after {stream.tokens} tokens, and nobody said why"
        story = ctl(lab, "events", "--subject", id).stdout
        assert gone in story
        assert "revoked" in story
        again = ctl(lab, "cert", "list", gone, "--all")
        assert "revoked" in again.stdout
        agents[gone].kill()
        restarted = lab.agent(gone)
        eventually(lambda: restarted.output().count("was revoked") > 1, "it is refused again", 30)
        assert next(node for node in lab.get("nodes") if node["id"] == gone)["state"] == "revoked"
    finally:
        lab.close()


def test_a_control_plane_that_was_off_until_its_certificate_expired_renews_it_and_starts() -> None:
    lab = Lab.make(SIM)
    pki = lab.root / "pki"
    try:
        authority = Authority.load(pki)
        past = datetime.now(UTC) - timedelta(days=2)
        names = ["127.0.0.1", "localhost"]
        authority.issue_server(names, pki, "head", lifetime_s=3600.0, renew=True, now=past)
        refused = lab.run("server-refused", "server", "--config", str(lab.server_file))
        assert refused.popen.wait(40) == 1
        assert "expired on" in refused.output()
        issue_issuer(authority, pki)
        lab.server()
        lab.agent("n1")
        eventually(lambda: [node["state"] for node in lab.get("nodes")] == ["ready"], "its node trusts it", 60)
    finally:
        lab.close()
