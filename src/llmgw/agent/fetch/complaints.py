"""What pip's complaints mean, in words that say what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence

_GOT = re.compile(r"\bGot\s+([0-9a-f]{64})")
_FROM_VERSIONS = re.compile(r"\(from versions: (.*)\)")

_NETWORK = (
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate is not trusted here: name the authority in pip's configuration (cert)",
    ),
    ("ProxyError", "the proxy refused or did not answer: look at HTTPS_PROXY and pip's configuration"),
    ("Name or service not known", "its name can't be resolved"),
    ("Temporary failure in name resolution", "its name can't be resolved: name resolution does not answer"),
    ("nodename nor servname", "its name can't be resolved"),
    ("Connection refused", "the connection was refused"),
    ("Network is unreachable", "the network is unreachable"),
    ("No route to host", "there is no route to it"),
    ("ConnectTimeoutError", "it did not take the connection in time"),
    ("ReadTimeoutError", "it stopped answering"),
    ("RemoteDisconnected", "it closed the connection"),
    ("ConnectionResetError", "it broke the connection"),
    ("IncompleteRead", "it broke the connection in the middle of the file"),
    ("incomplete-download", "it broke the connection in the middle of the file"),
    ("ProtocolError", "it broke the connection"),
    ("too many 5", "it answers with server errors"),
    ("Connection interrupted", "it broke the connection in the middle of the file"),
    ("Max retries exceeded", "it can't be reached"),
)

_HTTP_ERROR = re.compile(r"\b([45]\d\d) (?:Client|Server) Error: ([^\n]*?) for url")


def explain(what: str, sha256: str | None, lines: Sequence[str], end: str) -> str:
    """Why ``what`` could not be had, from what pip wrote on stderr. ``end`` says how pip ended."""
    text = "\n".join(lines)
    if "DO NOT MATCH THE HASHES" in text:
        got = _GOT.search(text)
        return wrong_hash(what, sha256 or "of the index", got[1] if got else "another")
    if "No space left on device" in text:
        return f"the disk became full while {what} was downloaded: make room under the agent's folders"
    if "Disk quota exceeded" in text:
        return f"the disk quota was used up while {what} was downloaded"
    if "No module named pip" in text:
        return "the Python that runs llmgw has no pip: install llmgw again"
    versions = _FROM_VERSIONS.search(text)
    if versions is not None and versions[1] != "none":
        return f"the package index has no {what}; it has {versions[1]}"
    if refused := _HTTP_ERROR.search(text):
        return (
            f"the package index answered {refused[1]} ({refused[2].strip()}) when asked for {what}{_hint(refused[1])}"
        )
    if reason := network(lines):
        return f"the package index can't be reached for {what}: {reason}"
    if "No matching distribution found" in text:
        return f"the package index has no {what} that this Python can take, nor any other version of it"
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"pip could not get {what}: {last.strip() or end}"


def network(lines: Sequence[str]) -> str | None:
    """What is the matter with the network, where it is the network."""
    text = "\n".join(lines)
    return next((words for sign, words in _NETWORK if sign in text), None)


def wrong_hash(what: str, expected: str, got: str) -> str:
    return (
        f"{what} from the package index is not the file that this release was checked against: "
        f"sha256 {expected} was expected and {got} came; nothing was installed. If a mirror serves it, mend the mirror"
    )


def _hint(status: str) -> str:
    if status in ("401", "403", "407"):
        return ": look at the credentials in pip's configuration"
    return ""
