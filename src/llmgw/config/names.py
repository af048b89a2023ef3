"""Which names may be given to what. Each check returns the name, or raises Refused."""

from __future__ import annotations

import re
from collections.abc import Callable

from llmgw.config.faults import Refused

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"


def _named(what: str, pattern: str, longest: int, charset: str) -> Callable[[str], str]:
    expected = f"{what}: {charset}, at most {longest} characters"
    whole = re.compile(pattern)

    def check(text: str) -> str:
        if len(text) > longest:
            raise Refused(expected, f"it has {len(text)} characters")
        if not whole.fullmatch(text):
            raise Refused(expected)
        return text

    return check


_WORD_SET = "letters, digits, `.`, `_` and `-`, a letter or digit at both ends"

cluster_name = _named("a cluster's name", _WORD, 40, _WORD_SET)
"""It stands in certificates: ``llmgw.pki`` takes the same names, and the same node ids."""
_model_name = _named("a model's name", _WORD, 63, _WORD_SET)
alias = _named(
    "an alias", r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*", 128, "letters, digits and any of `._/:@+-`, a letter or digit first"
)
profile_name = _named("a profile's name", _WORD, 63, _WORD_SET)
fabric_name = _named("a fabric's name", _WORD, 63, _WORD_SET)
adapter_name = _named("an adapter's name as in ib_root, such as mlx5_0", r"[A-Za-z0-9][A-Za-z0-9._-]*", 63, _WORD_SET)
interface_name = _named(
    "a network interface's name, such as eth0", r"[^\s/:]+", 15, "neither blanks nor any of `/` and `:`"
)
label_key = _named(
    "a label's key", r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?", 63, "letters, digits, `.`, `_`, `-` and `/`"
)
label_value = _named("a label's value", r"\S(?:[^\n\t]*\S)?", 128, "any text of one line, without blanks around it")
_node_id = _named("a node id, which is its host's name", _WORD, 64, _WORD_SET)
version = _named(
    "a version, such as b10991 or 0.33.0", r"[A-Za-z0-9][A-Za-z0-9._+!-]*", 63, "letters, digits and any of `._+!-`"
)
package = _named("a Python package's name", _WORD, 128, _WORD_SET)


def model_name(text: str) -> str:
    """A model's name, from which those of replicas, files and units are made: no slash."""
    try:
        return _model_name(text)
    except Refused as refused:
        hint = "an alias may have a `/`: give it a plain name, and this one among its `aliases`"
        raise Refused(refused.expected, hint if "/" in text else refused.hint) from None


def node_id(text: str) -> str:
    """A node's id: the common name of its certificate, and the name of that certificate's files."""
    if text.lower() in ("ca", "ca-key"):
        raise Refused("a node id, which is its host's name", f"{text}.pem is a file of the authority's own")
    return _node_id(text)


def sha256(text: str) -> str:
    """64 hexadecimal digits, given back in lower case."""
    if not re.fullmatch(r"[0-9A-Fa-f]{64}", text):
        raise Refused("a SHA-256: 64 hexadecimal digits", f"it has {len(text)} characters")
    return text.lower()
