"""What an engine lacks of the operating system, installed; then it is proved again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from llmgw.agent.install.faults import NotProved
from llmgw.agent.install.packages import OsPackages, PackagesFailed, PackagesNotAllowed
from llmgw.agent.install.recipe import Say
from llmgw.cluster.model import EngineState

T = TypeVar("T")


async def healed(proving: Callable[[], Awaitable[T]], packages: OsPackages, say: Say) -> T:
    """What ``proving`` returns, at once or after OS packages that it lacked were installed.

    Where nothing can be installed for it, or that does not help, NotProved says so, beside what is missing.
    """
    tried: tuple[str, ...] = ()
    while True:
        try:
            return await proving()
        except NotProved as failure:
            lacked = tuple(name for name in failure.packages if name not in tried)
            if not lacked:
                raise _although(failure, tried) from None
            await _install(lacked, failure, packages, say)
            tried += lacked
            say(EngineState.PROVING, f"proving it again, now with {', '.join(tried)}")


async def _install(lacked: tuple[str, ...], failure: NotProved, packages: OsPackages, say: Say) -> None:
    try:
        await packages.install(lacked, lambda words: say(EngineState.OS_PACKAGES, words))
    except (PackagesNotAllowed, PackagesFailed) as why:
        raise NotProved(f"{failure}; {why}", failure.missing) from None


def _although(failure: NotProved, tried: tuple[str, ...]) -> NotProved:
    if not tried:
        return failure
    return NotProved(f"{failure}, although {', '.join(tried)} was installed just now", failure.missing)
