"""The kinds of values that files hold, as types that pydantic checks.

A kind is an ``Annotated`` type whose check raises ``Refused``. Validation may be run on a tree in which values that
were refused before stand as BROKEN: those pass anywhere, so that rules over several values can be tried on the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationInfo, WrapValidator, field_validator

from llmgw.cluster.catalog import BuildKind, EngineName, LaunchMode, Task
from llmgw.cluster.model import PortRange
from llmgw.config import addresses, names, sources
from llmgw.config.addresses import HostPort, ServerUrl
from llmgw.config.faults import Refused
from llmgw.config.hints import close_to
from llmgw.config.quantities import DURATION, SIZE, format_duration, parse_duration, parse_size

T = TypeVar("T")
Wrapped = Callable[[object], object]


class _Broken:
    def __repr__(self) -> str:
        return "BROKEN"


BROKEN = _Broken()
"""Stands for a value that was refused. See ``whole``."""


def whole(*values: object) -> bool:
    """Whether none of the values was refused, so that a rule over them makes sense."""
    return not any(value is BROKEN for value in values)


def _unless_broken(value: object, check: Wrapped) -> object:
    return value if value is BROKEN else check(value)


class Section(BaseModel):
    """A mapping of a file, with its keys as fields. A field's description says what a missing key is for."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    TITLE: ClassVar[str]
    """What people call it: "a profile"."""
    WORDS: ClassVar[Mapping[str, str]] = {}
    """Keys that people try, and the key that they mean."""
    HINTS: ClassVar[Mapping[str, str]] = {}
    """What to do about a key that is missing, or that is not one."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _pass_broken(cls, value: object, check: Wrapped) -> object:
        if value is BROKEN:
            return value
        checked = check(value)
        if value is None:
            raise Refused("a value")
        return checked


Item = Annotated[T, WrapValidator(_unless_broken)]
"""What lists and mappings hold."""


def _text_kind(parse: Callable[[str], object], expected: str = "text") -> PlainValidator:
    """A kind that is written as text. Numbers and words that YAML reads as such are refused with "quote it"."""

    def check(value: object) -> object:
        if isinstance(value, str):
            return parse(value)
        raise _no_text(value, _expected_by(parse) or expected, parse)

    return PlainValidator(check)


def _no_text(value: object, expected: str, parse: Callable[[str], object]) -> Refused:
    return Refused(expected, quoted=parse if isinstance(value, bool | int | float) else None)


def _expected_by(parse: Callable[[str], object]) -> str:
    """What the check says of a text that is certainly wrong."""
    try:
        parse("\n")
    except Refused as refused:
        return refused.expected
    return ""


def _plain(text: str) -> str:
    return text


def _filled(text: str) -> str:
    if not text.strip():
        raise Refused("text that is not empty")
    return text


def _quantity(parse: Callable[[str], float], expected: str, allowed: Callable[[float], bool], bounds: str) -> Any:
    expected = f"{expected}{bounds}"

    def check(value: object) -> float:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise Refused(expected)
        try:
            number = parse(str(value))
        except Refused as refused:
            raise Refused(expected, refused.hint) from None
        if not allowed(number):
            raise Refused(expected)
        return number

    return PlainValidator(check)


def _duration(least: float = 0.0, most: float = math.inf) -> Any:
    bounds = f", at least {format_duration(least)}" if least else ""
    bounds += f", at most {format_duration(most)}" if most < math.inf else ""
    return _quantity(parse_duration, DURATION, lambda seconds: least <= seconds <= most, bounds)


def count(least: int, most: int) -> Any:
    """A whole number within bounds, both included: for use in ``Annotated[int, count(1, 64)]``."""
    expected = f"a whole number from {least} to {most}"

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise Refused(expected, _count_hint(value) if isinstance(value, str) else "")
        return value

    return PlainValidator(check)


def _count_hint(text: str) -> str:
    if not text.isdecimal() or not text.isascii():
        return ""
    return "without quotes" if text == "0" or text[0] != "0" else f"without leading zeros: {text.lstrip('0') or '0'}"


def _choice(choices: Any, hints: Mapping[str, str] | None = None) -> PlainValidator:
    allowed: tuple[str, ...] = get_args(choices)
    expected = f"{', '.join(allowed[:-1])} or {allowed[-1]}"

    def check(value: object) -> str:
        if isinstance(value, str) and value in allowed:
            return value
        close = close_to(value, allowed) if isinstance(value, str) else None
        hint = (hints or {}).get(str(value).lower(), "") or (f"did you mean `{close}`?" if close else "")
        raise Refused(expected, hint)

    return PlainValidator(check)


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        said = {"yes": "true", "on": "true", "no": "false", "off": "false"}
        meant = said.get(str(value).lower(), str(value).lower())
        raise Refused("true or false", f"write {meant}" if meant in ("true", "false") else "")
    return value


def _positive(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise Refused("a number greater than 0", "without a unit" if isinstance(value, str) else "")
    return float(value)


def _located(value: object, info: ValidationInfo) -> Path:
    """A path, taken from the directory of the file that names it."""
    expected = "a path"
    if not isinstance(value, str):
        raise _no_text(value, expected, _plain)
    if not value.strip() or "\n" in value:
        raise Refused(expected)
    if value.startswith("~"):
        raise Refused(expected, "`~` is not read here: write the whole path")
    return base_of(info) / value


def base_of(info: ValidationInfo) -> Path:
    """The directory of the file that is being read."""
    base = info.context["base"] if info.context else Path("/")
    assert isinstance(base, Path)
    return base


def _program(value: object, info: ValidationInfo) -> str | None:
    """A program's name or path; a path with a slash is located like any other. Empty: none is named."""
    if not isinstance(value, str):
        raise _no_text(value, "a program's name or path", _plain)
    if not value:
        return None
    return str(_located(value, info)) if "/" in value or value.startswith("~") else value


def _store(value: object, info: ValidationInfo) -> str:
    if not isinstance(value, str):
        raise Refused(sources.STORE)
    return sources.parse_store(value, base_of(info))


Duration = Annotated[float, _duration()]
Interval = Annotated[float, _duration(0.01, 300.0)]
Patience = Annotated[float, _duration(0.001)]
Lifetime = Annotated[float, _duration(60.0)]
Size = Annotated[int, _quantity(parse_size, SIZE, lambda size: size >= 1, ", at least 1B")]
Count = Annotated[int, count(1, 1_000_000_000)]
Truth = Annotated[bool, PlainValidator(_truth)]
PositiveNumber = Annotated[float, PlainValidator(_positive)]

Text = Annotated[str, _text_kind(_plain)]
Filled = Annotated[str, _text_kind(_filled)]
ClusterName = Annotated[str, _text_kind(names.cluster_name)]
ModelName = Annotated[str, _text_kind(names.model_name)]
Alias = Annotated[str, _text_kind(names.alias)]
ProfileName = Annotated[str, _text_kind(names.profile_name)]
FabricName = Annotated[str, _text_kind(names.fabric_name)]
AdapterName = Annotated[str, _text_kind(names.adapter_name)]
InterfaceName = Annotated[str, _text_kind(names.interface_name)]
LabelKey = Annotated[str, _text_kind(names.label_key)]
LabelValue = Annotated[str, _text_kind(names.label_value)]
NodeId = Annotated[str, _text_kind(names.node_id)]
Version = Annotated[str, _text_kind(names.version)]
Package = Annotated[str, _text_kind(names.package)]
Sha256 = Annotated[str, _text_kind(names.sha256)]
Source = Annotated[str, _text_kind(sources.parse_source)]
Download = Annotated[str, _text_kind(sources.parse_download)]

ListenAt = Annotated[HostPort, _text_kind(addresses.parse_host_port)]
Ip = Annotated[str, _text_kind(addresses.parse_ip)]
Server = Annotated[ServerUrl, _text_kind(addresses.parse_server_url)]
Advertised = Annotated[str, _text_kind(addresses.parse_advertised)]
Ports = Annotated[PortRange, _text_kind(addresses.parse_port_range)]

_NO_ENGINE = {
    "llama.cpp": "llama.cpp is written `llamacpp`",
    "llama-cpp": "llama.cpp is written `llamacpp`",
    "ollama": "engines are those that llmgw starts itself; a GGUF file is served by `llamacpp`",
}
Engine = Annotated[EngineName, _choice(EngineName, _NO_ENGINE)]
ModelTask = Annotated[Task, _choice(Task, {"chat": "chat is `generate`", "embedding": "that is `embed`"})]
Launching = Annotated[LaunchMode, _choice(LaunchMode)]
Building = Annotated[BuildKind, _choice(BuildKind, {"gpu": "NVIDIA GPUs are `cuda`"})]

Located = Annotated[Path, PlainValidator(_located)]
Program = Annotated[str | None, PlainValidator(_program)]
StoreUrl = Annotated[str, PlainValidator(_store)]
