"""``llmgw ctl drain`` and its kin, against a control plane's own admin API over a socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from llmgw.cli.ctl import ctl
from llmgw.cluster.model import Instant, Traffic
from llmgw.control.clock import system_clock
from llmgw.link.server import Peer
from tests.control.floor import TOKEN, ControlFloor, open_floor

DEADLINE_S = 20.0


class Following:
    """``llmgw ctl`` as a process of its own. ``said`` is its stdout so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.said = ""

    async def until(self, words: str) -> str:
        """The line that has these words, once it is printed."""
        assert self._process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := (await self._process.stdout.readline()).decode():
                self.said += line
                if words in line:
                    return line
        raise AssertionError(f"it never said {words!r}, but: {self.said}")

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    async def end(self) -> tuple[int, str, str]:
        """Its exit status, all of its stdout, and its stderr."""
        async with asyncio.timeout(DEADLINE_S):
            out, err = await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode, self.said + out.decode(), err.decode()


class Ahead:
    """The machine's clocks, ``ahead_s`` ahead of it."""

    ahead_s = 0.0

    def __call__(self) -> Instant:
        now = system_clock()
        return Instant(now.wall_s + self.ahead_s, now.monotonic_s + self.ahead_s)


class Lab(ControlFloor):
    url: str
    peers: list[Peer]
    clock: Ahead

    async def lose(self, lost: Peer) -> None:
        """The node falls silent, until it is judged lost; the others go on."""
        self.desk.on_closed(lost, "the connection broke")
        others = [peer for peer in self.peers if peer is not lost]
        while self.plane.cluster.nodes[lost.id].state != "lost":
            self.clock.ahead_s += 3.0
            for peer in others:
                self.beat(peer)
            await self.obey(*others)

    async def start(self, *arguments: str) -> Following:
        environment = {**os.environ, "LLMGW_SERVER": self.url, "LLMGW_TOKEN": TOKEN}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "llmgw", "ctl", *arguments),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return Following(process)

    async def ctl(self, *arguments: str) -> tuple[int, str, str]:
        """The same in this process: exit status, stdout and stderr."""
        environment = {"LLMGW_SERVER": self.url, "LLMGW_TOKEN": TOKEN}
        async with asyncio.timeout(DEADLINE_S):
            found = await asyncio.to_thread(CliRunner().invoke, ctl, arguments, env=environment)
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        return found.exit_code, found.stdout, found.stderr

    async def json(self, *arguments: str) -> Any:
        status, out, err = await self.ctl(*arguments, "-o", "json")
        assert (status, err) == (0, ""), err
        return json.loads(out)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    """Two replicas of ``m``, both on n1; n2 has room for them. Old tables of other gateways have run out."""
    # A control plane's log would go where the commands print that run in this process.
    with capture_logs():
        async with _lab(tmp_path) as found:
            yield found


@asynccontextmanager
async def _lab(folder: Path) -> AsyncIterator[Lab]:
    clock = Ahead()
    async with open_floor(folder, clock=clock) as floor:
        lab = Lab(floor.plane, floor.store, folder)
        async with lab.listening() as url:
            lab.url, lab.clock = url, clock
            clock.ahead_s = lab.plane.cluster.lease_s + 1
            lab.peers = [lab.join("n1")]
            await lab.obey(*lab.peers)
            lab.peers.append(lab.join("n2"))
            await lab.obey(*lab.peers)
            assert placed(lab) == {"n1": 2}
            yield lab


def placed(lab: Lab) -> dict[str, int]:
    found: dict[str, int] = {}
    for replica in lab.plane.cluster.replicas.values():
        for placement in replica.placements:
            found[placement.node] = found.get(placement.node, 0) + 1
    return found


async def test_the_plan_says_where_everything_goes_and_changes_nothing(lab: Lab) -> None:
    status, out, err = await lab.ctl("drain", "n1", "--plan")
    assert (status, err) == (0, "")
    head, *rows = out.splitlines()
    assert head.split() == ["REPLICA", "MODEL", "FROM", "TO", "WEIGHTS"]
    assert [row.split()[1:4] for row in rows] == [["m", "n1", "n2"]] * 2
    answer = await lab.json("drain", "n1", "--plan")
    assert (answer["planned"], answer["refusal"], len(answer["moves"])) == (True, None, 2)
    assert not lab.plane.cluster.drains
    assert placed(lab) == {"n1": 2}


async def test_a_drain_is_followed_to_its_report(lab: Lab) -> None:
    gateway = lab.join_gateway("g1")
    lab.ack(gateway, await lab.table(gateway))
    first, second = sorted(lab.plane.cluster.replicas)
    following = await lab.start("drain", "n1", "--deadline", "10m")
    await following.until("starting")
    assert lab.plane.cluster.drains["n1"].in_flight_s == 600.0
    await lab.obey(*lab.peers)
    lab.ack(gateway, await lab.table(gateway), {first: Traffic(in_flight=3)})
    finishing = await following.until("finishing")
    assert first in finishing
    lab.report(gateway, {first: Traffic(in_flight=0, finished=3)})
    await lab.obey(*lab.peers)
    await following.until(second)
    await lab.obey(*lab.peers)
    lab.ack(gateway, await lab.table(gateway), {first: Traffic(finished=3), second: Traffic()})
    await lab.obey(*lab.peers)
    status, out, err = await following.end()
    assert (status, err) == (0, "")
    *_, report, back = out.splitlines()
    assert report.startswith("n1 is drained: 2 replicas moved, 3 requests finished, 0 broken; starting ")
    status, out, err = await lab.ctl("drain", "n1")
    assert (status, err) == (0, "")
    assert out.startswith("nothing is placed on n1: it is drained\nREPLICA"), "what had moved before is no news"
    assert report in out
    assert [event["kind"] for event in await lab.json("events", "--subject", "n1")].count("drain.done") == 1, (
        "asked again, it does nothing"
    )
    assert back == "`llmgw ctl undrain n1` puts it back to use"
    (row,) = [line for line in out.splitlines() if line.startswith(first) and "finishing 0." in line]
    assert row.split()[1:4] == ["m", "3", "0"]
    assert placed(lab) == {"n2": 2}
    assert "drained" in (await lab.ctl("nodes"))[1]
    assert (await lab.ctl("undrain", "n1"))[:2] == (0, "n1 takes replicas again; what has moved stays where it is\n")
    assert (await lab.ctl("drains"))[1] == "no node is being drained: llmgw ctl drain NODE\n"


async def test_what_cannot_move_starts_nothing_and_says_the_choices(lab: Lab) -> None:
    status, out, err = await lab.ctl("drain", "n2", "--plan")
    assert (status, out) == (0, "nothing is placed on n2: it is drained as soon as that is asked for\n")
    assert (await lab.ctl("drain", "n2", "--no-follow"))[0] == 0
    status, out, err = await lab.ctl("drain", "n1")
    assert status == 1
    assert "nowhere" in out
    assert err.startswith("llmgw ctl: n1 can't be drained now, and nothing was changed")
    assert "--wait" in err
    assert "--allow-downtime m" in err
    assert "--force" in err
    assert set(lab.plane.cluster.drains) == {"n2"}
    assert (await lab.ctl("drain", "n1", "--plan"))[0] == 1, "a script can ask whether it could be drained"
    waiting = await lab.json("drain", "n1", "--wait")
    assert waiting["state"] == "waiting"
    listed = (await lab.ctl("drains"))[1]
    assert "waits until everything can move" in listed
    assert "--wait" in listed
    status_table = (await lab.ctl("status"))[1]
    assert "drain     n1: waits until everything can move: " in status_table


async def test_an_interrupt_leaves_the_drain_going_and_says_so(lab: Lab) -> None:
    following = await lab.start("drain", "n1")
    await following.until("starting")
    following.interrupt()
    status, _, err = await following.end()
    assert status == 130
    assert "the drain of n1 goes on without this command: `llmgw ctl drains` shows how far it is" in err
    assert "`llmgw ctl undrain n1` takes it back" in err
    assert set(lab.plane.cluster.drains) == {"n1"}


async def test_a_node_that_is_lost_meanwhile_is_not_waited_for_and_said_to_be(lab: Lab) -> None:
    following = await lab.start("drain", "n1")
    first = (await following.until("starting")).split()[1]
    await lab.lose(lab.peers[0])
    status, _, err = await following.end()
    assert status == 1
    (second,) = (move.replica for move in lab.plane.cluster.drains["n1"].moves if move.replica != first)
    words = f"llmgw ctl: n1 is not drained yet: 1 of 2 replicas moved; {second} is blocked: was lost with its node"
    assert err.startswith(words), err
    assert "; n1 is lost since " in err
    assert "`llmgw ctl node remove n1` forgets it" in err
    assert "`llmgw ctl drains` shows how far it is" in err
    status, out, again = await lab.ctl("drain", "n1")
    assert (status, again) == (1, err), "asked again, it says the same"
    (row,) = (line for line in out.splitlines() if "nowhere" in line)
    assert row.startswith(second)
    assert "was lost with its node, and n1 may bring it back" in row
    assert (await lab.ctl("drain", "n1", "--plan"))[0] == 0


async def test_an_empty_node_that_is_lost_is_drained_once_it_is_back(lab: Lab) -> None:
    await lab.lose(lab.peers[1])
    status, out, _ = await lab.ctl("drain", "n2", "--plan")
    assert (status, out) == (0, "nothing is placed on n2: it is lost, and drained once it is back\n")


async def test_a_drain_that_is_taken_back_meanwhile_is_no_success(lab: Lab) -> None:
    following = await lab.start("drain", "n1")
    await following.until("starting")
    await lab.ctl("undrain", "n1")
    status, _, err = await following.end()
    assert status == 1
    assert err.startswith("llmgw ctl: the drain of n1 was taken back before it was done")


REFUSED = {
    ("drain", "nobody"): "no node is called 'nobody'",
    ("drain", "n1", "--allow-downtime", "who"): "no model is called 'who'",
    ("undrain", "n1"): "n1 is not being drained",
    ("node", "remove", "n1"): "n1 is connected: only a node that is lost can be forgotten",
    ("brake", "release"): "the brake is not on",
    ("restart", "nobody"): "no model is called 'nobody'",
}


async def test_what_is_refused_is_said_and_ends_with_1(lab: Lab) -> None:
    for arguments, words in REFUSED.items():
        status, out, err = await lab.ctl(*arguments)
        assert (status, out) == (1, ""), arguments
        assert err.startswith(f"llmgw ctl: {words}"), arguments


async def test_a_restart_says_what_it_does(lab: Lab) -> None:
    status, out, err = await lab.ctl("restart", "org/m")
    assert (status, err) == (0, "")
    assert "2 replicas of m" in out
    assert sum(replica.restart for replica in lab.plane.cluster.replicas.values()) == 2


async def test_a_brake_that_is_off_is_said(lab: Lab) -> None:
    assert (await lab.ctl("brake"))[:2] == (0, "the brake is off: silent nodes are judged one by one\n")


async def test_what_if_says_what_would_move_and_what_would_not_fit(lab: Lab, tmp_path: Path) -> None:
    status, out, err = await lab.ctl("what-if", "--lose", "n1")
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith("moves")]
    assert [row[2:5] for row in rows] == [["m", "n1", "n2"]] * 2
    assert out.startswith("suppose   ")
    status, out, err = await lab.ctl("what-if", "--lose", "n1", "--lose", "n2")
    assert (status, err) == (0, "")
    assert "no place  m      2 " in out
    file = tmp_path / "new.yaml"
    file.write_text(lab.file.read_text().replace("replicas: 2", "replicas: 3"))
    answer = await lab.json("what-if", "--file", str(file), "--add", "2×8@ib-a")
    assert [new["model"] for new in answer["new"]] == ["m"]
    assert "2 nodes with 8 GPUs each on fabric ib-a" in " ".join(answer["supposed"])
    assert placed(lab) == {"n1": 2}, "it changes nothing"


async def test_what_can_not_be_supposed_is_refused_in_words(lab: Lab, tmp_path: Path) -> None:
    status, _, err = await lab.ctl("what-if", "--lose", "n9")
    assert (status, "n9" in err) == (1, True)
    status, _, err = await lab.ctl("what-if")
    assert status == 2
    assert "say what to suppose" in err
    status, _, err = await lab.ctl("what-if", "--add", "two")
    assert status == 2
    assert "such as 2x8@ib-a" in err
    status, _, err = await lab.ctl("what-if", "--file", str(tmp_path / "none.yaml"))
    assert status == 1
    assert "none.yaml: No such file or directory (on this machine)" in err
    unsound = tmp_path / "unsound.yaml"
    unsound.write_text("modles: []\n")
    status, _, err = await lab.ctl("what-if", "--file", str(unsound))
    assert status == 1
    assert f"{unsound}:1:1: modles" in err, "the file is named as it was typed"


async def test_a_deadline_is_a_duration(lab: Lab) -> None:
    status, _, err = await lab.ctl("drain", "n1", "--deadline", "10")
    assert status == 2
    assert "expected a duration" in err
    assert "10s, 10ms or 10m" in err
    assert not lab.plane.cluster.drains
