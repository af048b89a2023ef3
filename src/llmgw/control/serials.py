"""Who is let in by which certificate: asked at every hello and heartbeat, and told at every welcome.

A certificate that this control plane has not seen before is entered at its first use: the authority may be elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from llmgw.control import lines
from llmgw.control.plane import Plane
from llmgw.link.session import Presented
from llmgw.pki.certificate import PeerIdentity
from llmgw.pki.signing import BACKDATED_S
from llmgw.store.identities import Certificate, CertificateSource


class Serials:
    """``issuing`` are short ids of the issuing keys that this control plane knows: what they signed came by token."""

    def __init__(self, plane: Plane, issuing: Callable[[], frozenset[str]] = frozenset) -> None:
        self._plane = plane
        self._issuing = issuing
        self._last_process: dict[str, str] = {}
        """By line, the process that used it last."""
        self.on_revoked: list[Callable[[], None]] = []
        """Called when something is not let in any more that was before."""

    def allow(self, presented: Presented) -> str | None:
        """None: allowed. Else why not, in words."""
        identity = presented.identity
        known = self._plane.book.certificate(identity.serial)
        if known is None:
            return self._refusal_of_unseen(presented.id, identity)
        return self._judged(known, presented.id, presented.instance, presented.address)

    def allow_renewal(self, identity: PeerIdentity, address: str) -> str | None:
        """The same for a certificate that asks for its successor; entered where it is new."""
        known = self._plane.book.certificate(identity.serial)
        if known is None:
            refusal = self._refusal_of_unseen(identity.common_name, identity)
            if refusal is None:
                self._enter(identity.common_name, "node", identity)
            return refusal
        refusal = self._judged(known, identity.common_name, "", address)
        if refusal is None and known.state != "current":
            # It is in use by this: what it took over from is not needed any more.
            book = self._plane.book
            book.put(*lines.first_use(known, book.line(known), known.machine, self._plane.now().wall_s))
        return refusal

    def used(self, presented: Presented) -> None:
        """Whoever shows it is welcomed."""
        book, now = self._plane.book, self._plane.now().wall_s
        known = book.certificate(presented.serial)
        if known is None:
            known = self._enter(presented.id, presented.role, presented.identity)
        elif known.not_after == 0.0:
            # Entered by an llmgw that kept its serial alone.
            known = replace(_certificate(presented.id, presented.role, presented.identity), source=known.source)
        line = book.line(known)
        changed = lines.first_use(known, line, presented.machine, now)
        self._last_process[known.line] = presented.instance
        if not changed:
            return
        book.put(*changed)
        self._plane.tell(lambda: None)

    def revoke(self, certificates: tuple[Certificate, ...], why: str) -> None:
        """Let none of them in any more, and end what they opened."""
        self._plane.book.put(*lines.revoked(certificates, why, self._plane.now().wall_s))
        self._plane.tell(lambda: None)
        self.revoked()

    def revoked(self) -> None:
        """Something was revoked: whoever has a connection by it must not keep it."""
        for call in self.on_revoked:
            call()

    def _judged(self, known: Certificate, node: str, instance: str, address: str) -> str | None:
        same = bool(instance) and self._last_process.get(known.line) == instance
        line = () if known.state in ("next", "current") else self._plane.book.line(known)
        verdict = lines.judge(known, node, line, same_process=same)
        if verdict.copied:
            words = f"{verdict.refusal} (shown from {address})"
            self._plane.tell(partial(self._plane.note, "certificate.copied", known.node, words))
            self.revoke(verdict.copied, f"its key is on two machines: {known.serial} was shown again from {address}")
        return verdict.refusal

    def _refusal_of_unseen(self, node: str, identity: PeerIdentity) -> str | None:
        book = self._plane.book
        if revocation := book.revocation("serial", identity.serial):
            why = f" ({revocation.why})" if revocation.why else ""
            when = lines.moment(revocation.at)
            return f"certificate {identity.serial} was revoked on {when}{why}: {lines.way_back(node)}"
        issued_at = identity.not_before.timestamp()
        return lines.node_refusal(node, issued_at, book.revocation("node", node))

    def _enter(self, node: str, role: str, identity: PeerIdentity) -> Certificate:
        source: CertificateSource = "unseen" if identity.issuer_key_id in self._issuing() else "file"
        known = replace(_certificate(node, role, identity), source=source)
        self._plane.book.put(known)
        words = f"certificate {known.serial} was seen for the first time and entered"
        self._plane.tell(partial(self._plane.note, "certificate.entered", node, words))
        return known


def _certificate(node: str, role: str, identity: PeerIdentity) -> Certificate:
    begins = identity.not_before.timestamp()
    return Certificate(
        serial=identity.serial,
        node=node,
        role=role,
        issued_at=begins + BACKDATED_S if begins else 0.0,
        not_after=identity.not_after.timestamp(),
        key_hash=identity.key_hash,
        issuer=identity.issuer_key_id,
    )
