"""A peer whose identity was renewed: dials anew with it at once, the old session closed before."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llmgw.link.client import ClientIdentity, LinkClient
from llmgw.link.messages import Observed
from llmgw.pki.contexts import Identity
from tests.link.ends import End, Pki, Recorder, client_files, make_end, make_server


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki.make(tmp_path)


class Swapped:
    """A node's files behind a link that can be swapped."""

    def __init__(self, pki: Pki, folder: Path) -> None:
        self._pki = pki
        self._folder = folder
        self._count = 0
        self.renew()
        self.files = ClientIdentity(*(folder / "current" / name for name in ("ca.pem", "n1.pem", "n1-key.pem")))

    def renew(self) -> str:
        return self.renew_by(self._pki)

    def renew_by(self, pki: Pki) -> str:
        self._count += 1
        out = self._folder / str(self._count)
        issued = pki.authority.issue_client("n1", out)
        # Whom the node trusts stays the same.
        (out / "ca.pem").write_bytes(self._pki.server.ca.read_bytes())
        draft = self._folder / "draft"
        draft.symlink_to(out)
        draft.replace(self._folder / "current")
        assert client_files(issued).cert.exists()
        return issued.serial


@pytest.fixture
async def told(pki: Pki) -> AsyncIterator[tuple[Recorder, str]]:
    told = Recorder()
    server = make_server(pki, told)
    await server.start()
    yield told, f"https://127.0.0.1:{server.port}"
    await server.stop()


def begun(url: str, swapped: Swapped, **options: Any) -> End:
    end = make_end([url], swapped.files, "n1", **options)
    end.client.start()
    return end


async def test_the_new_certificate_is_used_at_once(pki: Pki, told: tuple[Recorder, str], tmp_path: Path) -> None:
    recorder, url = told
    swapped = Swapped(pki, tmp_path)
    end = begun(url, swapped, reconnect_base_s=60, reconnect_max_s=60)
    try:
        ((first,),) = await recorder.wait("welcomed")
        serial = swapped.renew()
        end.client.redial("the certificate was renewed")
        (_, (second,)) = await recorder.wait("welcomed", 2)
        assert first.identity.serial != second.identity.serial == serial
        kinds = [entry[0] for entry in recorder.told if entry[0] in ("welcomed", "closed")]
        assert kinds == ["welcomed", "closed", "welcomed"]
        assert "the same process connected again" in recorder.of("closed")[0][1]
        assert end.client.state.connected
        assert all(state.connected for state in list(end.states.queue)), "at no time was there no session"
        heartbeats = len(recorder.of("heartbeat"))
        await recorder.wait("heartbeat", heartbeats + 1)
        assert recorder.of("heartbeat")[-1][0] is second
    finally:
        await asyncio.to_thread(end.client.stop)


async def test_one_that_waits_before_it_dials_again_waits_no_longer(
    pki: Pki, told: tuple[Recorder, str], tmp_path: Path
) -> None:
    recorder, url = told
    swapped = Swapped(pki, tmp_path)
    end = begun(url, swapped, reconnect_base_s=60, reconnect_max_s=60)
    try:
        ((peer,),) = await recorder.wait("welcomed")
        peer.end("cut by the test")
        await end.connected()
        await end.failed()
        end.client.redial("there is a reason to")
        await recorder.wait("welcomed", 2)
    finally:
        await asyncio.to_thread(end.client.stop)


async def test_a_session_that_was_dialled_with_the_identity_of_before_is_not_kept(
    pki: Pki, told: tuple[Recorder, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the old certificate would be heard on the stream while the new one is used elsewhere."""
    recorder, url = told
    swapped = Swapped(pki, tmp_path)
    end = make_end([url], swapped.files, "n1", reconnect_base_s=60, reconnect_max_s=60)
    read = end.client._dialling._contexts.current
    serials: list[str] = []

    def and_renew() -> tuple[ssl.SSLContext, Identity]:
        made = read()
        if not serials:
            serials.append(swapped.renew())
            LinkClient.redial(end.client, "renewed while it dials")
        return made

    monkeypatch.setattr(end.client._dialling._contexts, "current", and_renew)
    end.client.start()
    try:
        ((peer,),) = await recorder.wait("welcomed")
        assert [peer.identity.serial] == serials
    finally:
        await asyncio.to_thread(end.client.stop)


async def test_where_the_new_identity_is_not_let_in_the_session_goes_on(
    pki: Pki, told: tuple[Recorder, str], tmp_path: Path
) -> None:
    recorder, url = told
    swapped = Swapped(pki, tmp_path)
    end = begun(url, swapped)
    try:
        ((first,),) = await recorder.wait("welcomed")
        swapped.renew_by(Pki.make(tmp_path / "other", "lab"))
        end.client.redial("the certificate was renewed")
        await recorder.wait("refused")
        beats = len(recorder.of("heartbeat"))
        await recorder.wait("heartbeat", beats + 2)
        assert end.client.state.session == first.session
        assert recorder.of("closed") == []
        serial = swapped.renew()
        end.client.redial("once more")
        (_, (second,)) = await recorder.wait("welcomed", 2)
        assert second.identity.serial == serial
    finally:
        await asyncio.to_thread(end.client.stop)


async def test_what_is_sent_while_it_goes_over_arrives(pki: Pki, told: tuple[Recorder, str], tmp_path: Path) -> None:
    recorder, url = told
    swapped = Swapped(pki, tmp_path)
    end = begun(url, swapped)
    try:
        await recorder.wait("welcomed")
        for revision in range(1, 41):
            if revision % 10 == 0:
                swapped.renew()
                end.client.redial("the certificate was renewed")
            end.client.send(Observed(epoch=0, session=0, revision=revision))
            await asyncio.sleep(0)
        await recorder.wait("welcomed", 2)
        end.client.send(Observed(epoch=0, session=0, revision=99))
        async with asyncio.timeout(20):
            while not any(frame.revision == 99 for _, frame in recorder.of("frame")):
                recorder.changed.clear()
                await recorder.changed.wait()
        revisions = [frame.revision for _, frame in recorder.of("frame")]
        assert revisions == sorted(set(revisions)), "none comes twice, and none after a later one"
    finally:
        await asyncio.to_thread(end.client.stop)


async def test_a_link_that_was_asked_to_dial_anew_stops_at_once(
    pki: Pki, told: tuple[Recorder, str], tmp_path: Path
) -> None:
    recorder, url = told
    end = begun(url, Swapped(pki, tmp_path))
    await recorder.wait("welcomed")
    end.client.redial("for no reason")
    await asyncio.to_thread(end.client.stop)
    assert end.client.state.words == "stopped"
