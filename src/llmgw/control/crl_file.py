"""``crl.pem`` beside the store: what was revoked, for third parties. Nothing here depends on it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import structlog

from llmgw.control.own_identity import OwnIdentity
from llmgw.control.plane import Plane
from llmgw.pki.authority import Authority
from llmgw.pki.certificate import facts_of
from llmgw.pki.crl import VALID_S, revocation_list
from llmgw.pki.files import CERT_MODE, replace
from llmgw.pki.names import PkiError
from llmgw.pki.signing import Signer

log = structlog.get_logger()

LOOK_S = 10.0
REFRESH_S = 86_400.0


class CrlFile:
    """Written at once where something was revoked, and every day. One list for each key that signs here: the issuing
    key's, and the authority's own where it lies beside its certificate."""

    def __init__(self, plane: Plane, own: OwnIdentity, path: Path) -> None:
        self._plane = plane
        self._own = own
        self._path = path
        self._written: frozenset[tuple[str, float, str]] | None = None
        self.next_update: float | None = None
        """Unix time at which the list that is there goes stale; None: none was written."""

    async def keep(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                await self.look()
            except (OSError, PkiError) as error:
                log.error(
                    "the list of what was revoked can't be written; certificates are judged all the same",
                    why=str(error),
                )
            await asyncio.sleep(LOOK_S)

    async def look(self) -> bool:
        """Write it where it is time. Returns whether it was."""
        now, revoked = self._plane.now().wall_s, self._revoked()
        fresh = self.next_update is not None and now < self.next_update - VALID_S + REFRESH_S
        if fresh and revoked == self._written:
            return False
        signers = await asyncio.to_thread(self._signers)
        if not signers:
            return False
        await asyncio.to_thread(self._write, signers, revoked, now)
        self._written, self.next_update = revoked, now + VALID_S
        return True

    def _revoked(self) -> frozenset[tuple[str, float, str]]:
        return frozenset(
            (each.serial, each.ended_at or 0.0, each.issuer)
            for each in self._plane.book.certificates()
            if each.state == "revoked"
        )

    def _signers(self) -> list[Signer]:
        signers = [self._own.issuer.signer] if self._own.issuer is not None else []
        if (self._own.folder / "ca-key.pem").exists():
            signers.append(Authority.load(self._own.folder).signer)
        return signers

    def _write(self, signers: list[Signer], revoked: frozenset[tuple[str, float, str]], now: float) -> None:
        moment = datetime.fromtimestamp(now, UTC)
        lists = [
            revocation_list(signer, [(serial, at) for serial, at, by in revoked if by == key], int(now * 1000), moment)
            for signer in signers
            if (key := facts_of(signer.certificate).key_id)
        ]
        replace(self._path, b"".join(lists), CERT_MODE)
