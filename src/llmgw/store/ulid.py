"""ULIDs: ids that sort by time (https://github.com/ulid/spec). 48 bits of milliseconds, 80 bits of randomness."""

from __future__ import annotations

from collections.abc import Callable

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
LENGTH = 26
RANDOM_BYTES = 10

_RANDOM_BITS = 80
_RANDOM_MASK = (1 << _RANDOM_BITS) - 1
_LARGEST = (1 << 128) - 1


class Ulids:
    """Makes ULIDs, each greater than the one before, also within a millisecond and when the clock goes back.

    ``clock`` gives wall-clock Unix seconds, ``randomness(n)`` n random bytes (``os.urandom``). ``after`` is an id
    that all new ones must follow: the newest one stored, so that a clock set back between two runs does no harm.
    """

    def __init__(
        self, clock: Callable[[], float], randomness: Callable[[int], bytes], *, after: str | None = None
    ) -> None:
        self._clock = clock
        self._randomness = randomness
        self._last = -1 if after is None else decode(after)

    def next(self) -> str:
        milliseconds = max(0, int(self._clock() * 1000))
        fresh = (milliseconds << _RANDOM_BITS) | int.from_bytes(self._randomness(RANDOM_BYTES), "big") & _RANDOM_MASK
        in_a_later_millisecond = milliseconds > self._last >> _RANDOM_BITS
        self._last = fresh if in_a_later_millisecond else self._last + 1
        return encode(self._last)


def encode(value: int) -> str:
    """128 bits as 26 characters of Crockford's base 32."""
    if not 0 <= value <= _LARGEST:
        raise ValueError(f"{value} does not fit into the 128 bits of a ULID")
    return "".join(ALPHABET[value >> shift & 31] for shift in range(125, -1, -5))


def decode(text: str) -> int:
    """The 128 bits of a ULID. Raises ValueError where it is none."""
    if len(text) != LENGTH or text[0] not in ALPHABET[:8] or not set(text) <= set(ALPHABET):
        raise ValueError(f"{text!r} is not a ULID: expected {LENGTH} characters of {ALPHABET}, the first 0 to 7")
    value = 0
    for character in text:
        value = value << 5 | ALPHABET.index(character)
    return value


def time_of(ulid: str) -> float:
    """Unix seconds at which it was made, to the millisecond."""
    return (decode(ulid) >> _RANDOM_BITS) / 1000
