"""Certificates on a node's disk: swapped whole, whenever the machine stops."""

from __future__ import annotations

import os
import random
import stat
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from llmgw.agent.identity import IdentityStore, NamedFiles, Pair
from llmgw.agent.renewal import due_at
from llmgw.pki.authority import Authority
from llmgw.pki.chain import Chain, read_chain
from llmgw.pki.issuer import Issuer, issue_issuer
from llmgw.pki.names import PkiError
from llmgw.pki.signing_request import key_hash
from tests.agent.cut_short import killed_at

NODE = "n1"


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    folder = tmp_path_factory.mktemp("identity-pki")
    return issue_issuer(Authority.create(folder, "lab"), folder)


@pytest.fixture
def in_memory() -> Iterator[IdentityStore]:
    """Thousands of times is much for a disk that has to be waited for each time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield IdentityStore(Path(folder) / "identity")


@pytest.fixture
def store(tmp_path: Path) -> IdentityStore:
    return IdentityStore(tmp_path / "identity")


def sign(issuer: Issuer, key: ec.EllipticCurvePrivateKey, now: datetime | None = None) -> Chain:
    signed = issuer.sign_node(NODE, key.public_key(), 86_400, now or datetime.now(UTC))
    roots = (issuer.directory / "ca.pem").read_bytes()
    return read_chain(signed.chain, roots, node=NODE, key=key)


def renew(store: IdentityStore, issuer: Issuer, purpose: str) -> Pair:
    key = store.key_for(purpose)
    return store.install(sign(issuer, key), key, purpose)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def folders(store: IdentityStore) -> list[str]:
    return sorted(each.name for each in store.directory.iterdir() if each.is_dir() and not each.is_symlink())


def test_a_pair_is_written_and_is_the_current_one(store: IdentityStore, issuer: Issuer) -> None:
    pair = renew(store, issuer, "token-1")
    current = store.current()
    assert current is not None
    assert (current.serial, current.node) == (pair.serial, NODE)
    assert os.readlink(store.directory / "current") == pair.serial
    folder = store.directory / pair.serial
    assert mode(folder / "key.pem") == 0o600
    assert mode(folder / "cert.pem") == mode(store.ca) == 0o644
    assert (folder / "cert.pem").read_text().count("BEGIN CERTIFICATE") == 2
    assert not list((store.directory / "pending").iterdir())


def test_two_pairs_are_kept(store: IdentityStore, issuer: Issuer) -> None:
    serials = [renew(store, issuer, f"renewal-of-{n}").serial for n in range(4)]
    assert folders(store) == sorted([*serials[-2:], "pending"])


def test_a_key_is_the_same_until_it_has_its_certificate(store: IdentityStore, issuer: Issuer) -> None:
    first = store.key_for("request")
    assert key_hash(store.key_for("request").public_key()) == key_hash(first.public_key())
    assert mode(store.directory / "pending") == 0o700
    assert mode(store.directory / "pending" / "request.pem") == 0o600
    store.install(sign(issuer, first), first, "request")
    assert key_hash(store.key_for("request").public_key()) != key_hash(first.public_key())
    kept = store.key_for("token-1")
    store.install(sign(issuer, kept), kept, "token-1")
    assert key_hash(store.key_for("token-1", also_current=True).public_key()) == key_hash(kept.public_key())


def test_a_key_that_was_cut_short_is_made_anew(store: IdentityStore) -> None:
    store.key_for("request")
    path = store.directory / "pending" / "request.pem"
    path.write_bytes(path.read_bytes()[:40])
    store.key_for("request")
    assert store.has_key_for("request")


def test_at_a_start_the_newest_pair_that_is_whole_wins(store: IdentityStore, issuer: Issuer) -> None:
    first, second = (renew(store, issuer, f"renewal-of-{n}") for n in range(2))
    (store.directory / "current").unlink()
    (store.directory / "current").symlink_to(first.serial)
    settled = store.settle()
    assert settled is not None
    assert settled.serial == second.serial == os.readlink(store.directory / "current")
    for name, content in (("cert.pem", b""), ("key.pem", (store.directory / first.serial / "key.pem").read_bytes())):
        (store.directory / second.serial / name).write_bytes(content)
        settled = store.settle()
        assert settled is not None
        assert settled.serial == first.serial == os.readlink(store.directory / "current")


def test_no_clock_decides_which_pair_is_the_newest(store: IdentityStore, issuer: Issuer) -> None:
    """One that was issued while the authority's clock was behind came later all the same."""
    renew(store, issuer, "renewal-of-1")
    key = store.key_for("renewal-of-2")
    later = store.install(sign(issuer, key, datetime.now(UTC) - timedelta(hours=1)), key, "renewal-of-2")
    settled = store.settle()
    assert settled is not None
    assert settled.serial == later.serial


def test_the_paths_of_the_agents_file_lead_into_it(store: IdentityStore, issuer: Issuer, tmp_path: Path) -> None:
    pair = renew(store, issuer, "token-1")
    named = NamedFiles(*(tmp_path / "etc" / name for name in ("ca.pem", "agent.pem", "agent-key.pem")))
    named.key.parent.mkdir()
    named.key.write_text("what lay there")
    named.key.chmod(0o600)
    assert store.link(named) == [tmp_path / "etc" / "agent-key.pem.replaced"]
    assert (tmp_path / "etc" / "agent-key.pem.replaced").read_text() == "what lay there"
    assert mode(tmp_path / "etc" / "agent-key.pem.replaced") == 0o600
    assert named.cert.read_bytes() == (store.directory / pair.serial / "cert.pem").read_bytes()
    assert store.leads_here(named.cert)
    assert not store.leads_here(tmp_path / "other.pem")
    assert store.link(named) == []
    assert sorted(path.name for path in named.ca.parent.iterdir()) == [
        "agent-key.pem",
        "agent-key.pem.replaced",
        "agent.pem",
        "ca.pem",
    ]


def test_a_folder_that_may_not_be_written_to_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "identity").write_text("a file")
    with pytest.raises(PkiError, match="identity"):
        IdentityStore(tmp_path / "identity").key_for("request")


def test_the_moment_of_renewal_is_of_the_time_that_the_pair_is_here(store: IdentityStore, issuer: Issuer) -> None:
    pair = renew(store, issuer, "token-1")
    part = (due_at(pair, datetime.now(UTC)) - pair.since) / (pair.not_after - pair.since)
    assert 0.45 <= part <= 0.60
    assert due_at(pair, datetime.now(UTC)) == due_at(pair, datetime.now(UTC))
    parts = {due_at(renew(store, issuer, f"renewal-of-{n}"), datetime.now(UTC)) for n in range(5)}
    assert len(parts) == 5


# -- kill -9


def answered(store: IdentityStore, chain: Chain, purpose: str) -> None:
    store.install(chain, store.key_for(purpose), purpose)


class Ledger:
    """What the authority's side goes by: one certificate in use, at most one to come; whoever is of before is out."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self.current = ""
        self.next: Chain | None = None
        self.replaced = 0

    def grant(self, key: ec.EllipticCurvePrivateKey, now: datetime | None = None) -> Chain:
        if self.next is None or key_hash(self.next.leaf.public_key()) != key_hash(key.public_key()):
            self.next = sign(self._issuer, key, now)
        return self.next

    def use(self, serial: str) -> None:
        if self.next is not None and serial == self.next.facts.serial:
            self.current, self.next = serial, None
            self.replaced += 1
        assert serial == self.current, "locked out: a certificate was shown that had been replaced"


def test_a_kill_at_any_step_of_a_renewal_locks_nobody_out(in_memory: IdentityStore, issuer: Issuer) -> None:
    store, ledger = in_memory, Ledger(issuer)
    key = store.key_for("token-1")
    ledger.use(store.install(ledger.grant(key), key, "token-1").serial)
    step, interrupted, whole = 0, 0, False
    while not whole:
        before = store.current()
        assert before is not None
        purpose = f"renewal-of-{before.serial}"
        whole = not killed_at(step, partial(store.key_for, purpose))
        interrupted += not whole
        chain = ledger.grant(store.key_for(purpose))
        done = not killed_at(step, partial(answered, store, chain, purpose))
        interrupted += not done
        whole = whole and done
        settled = store.settle()
        assert settled is not None
        assert [path.name for path in store.directory.rglob(".*")] == [".lock"], "nothing half made stays, keys least"
        ledger.use(settled.serial)
        step += 1
    assert interrupted > 40
    assert ledger.replaced > 10


def test_a_year_of_renewals_with_a_kill_every_now_and_then(in_memory: IdentityStore, issuer: Issuer) -> None:
    """24-hour certificates, renewed about half way: every third renewal is cut short somewhere."""
    rng = random.Random(7)
    store, ledger = in_memory, Ledger(issuer)
    now = datetime.now(UTC)
    end = now + timedelta(days=365)
    key = store.key_for("token-1")
    pair = store.install(ledger.grant(key), key, "token-1")
    ledger.use(pair.serial)
    while now < end:
        purpose = f"renewal-of-{pair.serial}"
        chain = ledger.grant(store.key_for(purpose), now)
        if rng.random() < 0.33:
            killed_at(rng.randrange(60), partial(answered, store, chain, purpose))
        else:
            store.install(chain, store.key_for(purpose), purpose)
        settled = store.settle()
        assert settled is not None
        assert settled.not_after > now
        ledger.use(settled.serial)
        # An agent that came back tries again soon.
        now += timedelta(hours=rng.uniform(10.8, 14.4)) if settled.serial != pair.serial else timedelta(minutes=10)
        pair = settled
    assert ledger.replaced > 500
    assert len(folders(store)) <= 3
