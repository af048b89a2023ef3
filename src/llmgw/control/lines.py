"""The rules of certificates, without I/O: which may still be used, what a first use changes, what a copied key is.

A line is all certificates that were renewed one from another. It has one that is current, and at most one that was
issued and not used yet: the first use of that one retires the other. A certificate that was retired and is seen again
is on a second machine: of the two nobody can say which is the right one, so that neither is let in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from llmgw.pki.certificate import in_words
from llmgw.pki.signing import BACKDATED_S
from llmgw.store.identities import Certificate, CertificateSource, Revocation

LASTING: frozenset[CertificateSource] = frozenset({"file"})
"""A certificate of the file flow stays good until it expires or is revoked, also when there are others."""
ENDED = frozenset({"retired", "superseded", "revoked"})
RECOVERIES = 3
"""So many times in a row a certificate that expired may be replaced by proof of its key."""
KEPT_AFTER_S = 86_400.0
"""How long a certificate that was replaced is remembered after it has expired: from then on no clock takes it."""
REVOKED_KEPT_AFTER_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """``refusal``: why a certificate is not taken, for whoever shows it; None: it is. ``copied``: to be revoked."""

    refusal: str | None = None
    copied: tuple[Certificate, ...] = ()


def judge(known: Certificate, node: str, line: Sequence[Certificate], *, same_process: bool) -> Verdict:
    """Whether a certificate that is entered may be used by ``node``. Its dates are looked at by TLS.

    ``same_process``: whoever shows it is the process that used its successor, so that an older connection of it came
    late, and nothing was copied.
    """
    if known.node != node:
        return Verdict(
            f"certificate {known.serial} is that of {known.node}, not of {node}: issue a certificate for {node}"
        )
    if known.state == "revoked":
        return Verdict(revoked_words(known))
    if known.state in ("next", "current"):
        return Verdict()
    before = _ancestors(known, line)
    used = [each for each in line if each.first_used_at is not None and each.serial not in before]
    if not used:
        return Verdict()
    newest = max(used, key=lambda each: (each.state == "current", each.issued_at))
    if same_process:
        return Verdict(f"certificate {known.serial} was replaced by {newest.serial}: dial in with that one")
    copied = tuple(each for each in line if each.state != "revoked")
    return Verdict(copied_words(known, newest), copied)


def _ancestors(known: Certificate, line: Iterable[Certificate]) -> list[str]:
    """Serials that it was renewed from, itself first: by what was written down, since clocks are set back."""
    previous = {each.serial: each.previous for each in line}
    found = [known.serial]
    while (before := previous.get(found[-1], "")) and before not in found:
        found.append(before)
    return found


def first_use(known: Certificate, line: Iterable[Certificate], machine: str, now: float) -> tuple[Certificate, ...]:
    """What the use of a certificate changes in its line; nothing where it was the current one before."""
    if known.state == "current":
        if known.first_used_at is not None:
            return ()
        return (replace(known, first_used_at=now, machine=machine or known.machine),)
    changed = [
        replace(known, state="current", first_used_at=known.first_used_at or now, ended_at=None, machine=machine)
    ]
    for other in line:
        if other.serial == known.serial or other.source in LASTING:
            continue
        if other.state == "current":
            changed.append(replace(other, state="retired", ended_at=now))
        elif other.state == "next":
            changed.append(replace(other, state="superseded", ended_at=now))
    return tuple(changed)


def successor(
    previous: Certificate, line: Iterable[Certificate], new: Certificate, now: float
) -> tuple[Certificate, ...]:
    """The line with one more certificate, which is to take over from ``previous``: an older one that was to, and was
    not used, is not waited for any more."""
    waiting = [replace(each, state="superseded", ended_at=now) for each in line if each.state == "next"]
    proved = previous.recoveries + 1 if new.source == "recovery" else 0
    kept = replace(new, state="next", chain=previous.line, previous=previous.serial, recoveries=proved)
    return (*(each for each in waiting if each.serial != previous.serial), kept)


def revoked(certificates: Iterable[Certificate], why: str, now: float) -> tuple[Certificate, ...]:
    return tuple(
        replace(each, state="revoked", ended_at=now, why=why) for each in certificates if each.state != "revoked"
    )


def node_refusal(node: str, issued_at: float, revocation: Revocation | None) -> str | None:
    """Why a certificate that was never seen is not taken, because of what was decided about its node."""
    if revocation is None:
        return None
    when = moment(revocation.at)
    if not revocation.removed:
        why = f" ({revocation.why})" if revocation.why else ""
        return f"{node} was revoked on {when}{why}: {way_back(node)}"
    # Certificates begin before they are issued, and may have been issued by another machine's clock.
    if issued_at + BACKDATED_S <= revocation.at:
        return (
            f"{node} was removed on {when}, and this certificate was issued before: issue another with "
            f"`llmgw ctl cert issue-client {node}`, or join with a token of `llmgw ctl node token {node}`"
        )
    return None


def past_keeping(certificate: Certificate, now: float) -> bool:
    kept_s = REVOKED_KEPT_AFTER_S if certificate.state == "revoked" else KEPT_AFTER_S
    return certificate.state in ENDED and 0.0 < certificate.not_after < now - kept_s


def revoked_words(known: Certificate) -> str:
    when = f" on {moment(known.ended_at)}" if known.ended_at is not None else ""
    why = f" ({known.why})" if known.why else ""
    return f"certificate {known.serial} of {known.node} was revoked{when}{why}: {way_back(known.node)}"


def copied_words(known: Certificate, newest: Certificate) -> str:
    return (
        f"certificate {known.serial} of {known.node} was replaced by {newest.serial}, which has been used since: its "
        "key is on two machines (a copied disk, a snapshot that was restored, or a key that was stolen), so neither "
        f"certificate is taken any more: {way_back(known.node)}"
    )


def way_back(node: str) -> str:
    return f"`llmgw ctl node token {node} --replace` and `llmgw agent join` let a machine in by that name again"


def moment(at: float) -> str:
    return in_words(datetime.fromtimestamp(at, UTC))
