"""Answers ``what if``: reads what is supposed, and runs the planner beside the loop that everything else depends on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from llmgw.cluster.catalog import Catalog
from llmgw.cluster.what_if import Changes, NotSupposable, WhatIf, what_if
from llmgw.config import ConfigError, parse_server
from llmgw.control.errors import ApiError
from llmgw.control.plane import Plane

FILE_NAME = "the-file-supposed.yaml"
"""How faults name a file that was sent as text. It is read as if it lay beside this control plane's own."""


async def suppose(plane: Plane, changes: Changes, text: str | None, folder: Path) -> WhatIf:
    """What ``changes`` and the models of the file ``text`` (None: those that are) would bring about.

    Changes nothing. Raises ApiError in words where a name is not known or the file is not sound.
    """
    cluster, now = plane.cluster, plane.now()
    if text is not None:
        catalog = await asyncio.to_thread(_catalog_of, text, folder, cluster.name)
        changes = replace(changes, catalog=catalog)
    try:
        return await asyncio.to_thread(what_if, cluster, changes, now)
    except NotSupposable as error:
        raise ApiError(422, "not_supposable", str(error), "llmgw ctl nodes lists nodes and their fabrics") from error


def _catalog_of(text: str, folder: Path, cluster: str) -> Catalog:
    try:
        config = parse_server(text, str(folder / FILE_NAME))
    except ConfigError as error:
        raise ApiError(422, "config_refused", str(error), "mend the file and ask again") from error
    if config.cluster != cluster:
        words = f"the file is that of cluster {config.cluster!r}, and this is {cluster!r}"
        raise ApiError(422, "other_cluster", words, "give the file of this cluster, changed as you mean to change it")
    return config.catalog
