"""What pip wrote, verbatim, and what is made of it."""

from __future__ import annotations

import pytest

from llmgw.agent.fetch.complaints import explain

NOT_FOUND = (
    "ERROR: Could not find a version that satisfies the requirement x==1 (from versions: none)\n"
    "ERROR: No matching distribution found for x==1"
)


def retry(cause: str) -> str:
    return f"WARNING: Retrying (Retry(total=0)) after connection broken by '{cause}': /simple/x/\n{NOT_FOUND}"


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        (NOT_FOUND, "the package index has no x 1 that this Python can take, nor any other version of it"),
        (NOT_FOUND.replace("none", "0.1, 0.2"), "the package index has no x 1; it has 0.1, 0.2"),
        (retry("NewConnectionError('[Errno 111] Connection refused')"), "can't be reached for x 1: the connection was"),
        (retry("NameResolutionError('[Errno -2] Name or service not known')"), "its name can't be resolved"),
        (retry("ProxyError('Unable to connect to proxy')"), "the proxy refused or did not answer"),
        (retry("ReadTimeoutError('read timeout=15')"), "it stopped answering"),
        (retry("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]'))"), "is not trusted here"),
        (
            "ERROR: HTTP error 401 while getting x\n401 Client Error: Unauthorized for url: https://i/x",
            "401 (Unauthorized)",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "the disk became full",
        ),
        ("/usr/bin/python3: No module named pip", "has no pip: install llmgw again"),
        ("ERROR: something new", "pip could not get x 1: ERROR: something new"),
        ("", "pip could not get x 1: was killed by SIGKILL"),
    ],
)
def test_words(stderr: str, words: str) -> None:
    assert words in explain("x 1", None, stderr.splitlines(), "was killed by SIGKILL")
