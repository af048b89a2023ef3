"""Several ranks as real processes, each on a loopback address of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llmgw.engines.sim import RENDEZVOUS_VARIABLE
from llmgw.simulator.rendezvous import BEAT_S, SILENT_BEATS

from .conftest import KEY
from .test_server import DEADLINE_S, HEADERS, http

__all__ = ["http"]

SILENT_S = BEAT_S * SILENT_BEATS


@dataclass
class Rank:
    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def says(self, pattern: str) -> re.Match[str]:
        """The first line, from the beginning, that matches."""
        for line in self.lines:
            if found := re.search(pattern, line):
                return found
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := (await self.process.stdout.readline()).decode():
                self.lines.append(line)
                if found := re.search(pattern, line):
                    return found
        raise AssertionError(f"ended without saying {pattern!r}: {self.lines}")

    async def ended(self) -> int:
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            self.lines += [line.decode() async for line in self.process.stdout]
            return await self.process.wait()


StartRank = Callable[..., Coroutine[Any, Any, Rank]]


@pytest.fixture
async def start_rank() -> AsyncIterator[StartRank]:
    ranks: list[Rank] = []

    async def start(number: int, nodes: int, where: str, *flags: str, model: str = "m", key: str = "g1") -> Rank:
        argv = [sys.executable, "-m", "llmgw.simulator", "--host", f"127.0.0.{number + 1}", "--port", "0"]
        argv += ["--model", model, "--rank", str(number), "--nodes", str(nodes), "--dist-init", where, *flags]
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], "LLMGW_SIM_API_KEY": KEY, RENDEZVOUS_VARIABLE: key},
        )
        ranks.append(Rank(process))
        return ranks[-1]

    yield start
    for rank in ranks:
        if rank.process.returncode is None:
            rank.process.kill()
        await rank.ended()


@dataclass
class Group:
    ranks: list[Rank]
    where: str
    url: str = ""

    async def serves(self) -> str:
        self.url = (await self.ranks[0].says(r"listening on (http://\S+),"))[1]
        return self.url


StartGroup = Callable[..., Coroutine[Any, Any, Group]]


@pytest.fixture
def start_group(start_rank: StartRank) -> StartGroup:
    """Ranks 0 to N-1, each with the same flags, as a replica's are."""

    async def start(nodes: int, *flags: str, serving: bool = True) -> Group:
        leader = await start_rank(0, nodes, "127.0.0.1:0", *flags)
        where = (await leader.says(r"waiting for ranks? .* at (\S+)"))[1]
        ranks = [leader, *[await start_rank(number, nodes, where, *flags) for number in range(1, nodes)]]
        group = Group(ranks, where)
        if serving:
            await group.serves()
        return group

    return start


def completion(**options: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hello", "max_tokens": 1, "ignore_eos": True, **options}


async def complete(http: aiohttp.ClientSession, url: str, **options: Any) -> dict[str, Any]:
    async with http.post(f"{url}/v1/completions", json=completion(**options), headers=HEADERS) as answer:
        assert answer.status == 200
        body: dict[str, Any] = await answer.json()
        return body


async def stats_of(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.get(f"{url}/sim/stats") as answer:
        body: dict[str, Any] = await answer.json()
        return body


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which the process listens."""
    sockets = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    listen = "0A"
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == listen and f"socket:[{row[9]}]" in sockets}


async def test_nothing_is_served_before_every_rank_has_joined(start_rank: StartRank) -> None:
    leader = await start_rank(0, 4, "127.0.0.1:0")
    where = (await leader.says(r"waiting for ranks 1, 2, 3 of 4 at (127\.0\.0\.1:\d+)$"))[1]
    assert listening_ports(leader.pid) == {int(where.rpartition(":")[2])}
    second = await start_rank(2, 4, where)
    await leader.says(f"waiting for ranks 1, 3 of 4 at {where}")
    await second.says("rank 2 of 4 has joined")
    third = await start_rank(3, 4, where)
    await leader.says(f"waiting for rank 1 of 4 at {where}")
    assert not any("listening" in line for line in leader.lines)
    first = await start_rank(1, 4, where)
    port = int((await leader.says(r"listening on http://127\.0\.0\.1:(\d+), model m"))[1])
    assert listening_ports(leader.pid) == {port, int(where.rpartition(":")[2])}
    for worker in (first, second, third):
        await worker.says("has loaded m")
        assert listening_ports(worker.pid) == set()


async def test_workers_may_come_first_and_loading_is_waited_for(start_rank: StartRank) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    worker = await start_rank(1, 2, where, "--load-time", "0.3")
    await worker.says(f"rank 1 of 2 dials rank 0 at {where}: Connection refused; trying on")
    leader = await start_rank(0, 2, where)
    await leader.says("waiting for rank 1 of 2 to load")
    await leader.says("listening on")
    assert sum("Connection refused" in line for line in worker.lines) == 1, "said once, however often it dials"


async def test_every_token_goes_through_all_ranks(start_group: StartGroup, http: aiohttp.ClientSession) -> None:
    group = await start_group(3)
    answer = await complete(http, group.url, max_tokens=5)
    assert answer["usage"]["completion_tokens"] == 5
    shown = (await stats_of(http, group.url))["ranks"]
    assert shown == [
        {"rank": 1, "address": "127.0.0.2", "steps": 5},
        {"rank": 2, "address": "127.0.0.3", "steps": 5},
    ]
    for path, body in (("embeddings", {"input": "a"}), ("rerank", {"query": "a", "documents": ["b"]})):
        async with http.post(f"{group.url}/v1/{path}", json={"model": "m", **body}, headers=HEADERS) as response:
            assert response.status == 200
    assert [rank["steps"] for rank in (await stats_of(http, group.url))["ranks"]] == [7, 7]


async def test_the_text_is_the_same_over_one_node_and_over_two(
    start_group: StartGroup, start: Callable[..., Any], http: aiohttp.ClientSession
) -> None:
    group = await start_group(2)
    alone = start()
    asked = {"max_tokens": 20}
    over_two = await complete(http, group.url, **asked)
    assert (await complete(http, alone.url, **asked))["choices"] == over_two["choices"]


async def test_a_worker_that_dies_ends_the_leader_at_once_and_it_all_the_others(
    start_group: StartGroup, http: aiohttp.ClientSession
) -> None:
    group = await start_group(3, "--token-interval", "0.05")
    body = completion(stream=True, max_tokens=1000)
    async with http.post(f"{group.url}/v1/completions", json=body, headers=HEADERS) as answer:
        await answer.content.readuntil(b"\n\n")
        group.ranks[1].process.kill()
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
    assert await group.ranks[0].ended() == 1
    await group.ranks[0].says(r"rank 1 \(127\.0\.0\.2\) is gone: its connection was closed")
    assert await group.ranks[2].ended() == 1
    await group.ranks[2].says(r"has ended: rank 1 \(127\.0\.0\.2\) is gone: its connection was closed")


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 2), (3, 1)])
async def test_whichever_rank_is_killed_no_other_stays(start_group: StartGroup, order: tuple[int, int]) -> None:
    """One side dies, then another while the rest are ending: all of the generation are gone, whatever the order."""
    group = await start_group(4, serving=False)
    await group.ranks[0].says("all 4 ranks have joined")
    for number in order:
        if group.ranks[number].process.returncode is None:
            group.ranks[number].process.kill()
    statuses = await asyncio.gather(*(rank.ended() for rank in group.ranks))
    assert all(status != 0 for status in statuses), [rank.lines for rank in group.ranks]


async def test_a_leader_that_dies_ends_its_workers(start_group: StartGroup) -> None:
    group = await start_group(3)
    group.ranks[0].process.kill()
    for worker in group.ranks[1:]:
        assert await worker.ended() == 1
        await worker.says(rf"rank 0 at {group.where} is gone: its connection was closed")


async def test_a_leader_that_is_stopped_ends_its_workers_in_order(start_group: StartGroup) -> None:
    group = await start_group(2)
    group.ranks[0].process.terminate()
    assert await group.ranks[0].ended() == 0
    assert await group.ranks[1].ended() == 0
    await group.ranks[1].says("has ended: it was stopped")


async def test_a_worker_that_is_stopped_ends_the_leader(start_group: StartGroup) -> None:
    group = await start_group(2)
    group.ranks[1].process.terminate()
    assert await group.ranks[1].ended() == 0
    assert await group.ranks[0].ended() == 1
    await group.ranks[0].says(r"rank 1 \(127\.0\.0\.2\) is gone: it was stopped")


async def test_a_rank_that_falls_silent_ends_the_others(start_group: StartGroup) -> None:
    """As behind a cut cable: nothing is closed, and nothing comes any more. Either way round."""

    async def freeze(group: Group, frozen: int, other: int) -> None:
        group.ranks[frozen].process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        assert await group.ranks[other].ended() == 1
        assert time.monotonic() - stopped > SILENT_S * 0.9
        await group.ranks[other].says(f"is gone: it has been silent for {SILENT_S:g} s")

    groups = [await start_group(2), await start_group(2)]
    await asyncio.gather(freeze(groups[0], 1, 0), freeze(groups[1], 0, 1))


async def test_a_rank_that_was_itself_stopped_does_not_hold_it_against_the_others(
    start_group: StartGroup, http: aiohttp.ClientSession
) -> None:
    """All of a machine's processes stop and go on together, as under a hypervisor that pauses it."""
    group = await start_group(2)
    for rank in group.ranks:
        rank.process.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(time.sleep, SILENT_S + 0.5)  # the pause itself; there is no event to wait for
    for rank in group.ranks:
        rank.process.send_signal(signal.SIGCONT)
    await complete(http, group.url, max_tokens=3)
    assert all(rank.process.returncode is None for rank in group.ranks)


# -- who may join


OTHERS: list[tuple[int, int, dict[str, str], str]] = [
    (1, 2, {"key": "g2"}, "it belongs to another replica, or to another generation of this one"),
    (1, 2, {"model": "other"}, "it runs the model 'other', and this replica runs 'm'"),
    (2, 3, {}, "it was started for 3 nodes, and this replica has 2"),
]
"""Rank, nodes, what else differs, and what is said of it."""


async def test_a_rank_of_something_else_is_refused_and_the_right_one_still_joins(start_rank: StartRank) -> None:
    leader = await start_rank(0, 2, "127.0.0.1:0")
    where = (await leader.says(r"waiting for rank 1 of 2 at (\S+)"))[1]
    for number, nodes, options, words in OTHERS:
        wrong = await start_rank(number, nodes, where, **options)
        assert await wrong.ended() == 1
        await wrong.says(f"refused this rank: .*{words}")
        await leader.says(f"was not taken in: .*{words}")
    await start_rank(1, 2, where)
    await leader.says("listening on")


async def test_a_second_rank_1_is_refused_and_the_first_serves_on(
    start_group: StartGroup, start_rank: StartRank, http: aiohttp.ClientSession
) -> None:
    group = await start_group(2)
    twin = await start_rank(1, 2, group.where)
    assert await twin.ended() == 1
    await twin.says("rank 1 has joined already, from 127.0.0.2")
    await complete(http, group.url)


async def test_strangers_at_the_rendezvous_disturb_nobody(start_rank: StartRank) -> None:
    leader = await start_rank(0, 2, "127.0.0.1:0")
    where = (await leader.says(r"waiting for rank 1 of 2 at (\S+)"))[1]
    host, _, port = where.partition(":")
    for said, words in (
        (b"GET / HTTP/1.1\r\n\r\n", "it does not speak as a rank of the simulated engine does"),
        (b"\x16\x03\x01\n", "it does not speak"),
        (b"{}\n", "it does not speak"),
        (b'{"type": "loaded"}\n', "it said 'loaded' where `hello` was expected"),
        (b"x" * 70_000, "it sent more than 65536 bytes without an end of line"),
        (b"", "its connection was closed"),
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        assert json.loads(await reader.readline())["type"] == "challenge"
        writer.write(said)
        if not said:
            writer.write_eof()
        await leader.says(f"127.0.0.1 dialled .* and was not taken in: {words}")
        writer.close()
    await start_rank(1, 2, where)
    await leader.says("listening on")


async def test_a_worker_does_not_follow_an_impostor(start_rank: StartRank) -> None:
    """Whatever listens where rank 0 should must prove that it is of this generation too."""

    async def pose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"type": "challenge", "nonce": "n"}\n')
        await reader.readline()
        writer.write(b'{"type": "welcome", "proof": "guessed"}\n')
        await reader.read()
        writer.close()

    async with await asyncio.start_server(pose, "127.0.0.1", 0) as impostor:
        host, port = impostor.sockets[0].getsockname()
        worker = await start_rank(1, 2, f"{host}:{port}")
        assert await worker.ended() == 1
    await worker.says("is not rank 0 of this replica: its rendezvous key is another")


async def test_ranks_that_never_meet_give_up_in_words(start_rank: StartRank) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    worker = await start_rank(2, 3, where)
    await worker.says("dials rank 0")
    leader = await start_rank(0, 3, where, "--start-timeout", "3")
    assert await leader.ended() == 1
    await leader.says(f"waiting for rank 1 of 3 at {where}")
    await leader.says(f"rank 1 of 3 did not join at {where} within 3 s")
    assert await worker.ended() == 1
    await worker.says(f"has ended: rank 1 of 3 did not join at {where} within 3 s")
    late = await start_rank(1, 3, where, "--start-timeout", "0.5")
    assert await late.ended() == 1
    await late.says(f"rank 0 at {where} was not joined in 0.5 s: Connection refused")


async def test_a_taken_rendezvous_port_is_said(start_rank: StartRank) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        leader = await start_rank(0, 2, where)
        assert await leader.ended() == 1
    await leader.says(f"can't listen for the other ranks on {where}: Address already in use")


# -- faults of any rank


async def set_fault(http: aiohttp.ClientSession, url: str, kind: str | None, rank: object) -> tuple[int, Any]:
    async with http.post(f"{url}/sim/fault", json={"kind": kind, "rank": rank}) as answer:
        return answer.status, await answer.json()


async def test_a_worker_that_hangs_hangs_every_answer_while_health_says_200(
    start_group: StartGroup, http: aiohttp.ClientSession
) -> None:
    group = await start_group(2)
    assert (await set_fault(http, group.url, "hang", 1))[0] == 200
    async with http.get(f"{group.url}/health") as answer:
        assert answer.status == 200
    with pytest.raises(asyncio.TimeoutError):
        await http.post(
            f"{group.url}/v1/completions",
            json=completion(),
            headers=HEADERS,
            timeout=aiohttp.ClientTimeout(total=0.3),
        )
    assert (await set_fault(http, group.url, None, 1))[0] == 200
    await complete(http, group.url)


async def test_faults_by_flag_strike_one_rank_alone(start_group: StartGroup, http: aiohttp.ClientSession) -> None:
    """A replica's ranks all get the same flags: a fault names the rank that it is for."""
    group = await start_group(3, "--fault", "slow-tokens:0.2@2")
    began = time.monotonic()
    await complete(http, group.url, max_tokens=2)
    assert time.monotonic() - began >= 0.4
    assert (await stats_of(http, group.url))["fault"] is None


async def test_a_worker_dies_after_n_tokens(start_group: StartGroup, http: aiohttp.ClientSession) -> None:
    group = await start_group(2, "--fault", "die-after:3@1")
    body = completion(stream=True, max_tokens=50)
    async with http.post(f"{group.url}/v1/completions", json=body, headers=HEADERS) as answer:
        for _ in range(3):
            assert (await answer.content.readuntil(b"\n\n")).startswith(b"data: {")
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
    assert await group.ranks[1].ended() == -signal.SIGKILL
    assert await group.ranks[0].ended() == 1


async def test_a_request_that_has_got_nothing_yet_is_cut_off_too(
    start_group: StartGroup, http: aiohttp.ClientSession
) -> None:
    group = await start_group(2, "--fault", "die-after:0@1")
    with pytest.raises(aiohttp.ClientError):
        await http.post(f"{group.url}/v1/completions", json=completion(), headers=HEADERS)
    assert await group.ranks[0].ended() == 1
    assert not any("Traceback" in line for line in group.ranks[0].lines)


@pytest.mark.parametrize("hung", [0, 1])
async def test_hanging_in_the_rendezvous_is_said_by_the_rank_that_waits(start_rank: StartRank, hung: int) -> None:
    flags = ("--fault", f"hang-in-rendezvous@{hung}")
    leader = await start_rank(0, 2, "127.0.0.1:0", *flags)
    where = (await leader.says(r"waiting for rank 1 of 2 at (\S+)"))[1]
    worker = await start_rank(1, 2, where, *flags, "--start-timeout", "1")
    assert await worker.ended() == 1
    await worker.says(f"rank 0 at {where} was not joined in 1 s: no answer")
    assert leader.process.returncode is None


async def test_exit_at_start_of_one_rank(start_rank: StartRank) -> None:
    leader = await start_rank(0, 2, "127.0.0.1:0", "--fault", "exit-at-start:9@1")
    where = (await leader.says(r"waiting for rank 1 of 2 at (\S+)"))[1]
    worker = await start_rank(1, 2, where, "--fault", "exit-at-start:9@1")
    assert await worker.ended() == 9


async def test_faults_that_no_rank_can_have(start_group: StartGroup, http: aiohttp.ClientSession) -> None:
    group = await start_group(2)
    asked: list[tuple[str, object, str]] = [
        ("hang", 2, "there is no rank 2: ranks of this replica go from 0 to 1"),
        ("hang", -1, "Expected 'rank' to be a whole number, from 0"),
        ("hang", "1", "Expected 'rank' to be a whole number, from 0"),
        ("health-500", 1, "health-500 is rank 0's alone"),
        ("hang-in-rendezvous", 1, "the ranks have met already"),
    ]
    for kind, rank, words in asked:
        status, body = await set_fault(http, group.url, kind, rank)
        assert status == 400
        assert words in body["error"]["message"]
    await complete(http, group.url)
