"""A machine becomes a node: whom it trusts, what it sends, and what it finds in words when it can't."""

from __future__ import annotations

import base64
import re
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from typer.testing import CliRunner

from llmgw.agent.joining import JoinRefused, Place, accept, join, place_of, request
from llmgw.cli.app import app
from llmgw.config import load_agent
from llmgw.pki.join_token import JoinToken, parse_join_token
from llmgw.pki.names import PkiError
from tests.agent.issuing import Issuing


@pytest.fixture
async def issuing(tmp_path: Path) -> AsyncIterator[Issuing]:
    async with Issuing.make(tmp_path / "cp").serving() as found:
        yield found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return place_of(tmp_path / "etc" / "agent.yaml", tmp_path / "work")


def nothing_was_made(place: Place) -> bool:
    return place.store.current() is None and not place.file.exists()


async def test_a_token_makes_a_node(issuing: Issuing, place: Place) -> None:
    issuing.labels = {"rack": "a 1", "tier": "true"}
    joined = await join(issuing.token(), (), place)
    assert (joined.pair.node, joined.wrote, list(joined.notes)) == ("n1", place.file, [])
    config = load_agent(place.file)
    assert config.servers == (issuing.url,)
    assert (config.node_id, config.labels) == ("n1", {"rack": "a 1", "tier": "true"})
    assert config.supervisor.work_dir == place.work_dir
    assert stat.S_IMODE(place.file.stat().st_mode) == 0o644
    assert stat.S_IMODE(config.tls.key.stat().st_mode) == 0o600
    assert config.tls.cert.read_text() == next(iter(issuing.issued.values()))
    assert config.tls.ca.read_text() == issuing.roots
    assert sorted(path.name for path in place.file.parent.iterdir()) == [
        "agent-key.pem",
        "agent.pem",
        "agent.yaml",
        "ca.pem",
    ]


async def test_the_host_name_is_not_written_down_as_the_id(
    issuing: Issuing, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "n1")
    await join(issuing.token(), (), place)
    assert load_agent(place.file).node_id is None


async def test_no_private_key_is_in_any_byte_that_is_sent(issuing: Issuing, place: Place) -> None:
    joined = await join(issuing.token(), (), place)
    sent = bytes(issuing.wire)
    assert b"CERTIFICATE REQUEST" in sent
    assert issuing.secret.encode() in sent
    key = load_pem_private_key(joined.named.key.read_bytes(), None)
    number = key.private_numbers().private_value.to_bytes(32, "big")  # type: ignore[union-attr]
    pkcs8 = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    assert b"PRIVATE KEY" not in sent
    for form in (number, number.hex().encode(), base64.b64encode(pkcs8)[:40], base64.b64encode(number)[:40]):
        assert form not in sent


async def test_the_secret_goes_to_no_other_authority(issuing: Issuing, place: Place, tmp_path: Path) -> None:
    async with Issuing.make(tmp_path / "other").serving() as other:
        token = issuing.token(addresses=(other.url,))
        with pytest.raises(JoinRefused, match="another authority than the token names") as refused:
            await join(token, (), place)
        assert issuing.secret.encode() not in bytes(other.wire)
        assert other.asked == ["/v1/authority"]
    assert "was not sent" in str(refused.value)
    assert nothing_was_made(place)


async def test_the_secret_goes_to_nobody_who_shows_that_authority_and_has_no_certificate_of_it(
    issuing: Issuing, place: Place, tmp_path: Path
) -> None:
    """Whoever answers in its place can copy ca.pem; its key it has not."""
    impostor = Issuing.make(tmp_path / "other")
    impostor.authority = issuing.authority
    async with impostor.serving():
        with pytest.raises(JoinRefused, match="not of the authority that the token names"):
            await join(issuing.token(addresses=(impostor.url,)), (), place)
        assert issuing.secret.encode() not in bytes(impostor.wire)
        assert impostor.asked == ["/v1/authority"]
    assert nothing_was_made(place)


async def test_a_server_certificate_that_lacks_the_dialled_address(place: Place, tmp_path: Path) -> None:
    async with Issuing.make(tmp_path / "named", sans=("cp.example",)).serving() as issuing:
        with pytest.raises(JoinRefused, match=r"127\.0\.0\.1") as refused:
            await join(issuing.token(), (), place, pauses_s=())
        assert issuing.secret.encode() not in bytes(issuing.wire)
    assert "was not sent" in str(refused.value)
    assert nothing_was_made(place)


@pytest.mark.parametrize("lost", [1, 3])
async def test_a_lost_answer_is_asked_for_again_with_the_same_key(issuing: Issuing, place: Place, lost: int) -> None:
    issuing.lose = lost
    await join(issuing.token(), (), place, pauses_s=(0.01, 0.01, 0.01))
    assert issuing.asked.count("/v1/join") == lost + 1
    assert len(issuing.issued) == 1


async def test_a_machine_that_stopped_before_the_answer_asks_with_the_same_key(issuing: Issuing, place: Place) -> None:
    issuing.lose = 99
    with pytest.raises(JoinRefused, match="run the same command again"):
        await join(issuing.token(), (), place, pauses_s=())
    assert nothing_was_made(place)
    issuing.lose = 0
    joined = await join(issuing.token(), (), place)
    assert len(issuing.issued) == 1
    # And once more, after it has its certificate: the same answer, and nothing else on the disk.
    again = await join(issuing.token(), (), place_of(place.file, None))
    assert again.pair.serial == joined.pair.serial
    assert len(issuing.issued) == 1


async def test_servers_are_tried_in_turn(issuing: Issuing, place: Place) -> None:
    token = issuing.token(addresses=("https://127.0.0.1:1", issuing.url))
    await join(token, (), place)
    assert load_agent(place.file).servers == token.addresses


async def test_servers_that_are_named_come_before_those_of_the_token(issuing: Issuing, place: Place) -> None:
    await join(issuing.token(addresses=("https://127.0.0.1:1",)), (issuing.url,), place)
    assert load_agent(place.file).servers == (issuing.url,)


@pytest.mark.parametrize("code", ["token_unknown", "token_used", "token_expired", "revoked", "no_issuer"])
async def test_a_refusal_is_told_as_it_came_and_not_tried_again(issuing: Issuing, place: Place, code: str) -> None:
    issuing.refuse = (code, f"refused for {code}")
    with pytest.raises(JoinRefused, match=f"refused for {code}"):
        await join(issuing.token(), (), place)
    assert issuing.asked.count("/v1/join") == 1
    assert nothing_was_made(place)


async def test_a_clock_that_differs_is_told_with_the_difference(issuing: Issuing, place: Place) -> None:
    issuing.ahead_s = -600
    issuing.refuse = ("clock", "the clocks differ too much")
    with pytest.raises(JoinRefused, match=r"10\.0 minutes ahead of the control plane's"):
        await join(issuing.token(), (), place)
    assert nothing_was_made(place)


async def test_an_answer_for_another_key_is_not_taken(issuing: Issuing, place: Place, tmp_path: Path) -> None:
    other = place_of(tmp_path / "etc2" / "agent.yaml", tmp_path / "work2")
    await join(issuing.token(), (), other)
    (chain,) = issuing.issued.values()

    class Always(dict[str, str]):
        def get(self, key: str, default: object = None) -> str:
            return chain

    issuing.issued = Always()
    with pytest.raises(JoinRefused, match="for another key"):
        await join(issuing.token(), (), place)
    assert nothing_was_made(place)


async def test_a_file_that_is_there_stays_as_it_is(issuing: Issuing, place: Place, tmp_path: Path) -> None:
    folder = place.file.parent
    folder.mkdir()
    text = (
        "server: https://10.9.9.9:7443\nnode_id: n1\n"
        f"tls: {{ca: {folder}/a.pem, cert: {folder}/b.pem, key: {folder}/c.pem}}\n"
        f"supervisor: {{work_dir: {tmp_path}/elsewhere}}\n"
    )
    place.file.write_text(text)
    (folder / "b.pem").write_text("of before")
    issuing.labels = {"rack": "a1"}
    joined = await join(issuing.token(), (), place_of(place.file, None))
    assert place.file.read_text() == text
    assert joined.wrote is None
    assert (folder / "c.pem").resolve().is_relative_to(tmp_path / "elsewhere" / "identity")
    assert (folder / "b.pem.replaced").read_text() == "of before"
    assert any("10.9.9.9" in note for note in joined.notes)
    assert any("rack=a1" in note for note in joined.notes)


async def test_a_token_for_another_node_than_the_file_says(issuing: Issuing, place: Place) -> None:
    place.file.parent.mkdir()
    place.file.write_text("server: https://a:7443\nnode_id: n2\ntls: {ca: a, cert: b, key: c}\n")
    with pytest.raises(JoinRefused, match=r"for node 'n1', but this one is 'n2' .*ctl node token n2"):
        await join(issuing.token(), (), place_of(place.file, None))
    assert issuing.asked == []


def test_a_work_dir_that_contradicts_the_file(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("server: https://a:7443\ntls: {ca: a, cert: b, key: c}\n")
    with pytest.raises(JoinRefused, match="contradicts"):
        place_of(file, tmp_path / "work")


# -- without a control plane


def test_a_request_is_signed_elsewhere_and_accepted(issuing_alone: Issuing, place: Place) -> None:
    csr = request("n1", place)
    assert "PRIVATE" not in csr
    assert place.store.has_key_for("request")
    signed = issuing_alone.sign("n1", csr)
    joined = accept(signed + issuing_alone.roots, place)
    assert joined.pair.node == "n1"
    assert joined.named.cert.read_text() == signed
    with pytest.raises(JoinRefused, match="no key waits"):
        accept(signed + issuing_alone.roots, place)


@pytest.fixture
def issuing_alone(tmp_path: Path) -> Issuing:
    return Issuing.make(tmp_path / "cp")


def test_an_answer_that_is_not_whole_is_refused_in_words(issuing_alone: Issuing, place: Place, tmp_path: Path) -> None:
    csr = request("n1", place)
    signed = issuing_alone.sign("n1", csr)
    foreign = Issuing.make(tmp_path / "foreign").roots
    leaf = signed[: signed.index("-----END") + len("-----END CERTIFICATE-----\n")]
    for text, words in (
        (signed, "ca.pem"),
        (issuing_alone.roots, "node's certificate"),
        ("", "PEM"),
        (signed + foreign, "does not lead to the authority"),
        (leaf + issuing_alone.roots, "does not lead to the authority"),
    ):
        with pytest.raises(JoinRefused, match=re.escape(words)):
            accept(text, place)
    assert place.store.current() is None
    accept(signed + issuing_alone.roots, place)


# -- the token, and the command


def test_a_token_says_what_it_said(issuing_alone: Issuing) -> None:
    token = issuing_alone.token()
    assert parse_join_token(f" {token}\n") == token
    assert token.secret not in repr(token)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("hunter2", "no token"),
        ("llmgw-join-2.abc", "another version"),
        ("llmgw-join-1.", "not whole"),
        ("llmgw-join-1.%%%%", "not whole"),
        ("llmgw-join-1." + base64.urlsafe_b64encode(b'{"h":1}').decode(), "can't be read"),
        ("llmgw-join-1." + "A" * 9000, "longer than"),
    ],
)
def test_a_token_that_is_none_is_refused_and_not_quoted(text: str, words: str) -> None:
    with pytest.raises(PkiError, match=words) as refused:
        parse_join_token(text)
    assert "hunter2" not in str(refused.value)


def test_every_cut_of_a_token_is_refused() -> None:
    token = str(JoinToken(authority_hash="a" * 64, id="i", secret="s" * 20, node="n", addresses=("https://a:1",)))
    for length in range(len(token)):
        with pytest.raises(PkiError):
            parse_join_token(token[:length])


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    run = CliRunner().invoke
    where = ["--config", str(tmp_path / "agent.yaml"), "--work-dir", str(tmp_path / "work")]
    assert run(app, ["agent", "join", *where]).exit_code == 2
    assert run(app, ["agent", "join", "--token", "a", "--token-file", "-", *where]).exit_code == 2
    refused = run(app, ["agent", "join", "--token-file", "-", *where], input="hunter2\n")
    assert (refused.exit_code, "no token" in refused.output, "hunter2" in refused.output) == (1, True, False)
    asked = run(app, ["agent", "request", "--node", "n1", *where])
    assert asked.output.startswith("-----BEGIN CERTIFICATE REQUEST-----")
    refused = run(app, ["agent", "accept", *where], input="nothing")
    assert (refused.exit_code, "PEM" in refused.output) == (1, True)
