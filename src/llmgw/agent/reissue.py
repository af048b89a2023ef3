"""One try at a new certificate, with one control plane: by the certificate in use, or by its key once that expired.

Which of the two is decided by the control plane's clock: it is the one that judges.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from datetime import datetime

import structlog
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from llmgw.agent.identity import RENEWAL, IdentityStore, Pair
from llmgw.link.course import ServerAddress
from llmgw.link.enrolment import Enrolment, EnrolmentError, Granted, Ours, clocks_differ, trusting
from llmgw.pki.chain import read_chain
from llmgw.pki.contexts import ClientIdentity, client_context
from llmgw.pki.names import PkiError
from llmgw.pki.signing_request import pem_of_request, proof_of_key, signing_request

log = structlog.get_logger()


async def reissue(
    store: IdentityStore,
    pair: Pair,
    server: ServerAddress,
    clock: Callable[[], datetime],
    not_before: datetime | None = None,
) -> Pair | None:
    """The pair that replaces ``pair``; it is the current one then. Raises EnrolmentError, with nothing changed.

    None: by the control plane's clock it is not yet ``not_before``.
    The new key is kept until it has its certificate: where an answer is lost, the next try asks for the same again.
    """
    try:
        files = ClientIdentity(ca=store.ca, cert=pair.folder / "cert.pem", key=pair.folder / "key.pem")
        context, identity = await asyncio.to_thread(client_context, files)
        roots = await asyncio.to_thread(store.ca.read_text)
        ours = Ours(identity, files)
        plain = Enrolment(server, trusting(roots), ours)
        authority = await plain.authority()
        if not_before is not None and authority.time < not_before:
            return None
        purpose = f"{RENEWAL}{pair.serial}"
        key = await asyncio.to_thread(store.key_for, purpose)
        request = signing_request(key, pair.node)
        difference = clocks_differ(authority.time, clock())
        try:
            if pair.not_after <= authority.time:
                granted = await _recover(plain, pair, request)
            else:
                granted = await Enrolment(server, context, ours).renew(pem_of_request(request))
        except EnrolmentError as error:
            if difference:
                raise EnrolmentError(f"{error}; {difference}", code=error.code) from error
            raise
        if difference:
            log.warning("the clocks differ", server=server.url, why=difference)
        return await asyncio.to_thread(_install, store, granted, pair.node, key, purpose)
    except (PkiError, OSError, ValueError) as error:
        raise EnrolmentError(f"{server.url}: {error}") from error


async def _recover(plain: Enrolment, pair: Pair, request: x509.CertificateSigningRequest) -> Granted:
    nonce = await plain.nonce(pair.serial)
    return await plain.recover(
        certificate=pair.leaf.public_bytes(Encoding.PEM).decode(),
        csr=pem_of_request(request),
        nonce=nonce,
        signature=base64.b64encode(proof_of_key(pair.key, nonce, request)).decode(),
    )


def _install(store: IdentityStore, granted: Granted, node: str, key: ec.EllipticCurvePrivateKey, purpose: str) -> Pair:
    chain = read_chain(granted.certificate, granted.ca, node=node, key=key)
    return store.install(chain, key, purpose)
