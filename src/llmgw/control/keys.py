"""Secrets that are made here: clients' keys and the admin token. Only their SHA-256 is ever stored."""

from __future__ import annotations

import hashlib
import secrets

from llmgw.store.base import ApiKey

_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def new_key(name: str, models: tuple[str, ...], now_s: float) -> tuple[ApiKey, str]:
    """A client's key and its text, which is shown this once."""
    text = "sk-" + secrets.token_urlsafe(32)
    public = "key-" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(8))
    return ApiKey(id=public, name=name, hash=digest(text), created_at=now_s, models=models), text


def make_admin_token() -> str:
    return "llmgw-admin-" + secrets.token_urlsafe(32)
