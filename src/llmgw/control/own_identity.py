"""The control plane's own files: who it is, whom it trusts, and the key by which it issues certificates.

They are looked at while it runs: files that somebody put there are taken up without a restart, and where there is an
issuing key the own certificate is renewed before it expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog

from llmgw.config.server import ServerTls
from llmgw.pki.certificate import facts_of, in_words
from llmgw.pki.contexts import Identity, ServerIdentity, read_identity
from llmgw.pki.files import CERT_MODE, KEY_MODE, replace
from llmgw.pki.issuer import ISSUER_FILES, Issuer
from llmgw.pki.names import PkiError
from llmgw.pki.rotation import OLD_ISSUER_FILES, older_issuer
from llmgw.pki.signing import DAY_S, pem_of

log = structlog.get_logger()

LOOK_S = 5.0
RENEWED_LIFETIME_S = 90 * DAY_S
"""Of the own certificate, where it is renewed here."""
RENEW_LEFT = 1 / 3
"""The own certificate is renewed once less of its life is left, and a month before its end at the latest."""
RENEW_BEFORE = timedelta(days=30)

NO_ISSUER = (
    "this control plane holds no issuing key: it can let no node in by token and renew no certificate. "
    "`llmgw ctl cert issue-issuer --dir PKI --out {folder}`, where the authority's key is, makes one; without it "
    "certificates are issued as files (`llmgw ctl cert issue-client`)"
)


class OwnIdentity:
    """``changed`` is called once other files were taken up; it may raise IdentityError: then they are not."""

    def __init__(self, tls: ServerTls) -> None:
        """Raises IdentityError where a control plane can't be dialled with these files."""
        self._tls = tls
        self.files = ServerIdentity(ca=tls.ca, cert=tls.cert, key=tls.key)
        self.identity: Identity = read_identity(self.files)
        self.issuer: Issuer | None = None
        self.trouble = ""
        """Why the issuing key that is there can't be used; empty: nothing is wrong with it, or there is none."""
        self.on_changed: list[Callable[[], None]] = []
        self._older_issuer: Issuer | None = None
        self._issuers_seen: set[str] = set()
        self._seen = self._signature()
        self._read_issuer()

    @property
    def folder(self) -> Path:
        """Where the issuing key is looked for: beside the authority's certificate."""
        return self._tls.ca.parent

    def no_issuer_words(self) -> str:
        if self.trouble:
            return f"this control plane's issuing key can't be used: {self.trouble}"
        return NO_ISSUER.format(folder=self.folder)

    def issuing(self) -> frozenset[str]:
        """Short ids of the issuing keys that this control plane has had."""
        return frozenset(self._issuers_seen)

    def roots_pem(self) -> str:
        return pem_of(*self.identity.roots).decode()

    async def keep(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look(datetime.now(UTC))
            except (PkiError, OSError) as error:
                log.error("the control plane's own files can't be used; it goes on with those before", why=str(error))

    async def look(self, now: datetime) -> bool:
        """Take up what changed, and renew the own certificate where it is time. Returns whether anything changed."""
        seen = await asyncio.to_thread(self._signature)
        if seen == self._seen and not self._is_due(now):
            return False
        # Once for each change, also where it can't be taken up: the same words every few seconds help nobody.
        self._seen = seen
        self.identity = await asyncio.to_thread(read_identity, self.files)
        self._read_issuer()
        if self._is_due(now):
            await asyncio.to_thread(self._renew, now)
            self._seen = await asyncio.to_thread(self._signature)
            self.identity = await asyncio.to_thread(read_identity, self.files)
        for call in self.on_changed:
            call()
        log.info("the control plane's own files were taken up", certificate_until=in_words(self.identity.own.not_after))
        return True

    def _read_issuer(self) -> None:
        try:
            self.issuer = Issuer.load(self.folder, self.identity.roots)
            self.trouble = ""
        except PkiError as error:
            self.issuer, self.trouble = None, str(error)
            log.error("the issuing key can't be used: nodes can't join or renew", why=self.trouble)
        if self.issuer is not None:
            self._issuers_seen.add(self.issuer.key_id)
        try:
            self._older_issuer = older_issuer(self.folder, self.identity.roots)
        except PkiError as error:
            self._older_issuer = None
            log.warning("the own certificate is not renewed until the older authority is dropped", why=str(error))

    @property
    def _own_issuer(self) -> Issuer | None:
        """Who signs the own certificate: nodes that have not moved yet trust nothing but the older authority."""
        return self.issuer if len(self.identity.roots) == 1 else self._older_issuer

    def _is_due(self, now: datetime) -> bool:
        own, issuer = self.identity.own, self._own_issuer
        if issuer is None or (issuer.not_after <= own.not_after and self.identity.issued_here):
            return False  # Where the issuing key is near its own end, nothing would be won by it.
        if not self.identity.issued_here:
            return True  # The authority that it is of was just dropped.
        life = own.not_after - own.not_before
        return own.not_after - now < max(life * RENEW_LEFT, min(RENEW_BEFORE, life / 2))

    def _renew(self, now: datetime) -> None:
        issuer, own = self._own_issuer, self.identity.own
        assert issuer is not None
        signed, key = issuer.issue_server(own.common_name, own.names, RENEWED_LIFETIME_S, now)
        # The key first: whoever reads between the two sees a pair that does not match, keeps what it has, looks again.
        replace(self.files.key, key, KEY_MODE)
        replace(self.files.cert, signed.chain.encode(), CERT_MODE)
        facts = facts_of(signed.certificate)
        log.info("own certificate renewed", serial=facts.serial, until=in_words(facts.not_after))

    def _signature(self) -> tuple[object, ...]:
        """What tells changed files from those that were read."""
        issuers = (self.folder / name for name in (*ISSUER_FILES, *OLD_ISSUER_FILES))
        paths = (self.files.ca, self.files.cert, self.files.key, *issuers)
        return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
