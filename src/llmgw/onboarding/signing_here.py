"""The authority of a directory, as onboarding uses it: it signs what a node asks for, and gives its root."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from llmgw.pki.authority import CLIENT_LIFETIME_S, Authority
from llmgw.pki.certificate import facts_of
from llmgw.pki.chain import certificates_of
from llmgw.pki.issuer import Issuer
from llmgw.pki.names import PkiError
from llmgw.pki.signing import pem_of
from llmgw.pki.signing_request import read_request


class NoAuthority(Exception):
    """Nothing in the directory can sign; the message says what to do."""


class SigningHere:
    """``ca.pem`` with its key, or with an issuing key.

    Certificates live as long as those of files do, for a year: whether a control plane can renew them is not known
    here, and one that lives for a day would lock the node out where none can. Those that can renew it at half its life.
    """

    def __init__(self, directory: Path) -> None:
        """Raises NoAuthority."""
        self._issuer: Issuer | None = None
        self._authority: Authority | None = None
        if not (directory / "ca.pem").exists():
            raise NoAuthority(f"no authority in {directory}; run 'llmgw ctl cert init-ca' first")
        try:
            if (directory / "ca-key.pem").exists():
                self._authority = Authority.load(directory)
                self.roots = self._authority.roots_pem().decode()
                return
            found = certificates_of((directory / "ca.pem").read_bytes(), str(directory / "ca.pem"))
            self.roots = pem_of(*found).decode()
            self._issuer = Issuer.load(directory, found)
        except (PkiError, OSError) as error:
            raise NoAuthority(str(error)) from error
        if self._issuer is None:
            raise NoAuthority(f"{directory} has no key to sign with: neither ca-key.pem nor issuer-key.pem")

    def sign(self, request: str, node: str) -> tuple[str, str]:
        """The node's certificate and those of its issuers (PEM), and its serial. Raises PkiError."""
        if self._issuer is not None:
            lifetime_s = min(CLIENT_LIFETIME_S, (self._issuer.not_after - datetime.now(UTC)).total_seconds() - 60)
            signed = self._issuer.sign_node(node, read_request(request), lifetime_s, datetime.now(UTC))
            return signed.chain, signed.serial
        assert self._authority is not None
        pem = self._authority.sign_request(request, node).decode()
        return pem, facts_of(certificates_of(pem, "what was signed")[0]).serial
