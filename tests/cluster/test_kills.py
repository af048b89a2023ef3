"""What is serving goes on serving, whichever process is killed."""

from __future__ import annotations

import os
import random
import signal

from tests.cluster.lab import Lab, alive, eventually
from tests.cluster.streams import ask, start_streams


def test_control_plane_killed_under_streams(lab: Lab) -> None:
    """Not one stream breaks, new requests are served; started again it adopts engine and gateway as they are."""
    server = lab.server()
    lab.agent("n1")
    before = lab.ready()
    key, gateway = lab.key(), lab.gateway_pid()
    streams = start_streams(lab, key, 8, tokens=400)

    server.kill()
    assert ask(lab, key).status_code == 200

    lab.server()
    # Its state alone is what was stored: it counts for nothing before the node has said again what it runs.
    eventually(lambda: lab.get("nodes")[0]["connected"], "the node is back", 10)
    after = lab.ready(within_s=10)
    for stream in streams:
        stream.join()
        assert (stream.error, stream.done, stream.tokens) == ("", True, 400)
    assert (after["id"], after["generation"], after["pids"], after["restarts"]) == (
        before["id"],
        1,
        before["pids"],
        0,
    )
    assert lab.gateway_pid() == gateway
    assert [event["words"] for event in lab.events("gateway.kept")][-1] == f"gateway adopted, pid {gateway}"
    assert ask(lab, key).status_code == 200


def test_agent_killed_ten_times(lab: Lab) -> None:
    """At random points of its life: the engine is the same process, never restarted, its output whole."""
    lab.server()
    agent = lab.agent("n1")
    before = lab.ready()
    key = lab.key()
    shard = f"{before['id']}/0"
    with lab.admin() as client:
        output = list(client.lines(f"shards/{shard}/logs"))
    assert output
    rng = random.Random(7)
    for _ in range(10):
        agent.kill()
        assert ask(lab, key).status_code == 200
        agent = lab.agent("n1")
        # From before it has read its own files to after it has reported.
        try:
            agent.popen.wait(rng.uniform(0.0, 3.0))
        except Exception:
            assert agent.popen.poll() is None, agent.output()
    after = eventually(
        lambda: lab.get("nodes")[0]["state"] == "ready" and lab.ready(), "the node is back and its replica ready"
    )
    assert (after["id"], after["generation"], after["restarts"]) == (before["id"], 1, 0)
    assert after["pids"] == before["pids"]
    with lab.admin() as client:
        assert list(client.lines(f"shards/{shard}/logs"))[: len(output)] == output


def test_engine_killed(lab: Lab) -> None:
    """Reported with its signal and last lines, started again as a new generation; requests meanwhile are answered."""
    lab.server()
    lab.agent("n1")
    before = lab.ready()
    key = lab.key()
    os.kill(before["pids"][0], signal.SIGKILL)
    answer = ask(lab, key)
    if answer.status_code != 200:
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["message"]
    after = eventually(
        lambda: (found := lab.replica())["generation"] == 2 and found["state"] == "ready" and found, "it is back"
    )
    assert after["restarts"] == 1
    assert after["pids"] != before["pids"]
    assert after["last_exit"]["signal"] == "SIGKILL"
    assert any("listening on" in line for line in after["last_exit"]["last_lines"])
    assert any("SIGKILL" in event["words"] for event in lab.events("replica.failed"))
    assert ask(lab, key).status_code == 200


def test_engine_that_ends_while_the_agent_is_away(lab: Lab) -> None:
    """Seen at the agent's next start, and only then started again, by the control plane's verdict."""
    lab.server()
    agent = lab.agent("n1")
    before = lab.ready()
    agent.kill()
    os.kill(before["pids"][0], signal.SIGKILL)
    eventually(lambda: not alive(before["pids"][0]), "the engine is gone")
    lab.agent("n1")
    after = eventually(
        lambda: (found := lab.replica())["generation"] == 2 and found["state"] == "ready" and found, "it is back"
    )
    assert after["restarts"] == 1
    assert after["last_exit"]["signal"] == "SIGKILL"


def test_gateway_killed(lab: Lab) -> None:
    """Started again by the control plane, with the table it had."""
    lab.server()
    lab.agent("n1")
    lab.ready()
    key, first = lab.key(), lab.gateway_pid()
    os.kill(first, signal.SIGKILL)
    eventually(lambda: any(event["kind"] == "gateway.ended" for event in lab.events()), "its end is an event")
    eventually(lambda: _asked(lab, key) == 200, "requests are served again", 20)
    assert lab.gateway_pid() != first
    assert lab.replica()["restarts"] == 0


def test_everything_stopped_and_started_again(lab: Lab) -> None:
    """Control plane and agent stopped in an orderly way: the engine serves on, and is adopted."""
    server = lab.server()
    agent = lab.agent("n1")
    before = lab.ready()
    key = lab.key()
    assert agent.terminate() == 0, agent.output()
    assert server.terminate() == 0, server.output()
    assert ask(lab, key).status_code == 200
    lab.server()
    lab.agent("n1")
    eventually(lambda: lab.get("nodes")[0]["connected"], "the node is back", 20)
    after = lab.ready()
    assert (after["generation"], after["pids"], after["restarts"]) == (1, before["pids"], 0)


def _asked(lab: Lab, key: str) -> int:
    try:
        return ask(lab, key, 5).status_code
    except Exception:
        return 0
