"""The control plane's own files while it runs: its certificate renewed, files taken up, one authority after another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from llmgw.control.certificate_views import authority_view
from llmgw.link.server import Peer
from llmgw.pki import rotation
from llmgw.pki.authority import Authority
from llmgw.pki.certificate import facts_of
from llmgw.pki.contexts import read_identity
from llmgw.pki.issuer import issue_issuer
from llmgw.pki.names import PkiError
from llmgw.pki.roots import read_certificates, root_of
from tests.control.office import DAY_S, Office, open_office


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with open_office(tmp_path) as opened:
        yield opened


def moment(office: Office) -> datetime:
    return datetime.fromtimestamp(office.time().wall_s, UTC)


async def look(office: Office) -> bool:
    return await office.own.look(moment(office))


async def test_the_own_certificate_is_renewed_in_its_last_third(office: Office) -> None:
    told: list[str] = []
    office.own.on_changed.append(lambda: told.append(office.own.identity.own.serial))
    before = office.own.identity.own
    office.time.move(500 * DAY_S)
    assert not await look(office)
    office.time.move(60 * DAY_S)
    assert await look(office)
    after = office.own.identity.own
    assert told == [after.serial]
    assert (after.common_name, after.names, after.uris) == (before.common_name, before.names, before.uris)
    assert after.not_after == moment(office) + timedelta(days=90)
    found = read_identity(office.own.files)
    assert (found.own.serial, found.issued_here) == (after.serial, True)
    assert office.own.files.key.stat().st_mode & 0o777 == 0o600
    assert not await look(office)
    await office.token()


async def test_without_an_issuing_key_it_is_left_alone(tmp_path: Path) -> None:
    async with open_office(tmp_path, issuer=False) as office:
        office.time.move(820 * DAY_S)
        assert not await look(office)
        issue_issuer(Authority.load(office.pki), office.pki, now=moment(office))
        assert await look(office), "one that is put there is taken up, and used"
        assert office.own.identity.own.not_after == moment(office) + timedelta(days=90)
        await office.token()


async def test_files_that_can_not_be_used_are_said_once_and_those_before_stay(office: Office) -> None:
    serial = office.own.identity.own.serial
    (office.pki / "server.pem").write_bytes((office.pki / "ca.pem").read_bytes())
    with pytest.raises(PkiError, match="does not belong to the certificate"):
        await look(office)
    assert not await look(office)
    assert office.own.identity.own.serial == serial


async def test_one_authority_takes_over_from_another_under_nodes_that_renew(office: Office) -> None:
    moved, late = await office.joined("gpu-1"), await office.joined("gpu-2")
    old = office.own.identity.authority.key_id
    newer, _ = rotation.begin(office.pki, now=moment(office))
    assert await look(office)
    key = facts_of(newer.certificate).key_id
    view = authority_view(office.plane, office.own)
    assert [root.key for root in view.roots] == [key, old]
    assert set(view.unmoved) == {"gpu-1", "gpu-2"}
    assert view.server_key == old, "nodes that have not moved yet trust nothing else"
    assert (await office.token("gpu-3")).authority_hash == office.own.identity.authority_hash
    moved = await office.renew(moved)
    assert set(authority_view(office.plane, office.own).unmoved) == {"gpu-1", "gpu-2"}, "it is not used yet"
    assert isinstance(office.dial(moved), Peer)
    view = authority_view(office.plane, office.own)
    assert view.unmoved.keys() == {"gpu-2"}
    assert late.serial in view.unmoved["gpu-2"]
    assert "of the older authority" in view.unmoved["gpu-2"]
    assert isinstance(office.dial(await office.renew(late)), Peer)
    assert authority_view(office.plane, office.own).unmoved == {}
    rotation.finish(office.pki)
    assert await look(office)
    view = authority_view(office.plane, office.own)
    assert ([root.key for root in view.roots], view.server_key) == ([key], key)
    assert office.joining.authority()["ca"].encode() == (office.pki / "ca.pem").read_bytes()
    assert isinstance(office.dial(await office.renew(moved)), Peer)


async def test_while_nodes_still_move_the_own_certificate_is_renewed_by_the_authority_that_all_trust(
    office: Office,
) -> None:
    (old,) = office.own.identity.roots
    before = office.own.identity.own
    rotation.begin(office.pki, now=moment(office))
    rotated = office.own.identity.own.serial
    assert await look(office)
    assert office.own.identity.own.serial == rotated == before.serial
    office.time.move(560 * DAY_S)
    assert await look(office)
    assert office.own.identity.own.not_after == moment(office) + timedelta(days=90)
    certificate, *between = read_certificates(office.own.files.cert, "the certificate")
    assert root_of(certificate, between, [old]) is not None, "a node that has not moved trusts it"
    assert not await look(office)
    rotation.finish(office.pki)
    assert not list(office.pki.glob("*-old*"))
    assert await look(office)
    certificate, *between = read_certificates(office.own.files.cert, "the certificate")
    assert root_of(certificate, between, office.own.identity.roots) is not None
    assert root_of(certificate, between, [old]) is None


async def test_a_node_that_is_away_keeps_the_older_authority(office: Office) -> None:
    await office.joined("gpu-1")
    office.hang_up("gpu-1")
    rotation.begin(office.pki, now=moment(office))
    await look(office)
    office.time.move(5 * DAY_S)
    assert authority_view(office.plane, office.own).unmoved.keys() == {"gpu-1"}


async def test_a_list_of_what_was_revoked_is_written_where_somebody_can_sign_it(tmp_path: Path) -> None:
    async with open_office(tmp_path) as office:
        assert await office.crl.look()
        assert (office.pki / "crl.pem").read_text().count("BEGIN X509 CRL") == 2
        assert not await office.crl.look()
        async with office.admin() as client:
            assert "llmgw_crl_expiry_seconds 604800.0" in (await client.get("/metrics")).text
            office.time.move(8 * DAY_S)
            assert "llmgw_crl_expiry_seconds -" in (await client.get("/metrics")).text
        assert isinstance(office.dial(await office.joined()), Peer), "nobody is judged by it"
        (office.pki / "issuer.pem").unlink()
        (office.pki / "issuer-key.pem").unlink()
        (office.pki / "ca-key.pem").unlink()
        await look(office)
        assert not await office.crl.look()
