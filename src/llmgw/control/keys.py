"""Secrets that are made here: clients' keys and the admin token. Only their SHA-256 is ever stored."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from llmgw.store.base import ApiKey

_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def new_key(name: str, models: tuple[str, ...], now_s: float) -> tuple[ApiKey, str]:
    """A client's key and its text, which is shown this once."""
    text = "sk-" + secrets.token_urlsafe(32)
    public = "key-" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(8))
    return ApiKey(id=public, name=name, hash=digest(text), created_at=now_s, models=models), text


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def new_admin_token() -> str:
    return "llmgw-admin-" + secrets.token_urlsafe(32)
