"""The admin API over HTTP, with every failure in words."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx2

from llmgw.client.context import Context

TIMEOUT_S = 30.0
CONNECT_S = 5.0


class AdminError(Exception):
    """The admin API refused, or could not be reached. ``status`` is None where it was not reached."""

    def __init__(self, message: str, *, hint: str = "", code: str = "", status: int | None = None) -> None:
        super().__init__(f"{message}\n{hint}" if hint else message)
        self.code = code
        self.status = status


class AdminClient:
    def __init__(self, context: Context, *, timeout_s: float = TIMEOUT_S) -> None:
        self._server = context.server.rstrip("/")
        if not context.token.isascii() or not context.token.isprintable():
            raise AdminError(
                "the admin token has characters that no admin token has", hint="was it copied whole, and nothing more?"
            )
        with self._reaching():
            self._http = httpx2.Client(
                base_url=f"{self._server}/",
                headers={"authorization": f"Bearer {context.token}"},
                timeout=httpx2.Timeout(timeout_s, connect=CONNECT_S),
                verify=_verify(context.ca),
                trust_env=False,
            )

    def get(self, path: str, **params: str | int | float | bool) -> Any:
        return self._call("GET", path, params=params)

    def post(self, path: str, body: object = None) -> Any:
        return self._call("POST", path, json=body)

    def put(self, path: str, body: object) -> Any:
        return self._call("PUT", path, json=body)

    def delete(self, path: str) -> Any:
        return self._call("DELETE", path)

    def lines(self, path: str, **params: str | int | bool) -> Iterator[str]:
        """Lines of a text answer as they come; without end where it follows."""
        timeout = httpx2.Timeout(None, connect=CONNECT_S)
        with self._reaching(), self._http.stream("GET", _url(path), params=params, timeout=timeout) as answer:
            if answer.status_code >= 300:
                answer.read()
                raise _refusal(answer)
            yield from answer.iter_lines()

    def download(self, path: str, to: Path) -> int:
        """Writes an answer's bytes to a file (0600, whole or not at all); returns how many."""
        partial = to.with_name(f"{to.name}.partial")
        try:
            written = self._download(path, partial)
            partial.rename(to)
        finally:
            partial.unlink(missing_ok=True)
        return written

    def _download(self, path: str, partial: Path) -> int:
        written = 0
        with self._reaching(), self._http.stream("GET", _url(path)) as answer:
            if answer.status_code >= 300:
                answer.read()
                raise _refusal(answer)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                for piece in answer.iter_bytes():
                    written += file.write(piece)
                file.flush()
                os.fsync(file.fileno())
        return written

    def _call(self, method: str, path: str, **options: Any) -> Any:
        with self._reaching():
            answer = self._http.request(method, _url(path), **options)
        if answer.status_code >= 300:
            raise _refusal(answer)
        try:
            return answer.json()
        except ValueError:
            raise _refusal(answer) from None

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx2.TimeoutException as error:
            raise AdminError(
                f"{self._server} did not answer in time", hint="is the control plane overloaded?"
            ) from error
        except httpx2.TransportError as error:
            raise AdminError(
                f"{self._server} can't be reached: {error}", hint="is the control plane running there?"
            ) from error
        except httpx2.InvalidURL as error:
            raise AdminError(
                f"{self._server} is no address: {error}", hint="it should be like http://127.0.0.1:8081"
            ) from error

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _url(path: str) -> str:
    """A name may have characters that mean something in an address."""
    return f"api/v1/{quote(path, safe='/')}"


def _verify(ca: str | None) -> ssl.SSLContext | bool:
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise AdminError(f"the authority's certificate {ca} can't be read: {error}") from error


def _refusal(answer: httpx2.Response) -> AdminError:
    try:
        error = answer.json()["error"]
        return AdminError(error["message"], hint=error["hint"], code=error["code"], status=answer.status_code)
    except (ValueError, KeyError, TypeError):
        words = f"{answer.url} answered {answer.status_code} and nothing that llmgw would say: {answer.text[:200]}"
        return AdminError(words, hint="is that an llmgw control plane?", status=answer.status_code)
