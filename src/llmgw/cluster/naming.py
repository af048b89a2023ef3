"""Names that are made: replica ids and the keys of replicas."""

from __future__ import annotations

import hmac

from llmgw.cluster.model import Cluster

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_LETTERS = 5
_SPACE = len(_ALPHABET) ** _LETTERS
_HALF_BITS = 13
_HALF = (1 << _HALF_BITS) - 1


def replica_id(cluster: Cluster, model: str, n: int) -> str:
    """Id of the ``n``-th replica of a model: MODEL- and 5 of a-z2-7.

    A keyed permutation of the 2**25 suffixes, not a plain hash: two values of ``n`` never share an id,
    so ids are not reused even though removed replicas are forgotten.
    """
    key = f"replica-id\0{cluster.secret}\0{model}".encode()
    value = n % _SPACE
    while True:
        # The network permutes 26 bits; walking on until the value is inside 25 keeps it a permutation.
        value = _permute(key, value)
        if value < _SPACE:
            return f"{model}-{_suffix(value)}"


def replica_key(secret: str, replica_id: str) -> str:
    """The key that a replica's engines ask for, derived so that it need not be stored."""
    return hmac.digest(secret.encode(), f"replica-key\0{replica_id}".encode(), "sha256").hex()


def _permute(key: bytes, value: int) -> int:
    left, right = value >> _HALF_BITS, value & _HALF
    for turn in range(4):
        digest = hmac.digest(key, bytes([turn]) + right.to_bytes(2, "big"), "sha256")
        left, right = right, left ^ (int.from_bytes(digest[:2], "big") & _HALF)
    return left << _HALF_BITS | right


def _suffix(value: int) -> str:
    letters = []
    for _ in range(_LETTERS):
        value, letter = divmod(value, len(_ALPHABET))
        letters.append(_ALPHABET[letter])
    return "".join(letters)
