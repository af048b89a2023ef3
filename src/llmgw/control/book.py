"""Certificates, tokens and revocations as they are now, and which of them are still to be stored.

Changed on the event loop at once, since a peer that is judged can't wait for a disk; stored with the plane's next step,
and again with the one after where that fails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from llmgw.store.base import Saved
from llmgw.store.identities import Certificate, Revocation, Token


@dataclass(slots=True)
class Unsaved:
    """Ids of what changed: it is written as it is by then, and what is gone is removed."""

    certificates: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)
    revocations: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.certificates or self.tokens or self.revocations)


class Book:
    """To be used on the event loop only."""

    def __init__(self, saved: Saved) -> None:
        self._certificates = {each.serial: each for each in saved.certificates}
        self._tokens = {each.id: each for each in saved.tokens}
        self._revocations = {each.id: each for each in saved.revocations}
        self._serials_of: dict[str, set[str]] = defaultdict(set)
        self._serials_by_key: dict[str, set[str]] = defaultdict(set)
        for each in saved.certificates:
            self._index(each)
        self._unsaved = Unsaved()
        self.revision = 0
        """Rises with every change: whoever made something of the book knows by it whether that is old."""

    # -- reading

    def certificate(self, serial: str) -> Certificate | None:
        return self._certificates.get(serial)

    def certificates(self) -> list[Certificate]:
        return list(self._certificates.values())

    def of_node(self, node: str) -> list[Certificate]:
        """Those of the node, in the order in which they were issued; a gateway or control plane of its name has its
        own."""
        return [each for each in self._of_name(node) if each.role == "node"]

    def line(self, certificate: Certificate) -> list[Certificate]:
        """All that were renewed one from another, itself included."""
        return [each for each in self._of_name(certificate.node) if each.line == certificate.line]

    def _of_name(self, name: str) -> list[Certificate]:
        found = (self._certificates[serial] for serial in self._serials_of.get(name, ()))
        return sorted(found, key=lambda each: (each.issued_at, each.serial))

    def with_key(self, key_hash: str) -> list[Certificate]:
        return [self._certificates[serial] for serial in sorted(self._serials_by_key.get(key_hash, ()))]

    def token(self, id: str) -> Token | None:
        return self._tokens.get(id)

    def tokens(self) -> list[Token]:
        return list(self._tokens.values())

    def revocation(self, kind: str, subject: str) -> Revocation | None:
        return self._revocations.get(f"{kind}:{subject}")

    def revocations(self) -> list[Revocation]:
        return list(self._revocations.values())

    # -- changing

    def put(self, *things: Certificate | Token | Revocation) -> None:
        for thing in things:
            self._take(thing)
            match thing:
                case Certificate():
                    self._unsaved.certificates.add(thing.serial)
                case Token():
                    self._unsaved.tokens.add(thing.id)
                case Revocation():
                    self._unsaved.revocations.add(thing.id)

    def stored(self, things: Iterable[Certificate | Token | Revocation]) -> None:
        """Take up what is in the store already."""
        for thing in things:
            self._take(thing)

    def remove(self, *things: Certificate | Token | Revocation) -> None:
        self.revision += 1
        for thing in things:
            match thing:
                case Certificate():
                    self._certificates.pop(thing.serial, None)
                    self._serials_of[thing.node].discard(thing.serial)
                    self._serials_by_key[thing.key_hash].discard(thing.serial)
                    self._unsaved.certificates.add(thing.serial)
                case Token():
                    self._tokens.pop(thing.id, None)
                    self._unsaved.tokens.add(thing.id)
                case Revocation():
                    self._revocations.pop(thing.id, None)
                    self._unsaved.revocations.add(thing.id)

    def _take(self, thing: Certificate | Token | Revocation) -> None:
        self.revision += 1
        match thing:
            case Certificate():
                self._certificates[thing.serial] = thing
                self._index(thing)
            case Token():
                self._tokens[thing.id] = thing
            case Revocation():
                self._revocations[thing.id] = thing

    def _index(self, certificate: Certificate) -> None:
        self._serials_of[certificate.node].add(certificate.serial)
        self._serials_by_key[certificate.key_hash].add(certificate.serial)

    # -- storing

    @property
    def pending(self) -> bool:
        return bool(self._unsaved)

    def take_unsaved(self) -> Unsaved:
        """What is to be written now; what changes from now on is of the next step."""
        taken, self._unsaved = self._unsaved, Unsaved()
        return taken

    def put_back(self, taken: Unsaved) -> None:
        """It could not be written, or may not have been."""
        self._unsaved.certificates |= taken.certificates
        self._unsaved.tokens |= taken.tokens
        self._unsaved.revocations |= taken.revocations

    def written(self, taken: Unsaved) -> dict[str, Any]:
        """The fields of a Change that write it."""
        certificates, tokens, revocations = self._certificates, self._tokens, self._revocations
        return {
            "certificates": [certificates[id] for id in sorted(taken.certificates) if id in certificates],
            "removed_certificates": [id for id in sorted(taken.certificates) if id not in certificates],
            "tokens": [tokens[id] for id in sorted(taken.tokens) if id in tokens],
            "removed_tokens": [id for id in sorted(taken.tokens) if id not in tokens],
            "revocations": [revocations[id] for id in sorted(taken.revocations) if id in revocations],
            "removed_revocations": [id for id in sorted(taken.revocations) if id not in revocations],
        }
