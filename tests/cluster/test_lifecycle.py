"""What comes and goes: nodes, control planes, engines that will not run, and what is stopped while nobody is there."""

from __future__ import annotations

import os
import signal

from tests.cluster.lab import SIM, Lab, alive, eventually
from tests.cluster.streams import ask

QUICK = "nodes: {suspect_after: 2s, lost_after: 4s}\n"
BEATS = "heartbeat_interval: 500ms\n"


def test_a_control_plane_started_again_and_again_sees_one_of_everything(lab: Lab) -> None:
    """Over one store: one node, one replica, the same process, and nothing registered twice."""
    server = lab.server()
    lab.agent("n1")
    before, key = lab.ready(), lab.key()
    token = lab.context().token
    for _ in range(2):
        server.kill()
        server = lab.server()
        eventually(lambda: lab.get("nodes")[0]["connected"], "the node is back", 20)
        after = lab.ready(within_s=20)
        assert [node["id"] for node in lab.get("nodes")] == ["n1"]
        assert [replica["id"] for replica in lab.get("replicas")] == [before["id"]]
        assert (after["generation"], after["pids"], after["restarts"]) == (1, before["pids"], 0)
    assert len(lab.events("node.registered")) == len(lab.events("replica.created")) == 1
    assert len({event["id"] for event in lab.events()}) == len(lab.events())
    assert [found["name"] for found in lab.get("keys")] == ["test"]
    assert lab.context().token == token
    assert ask(lab, key).status_code == 200


def test_several_replicas_are_adopted_by_a_control_plane_that_was_killed() -> None:
    lab = Lab.make(SIM.replace("    profiles:", "    replicas: 3\n    profiles:"))
    try:
        server = lab.server()
        lab.agent("n1")

        def all_ready() -> dict[str, list[int]] | None:
            found = lab.get("replicas")
            ready = len(found) == 3 and all(replica["state"] == "ready" for replica in found)
            return {replica["id"]: replica["pids"] for replica in found} if ready else None

        before = eventually(all_ready, "all are ready", 60)
        lab.ready()
        key = lab.key()
        server.kill()
        assert [ask(lab, key).status_code for _ in range(6)] == [200] * 6
        lab.server()
        eventually(lambda: lab.get("nodes")[0]["connected"], "the node is back", 20)
        assert eventually(all_ready, "all are ready again") == before
        assert [replica["restarts"] for replica in lab.get("replicas")] == [0, 0, 0]
    finally:
        lab.close()


def test_a_node_that_dies_takes_nothing_with_it_for_good() -> None:
    """The only replica of a model is made anew on the other node; the dead one is listed as what it is, at once."""
    lab = Lab.make(SIM, extra=QUICK)
    try:
        lab.server()
        agents = {"n1": lab.agent("n1", BEATS)}
        before = lab.ready()
        agents["n2"] = lab.agent("n2", BEATS)

        def states() -> dict[str, str]:
            return {node["id"]: node["state"] for node in lab.get("nodes")}

        eventually(lambda: states() == {"n1": "ready", "n2": "ready"}, "both nodes are ready")
        home = before["placements"][0]["node"]
        assert home == "n1"
        agents["n1"].kill()
        os.kill(before["pids"][0], signal.SIGKILL)
        after = eventually(
            lambda: (found := lab.replica())["state"] == "ready" and found["id"] != before["id"] and found,
            "another is built",
            40,
        )
        assert after["placements"][0]["node"] == "n2"
        assert states() == {"n1": "lost", "n2": "ready"}
        # The one that was lost is shown for as long as its node could come back with it.
        lost = next(found for found in lab.get("replicas") if found["id"] == before["id"])
        assert (lost["state"], lost["lost"]) == ("failed", True)
        assert (len(lab.get("replicas")), len(lab.get("models"))) == (2, 1)
        assert any("n1" in event["words"] for event in lab.events("replica.failed"))
        assert ask(lab, lab.key()).status_code == 200
    finally:
        lab.close()


def test_an_agent_that_is_frozen_holds_up_no_listing() -> None:
    lab = Lab.make(SIM, extra="nodes: {suspect_after: 2s, lost_after: 1m}\n")
    try:
        lab.server()
        agent = lab.agent("n1", BEATS)
        lab.ready()
        agent.popen.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: lab.get("nodes")[0]["state"] != "ready", "its silence is seen", 20)
            for path in ("status", "nodes", "nodes/n1", "models", "replicas", "engines", "events"):
                lab.get(path)
            (node,) = lab.get("nodes")
            assert "silent" in node["why"] or "stream" in node["why"]
            # The engine serves on: nothing is known against it but the silence of its agent.
            assert ask(lab, lab.key()).status_code == 200
        finally:
            agent.popen.send_signal(signal.SIGCONT)
        eventually(lambda: lab.get("nodes")[0]["state"] == "ready", "it is back", 30)
        assert lab.ready()["restarts"] == 0
    finally:
        lab.close()


def test_an_engine_that_ends_again_and_again_is_counted_and_shown() -> None:
    """Never "starting" for ever: failed with its status, counted, and waited for longer each time."""
    lab = Lab.make(SIM.replace("token_interval: 5ms", "fault: 'exit-at-start:7'"))
    try:
        lab.server()
        lab.agent("n1")
        found = eventually(
            lambda: (now := lab.replica()) and now["restarts"] >= 3 and now, "three ends are counted", 60
        )
        assert found["last_exit"]["status"] == 7
        story = lab.get(f"replicas/{found['id']}")["story"]
        assert sum(1 for line in story if line["state"] == "failed" and "exited with status 7" in line["why"]) >= 3
        assert found["generation"] >= 3
        waits = [event["words"] for event in lab.events("replica.failed")]
        assert [words.rpartition(" in ")[2] for words in waits[:3]] == [
            "1 s at the earliest",
            "2 s at the earliest",
            "4 s at the earliest",
        ]
        assert "exited with status 7" in lab.get("models/sim/why")["replicas"][0][2]
        assert not lab.get("status")["models_ready"]
    finally:
        lab.close()


def test_what_is_stopped_while_its_agent_is_away_is_stopped_when_it_is_back(lab: Lab) -> None:
    server = lab.server()
    agent = lab.agent("n1")
    before = lab.ready()
    agent.kill()
    with lab.admin() as client:
        client.put("models/sim/scale", {"replicas": 0})
    assert lab.replica()["state"] in ("draining", "stopping")
    # Nothing is forgotten before it is known to have ended, whatever is restarted meanwhile.
    server.kill()
    lab.server()
    assert lab.replica()["state"] in ("draining", "stopping")
    assert alive(before["pids"][0])
    lab.agent("n1")
    # A new control plane waits for the lease of tables that an older one may have sent.
    eventually(lambda: not lab.get("replicas"), "it is stopped", 60)
    assert not alive(before["pids"][0])
    with lab.admin() as client:
        client.delete("models/sim/scale")
    assert lab.ready()["id"] != before["id"]


def test_an_engine_whose_agent_lost_its_memory_serves_on(lab: Lab) -> None:
    """What was asked is told again by the control plane: the same process is taken up, and nothing is restarted."""
    lab.server()
    agent = lab.agent("n1")
    before = lab.ready()
    agent.kill()
    for path in (lab.root / "n1" / "work" / "wanted").iterdir():
        path.write_text("{")
    lab.agent("n1")
    eventually(lambda: "not known" in (lab.root / "agent-n1.log").read_text(), "the agent says so")
    eventually(lambda: lab.get("nodes")[0]["state"] == "ready", "the node is back")
    after = lab.ready()
    assert (after["id"], after["generation"], after["pids"], after["restarts"]) == (
        before["id"],
        1,
        before["pids"],
        0,
    )


def test_an_agent_without_its_key_says_which_file_and_what_to_do(lab: Lab) -> None:
    lab.agent_file("n1")
    key = lab.root / "n1" / "n1-key.pem"
    key.unlink()
    agent = lab.run("agent-n1", "agent", "--config", str(lab.root / "n1" / "agent.yaml"))
    assert agent.popen.wait(30) == 1
    assert str(key) in agent.output()
    assert "`llmgw ctl cert issue-client n1 --force`" in agent.output()
    assert "Traceback" not in agent.output()


def test_two_agents_over_one_work_directory_are_one(lab: Lab) -> None:
    """A machine that was cloned with its state, or a second start by hand: the second is refused, in words."""
    lab.server()
    lab.agent("n1")
    before = lab.ready()
    second = lab.run("second", "agent", "--config", str(lab.root / "n1" / "agent.yaml"))
    assert second.popen.wait(30) == 1
    assert "is in use by another agent" in second.output()
    assert "Traceback" not in second.output()
    assert lab.ready()["pids"] == before["pids"]


def test_why_an_engine_fails_can_be_read_while_it_waits_for_its_next_try() -> None:
    lab = Lab.make(SIM.replace("token_interval: 5ms", "fault: 'exit-at-start:7'"))
    try:
        lab.server()
        lab.agent("n1")
        # From its third failure on there are seconds between one try and the next.
        failed = eventually(
            lambda: (found := lab.replica()).get("restarts", 0) >= 3 and not found["placements"] and found, "it waits"
        )
        with lab.admin() as client:
            lines = list(client.lines(f"shards/{failed['id']}/0/logs"))
        assert list(failed["last_exit"]["last_lines"]) == lines[-len(failed["last_exit"]["last_lines"]) :]
        assert lines
    finally:
        lab.close()
