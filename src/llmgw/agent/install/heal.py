"""What an engine lacks of the operating system, installed by itself where that may be."""

from __future__ import annotations

import time

from llmgw.agent.install.faults import NotProved
from llmgw.agent.install.packages import OsPackages, PackagesFailed, PackagesNotAllowed
from llmgw.agent.install.recipe import Say
from llmgw.cluster.model import EngineState

AGAIN_S = 900.0
"""A package that did not help is not installed again before that."""


class Healer:
    """One per agent."""

    def __init__(self, packages: OsPackages, again_s: float = AGAIN_S) -> None:
        self._packages = packages
        self._again_s = again_s
        self._installed: dict[str, float] = {}
        """Package -> time.monotonic() of its last install here."""

    async def mend(self, failure: NotProved, say: Say) -> bool:
        """Installs the OS packages that ``failure`` names; True: prove it again. False: packages are not what it lacks.

        Raises NotProved where they are, and could not be installed or were a while ago, with the reason beside it.
        """
        lacked = failure.packages
        if not lacked:
            return False
        self._see_whether_it_helps(failure)
        try:
            await self._packages.install(lacked, lambda words: say(EngineState.OS_PACKAGES, words))
        except (PackagesNotAllowed, PackagesFailed) as why:
            raise NotProved(f"{failure}; {why}", failure.missing) from None
        self._installed |= dict.fromkeys(lacked, time.monotonic())
        say(EngineState.PROVING, f"proving it again, now with {', '.join(lacked)}")
        return True

    def _see_whether_it_helps(self, failure: NotProved) -> None:
        never = float("-inf")
        since = time.monotonic() - max(self._installed.get(package, never) for package in failure.packages)
        if since < self._again_s and all(package in self._installed for package in failure.packages):
            raise NotProved(
                f"{failure}; {' and '.join(failure.packages)} was installed for it {since / 60:.0f} minutes ago, and "
                f"will be again after {self._again_s / 60:.0f}: look into {self._packages.transcript}",
                failure.missing,
            )
