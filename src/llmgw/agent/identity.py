"""A node's certificates and keys on disk: written whole, swapped at once, the one before kept.

::

    identity/
      ca.pem              what is trusted: one authority, or two while they change
      current             -> SERIAL
      SERIAL/             cert.pem (leaf and issuer), key.pem (0600), pair.json
      pending/            keys that were made here and have no certificate yet, by what they were made for

A pair is whole before its folder has its name, and ``current`` is swapped after that: whenever the machine stops, the
next start finds the pair before or the new one. Pairs are numbered as they come, so that no clock decides which is
the newest.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from llmgw.agent.fetch.disk import sync_folder
from llmgw.pki.certificate import facts_of
from llmgw.pki.chain import Chain, belongs_to, certificates_of
from llmgw.pki.files import CERT_MODE, KEY_MODE, replace
from llmgw.pki.names import PkiError
from llmgw.pki.signing_request import key_of_pem, new_key, pem_of_key

KEPT = 2
CURRENT = "current"
DRAFT = ".new-"
GONE = ".gone-"
LOCK = ".lock"
RENEWAL = "renewal-of-"
"""What a key is made for that replaces a pair: this and the pair's serial."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its key that belong together. Times are UTC."""

    folder: Path
    number: int
    """Counts up with each pair that comes."""
    origin: str
    """What its key was made for, as ``IdentityStore.key_for`` was told."""
    leaf: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    since: datetime
    """When it was written here."""

    @property
    def serial(self) -> str:
        return facts_of(self.leaf).serial

    @property
    def node(self) -> str:
        return facts_of(self.leaf).common_name

    @property
    def not_after(self) -> datetime:
        return self.leaf.not_valid_after_utc


@dataclass(frozen=True, slots=True)
class NamedFiles:
    """Where the agent's file says that its certificates are."""

    ca: Path
    cert: Path
    key: Path


class IdentityStore:
    """``directory`` is WORK_DIR/identity. Everything here waits for the disk: call it from a thread.

    Raises PkiError, in words, where the disk does not let it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = directory / "ca.pem"

    def current(self) -> Pair | None:
        """The pair in use; None where there is none, or where it can't be used."""
        try:
            # Its own folder, so that what is read belongs together also while another pair comes.
            return _read_pair((self.directory / CURRENT).resolve())
        except (PkiError, OSError, RuntimeError):
            return None

    def settle(self) -> Pair | None:
        """At a start: the newest pair that is whole is the current one, what was left half made goes."""
        if not self.directory.is_dir():
            return None
        with self._locked():
            for rest in (*self.directory.glob(f"{DRAFT}*"), *self.directory.glob(f"{GONE}*")):
                shutil.rmtree(rest, ignore_errors=True)
            # Files that were being written: keys that nobody has a use for any more among them.
            for rest in (*self.directory.glob(".*"), *(self.directory / "pending").glob(".*")):
                if rest.name != LOCK and (rest.is_symlink() or rest.is_file()):
                    rest.unlink(missing_ok=True)
            pairs = self._pairs()
            if not pairs:
                return None
            newest = pairs[-1]
            self._point_at(newest.folder)
            self._forget_older(pairs)
            return newest

    def key_for(self, purpose: str, *, also_current: bool = False) -> ec.EllipticCurvePrivateKey:
        """The key that was made for ``purpose``: the same one until ``install`` has its certificate.

        ``also_current``: and after that, as long as the pair that it became is the current one.
        """
        with self._locked():
            if also_current and (current := self.current()) is not None and current.origin == purpose:
                return current.key
            path = self._pending(purpose)
            try:
                return key_of_pem(path.read_bytes(), str(path))
            except FileNotFoundError:
                pass
            except PkiError as error:
                log.warning("a key that was made before can't be read; another one is made", why=str(error))
            key = new_key()
            path.parent.mkdir(mode=0o700, exist_ok=True)
            replace(path, pem_of_key(key), KEY_MODE)
            sync_folder(self.directory)
            return key

    def has_key_for(self, purpose: str) -> bool:
        """True where a key waits for its certificate."""
        return self._pending(purpose).exists()

    def install(self, chain: Chain, key: ec.EllipticCurvePrivateKey, purpose: str) -> Pair:
        """Make the pair the current one. The authority's certificate comes first: it fits the pair before too."""
        with self._locked():
            pairs = self._pairs()
            serial = chain.facts.serial
            if not self.ca.exists() or self.ca.read_bytes() != chain.roots_pem:
                replace(self.ca, chain.roots_pem, CERT_MODE)
            if not any(pair.folder.name == serial and belongs_to(chain.leaf, pair.key) for pair in pairs):
                number = pairs[-1].number + 1 if pairs else 1
                self._write_pair(chain, key, number, purpose)
                pairs = self._pairs()
            folder = self.directory / serial
            self._point_at(folder)
            self._forget_pending(purpose)
            pair = _read_pair(folder)
            self._forget_older(pairs)
            return pair

    def link(self, named: NamedFiles) -> list[Path]:
        """Have the paths of the agent's file lead here. Files that lie there stay beside, as NAME.replaced.

        Returns those that were moved aside.
        """
        moved = []
        for path, target in (
            (named.ca, self.ca),
            (named.cert, self.directory / CURRENT / "cert.pem"),
            (named.key, self.directory / CURRENT / "key.pem"),
        ):
            if path.is_symlink() and Path(os.path.abspath(path.parent / path.readlink())) == target.absolute():
                continue
            with _in_words(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.exists() and not path.is_symlink():
                    aside = path.with_name(f"{path.name}.replaced")
                    os.link(path, _gone(aside))
                    moved.append(aside)
                _point(path, target.absolute())
        return moved

    def leads_here(self, path: Path) -> bool:
        """True where ``path``, a file that TLS reads, is one of the current pair."""
        try:
            return path.resolve().is_relative_to(self.directory.resolve())
        except (OSError, RuntimeError):
            return False

    # -- in the folder

    def _pending(self, purpose: str) -> Path:
        return self.directory / "pending" / f"{purpose}.pem"

    def _forget_pending(self, purpose: str) -> None:
        """The key that has its certificate now, and those for renewals of pairs that were current before."""
        self._pending(purpose).unlink(missing_ok=True)
        for path in (self.directory / "pending").glob(f"{RENEWAL}*.pem"):
            path.unlink(missing_ok=True)

    def _pairs(self) -> list[Pair]:
        """The whole ones, the newest last."""
        pairs = []
        for folder in self.directory.iterdir():
            if folder.is_symlink() or not (folder / "cert.pem").exists() or folder.name.startswith("."):
                continue
            try:
                pairs.append(_read_pair(folder))
            except PkiError as error:
                log.warning("a certificate that lies here can't be used", folder=str(folder), why=str(error))
        return sorted(pairs, key=lambda pair: (pair.number, pair.since))

    def _write_pair(self, chain: Chain, key: ec.EllipticCurvePrivateKey, number: int, purpose: str) -> None:
        folder = self.directory / chain.facts.serial
        draft = self.directory / f"{DRAFT}{folder.name}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        about = {"number": number, "origin": purpose, "since": datetime.now(UTC).isoformat(timespec="milliseconds")}
        replace(draft / "key.pem", pem_of_key(key), KEY_MODE)
        replace(draft / "cert.pem", chain.pem, CERT_MODE)
        replace(draft / "pair.json", json.dumps(about).encode(), CERT_MODE)
        draft.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
        sync_folder(self.directory)

    def _point_at(self, folder: Path) -> None:
        current = self.directory / CURRENT
        if not current.is_symlink() or str(current.readlink()) != folder.name:
            _point(current, Path(folder.name))

    def _forget_older(self, pairs: list[Pair]) -> None:
        for pair in pairs[:-KEPT]:
            # Its name first: half a pair must not look like one.
            gone = self.directory / f"{GONE}{pair.folder.name}"
            with suppress(OSError):
                pair.folder.rename(gone)
                shutil.rmtree(gone)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One at a time: the agent renews while somebody joins anew by hand."""
        with _in_words(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)


def _read_pair(folder: Path) -> Pair:
    """Raises PkiError where a part is missing, can't be read, or is of another pair."""
    try:
        certificate, private = (folder / "cert.pem").read_bytes(), (folder / "key.pem").read_bytes()
        about = _about(folder / "pair.json")
        since = about.get("since") or datetime.fromtimestamp((folder / "cert.pem").stat().st_mtime, UTC).isoformat()
        leaf = certificates_of(certificate, str(folder / "cert.pem"))[0]
        key = key_of_pem(private, str(folder / "key.pem"))
    except OSError as error:
        raise PkiError(f"{error.filename or folder} can't be read: {error.strerror or error}") from error
    number = about.get("number")
    if not belongs_to(leaf, key):
        raise PkiError(f"{folder}/key.pem does not belong to {folder}/cert.pem")
    return Pair(
        folder=folder,
        number=number if isinstance(number, int) else 0,
        origin=str(about.get("origin", "")),
        leaf=leaf,
        key=key,
        since=datetime.fromisoformat(str(since)),
    )


def _about(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _point(link: Path, target: Path) -> None:
    """Make ``link`` a symbolic link to ``target``; whoever follows it sees what it was or what it is."""
    draft = _gone(link.with_name(f".{link.name}.new"))
    draft.symlink_to(target)
    draft.replace(link)
    sync_folder(link.parent)


def _gone(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


@contextmanager
def _in_words(where: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise PkiError(
            f"{error.filename or where} can't be written to (permission denied): run this as root, "
            "or name a folder of your own with --work-dir and --config"
        ) from error
    except OSError as error:
        raise PkiError(f"{error.filename or where} can't be written: {error.strerror or error}") from error
