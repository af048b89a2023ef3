"""Tokens and certificates over the admin API, and as ``llmgw ctl`` shows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from llmgw.cli.ctl import ctl
from llmgw.pki.authority import Authority
from llmgw.pki.join_token import parse_join_token
from tests.control.floor import TOKEN
from tests.control.office import DAY_S, Machine, Office, open_office


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with open_office(tmp_path) as opened:
        yield opened


async def run(office: Office, *arguments: str) -> Result:
    """``llmgw ctl`` against the office."""
    async with office.admin() as client:
        options = ["--server", str(client.base_url).rstrip("/"), "--token", TOKEN]
        runner = CliRunner(env={"COLUMNS": "200"})
        return await asyncio.to_thread(runner.invoke, ctl, [*options, *arguments])


def said(answer: Result) -> list[str]:
    """What the command printed: the control plane of this process logs to the same place."""
    return [line for line in answer.stdout.splitlines() if not line.startswith("[")]


async def test_a_token_alone_on_stdout(office: Office) -> None:
    made = await run(office, "node", "token", "gpu-1", "--ttl", "30m", "--label", "rack=a3")
    assert made.exit_code == 0, made.stderr
    token = parse_join_token(said(made)[0])
    assert said(made) == [str(token)]
    assert "lets one machine join as gpu-1 until " in made.stderr
    assert "llmgw agent join --server https://10.0.0.1:7443 --token-file -" in made.stderr
    given = await office.join(token, Machine("gpu-1"))
    assert given.labels == {"rack": "a3"}
    stored = office.plane.book.token(token.id)
    assert stored is not None
    assert stored.expires_at - stored.created_at == 1800.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("node", "token"), "say which node"),
        (("node", "token", "a", "b"), "one node at a time"),
        (("node", "token", "a", "--label", "x"), "KEY=VALUE was expected"),
        (("node", "token", "a", "--ttl", "x"), "expected a duration"),
        (("node", "show", "a", "--replace"), "belong to `node token`"),
        (("node", "token", "../a"), "error: node id '../a' can't be used"),
        (("node", "token", "server"), "node id 'server' can't be used"),
        (("node", "token", "a", "--ttl", "30d"), "less than or equal to"),
        (("cert", "show", "gpu-7"), "no node or serial is called 'gpu-7'"),
        (("cert", "revoke", "gpu-7"), "no node or serial is called 'gpu-7'"),
        (("cert", "renew", "gpu-7"), "no node is called 'gpu-7'"),
    ],
)
async def test_what_is_refused(office: Office, arguments: tuple[str, ...], words: str) -> None:
    answer = await run(office, *arguments)
    assert answer.exit_code in (1, 2)
    assert words in " ".join(answer.stderr.split())


async def test_certificates_are_listed_shown_and_revoked(office: Office) -> None:
    machine = await office.joined()
    listed = await run(office, "cert", "list")
    assert "gpu-1" in listed.stdout
    assert machine.serial in listed.stdout
    shown = await run(office, "cert", "show", machine.serial)
    assert f"certificate {machine.serial} of node gpu-1: current" in shown.stdout
    assert "first on " in shown.stdout
    revoked = await run(office, "cert", "revoke", "gpu-1", "--why", "stolen")
    assert revoked.exit_code == 0, revoked.stderr
    assert said(revoked)[0] == "gpu-1: 1 certificate revoked; its stream is closed"
    assert "none that is taken" in (await run(office, "cert", "list")).stdout
    assert "stolen" in (await run(office, "cert", "list", "gpu-1", "--all")).stdout
    assert "revoked" in (await run(office, "nodes")).stdout
    for options in ((), ("--plan",), ("--wait", "--no-follow")):
        drained = await run(office, "drain", "gpu-1", *options)
        assert (drained.exit_code, said(drained)) == (1, [])
        assert drained.stderr.startswith("llmgw ctl: gpu-1 is revoked: nothing is placed on it")
        assert "llmgw ctl node remove gpu-1" in drained.stderr
    removed = await run(office, "node", "remove", "gpu-1")
    assert removed.exit_code == 0, removed.stderr
    assert said(removed) == ["gpu-1 is forgotten, and its certificates are revoked"]


async def test_nodes_are_listed_with_a_warning_before_their_certificates_expire(office: Office) -> None:
    await office.joined()
    office.time.move(0.5 * DAY_S)
    await office.floor.settled()
    assert "certificate" not in (await run(office, "nodes")).stdout, "half of its life is no news"
    office.time.move(0.3 * DAY_S)
    warned = " ".join((await run(office, "nodes")).stdout.split())
    assert "its certificate expires on " in warned
    assert "its agent renews it by itself, and has not: its log says why" in warned


async def test_the_older_authority_is_not_dropped_before_all_have_moved(office: Office) -> None:
    machine = await office.joined()
    begun = await run(office, "cert", "rotate-ca", "--dir", str(office.pki))
    assert begun.exit_code == 0, begun.stderr
    early = await run(office, "cert", "rotate-ca", "--finish", "--dir", str(office.pki))
    assert early.exit_code == 1
    assert "the control plane does not trust the newer authority" in early.stderr
    assert await office.own.look(datetime.fromtimestamp(office.time().wall_s, UTC))
    unmoved = await run(office, "cert", "rotate-ca", "--finish", "--dir", str(office.pki))
    assert unmoved.exit_code == 1
    assert f"gpu-1: uses certificate {machine.serial} of the older authority" in unmoved.stderr
    assert "nothing was changed" in unmoved.stderr
    assert len(Authority.load(office.pki).roots) == 2
    office.dial(await office.renew(machine))
    finished = await run(office, "cert", "rotate-ca", "--finish", "--dir", str(office.pki))
    assert finished.exit_code == 0, finished.stderr
    assert len(Authority.load(office.pki).roots) == 1
