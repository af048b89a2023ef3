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
"""A file that was sent as text is read as if it lay by this name beside the control plane's own."""


async def suppose(plane: Plane, changes: Changes, text: str | None, folder: Path, name: str) -> WhatIf:
    """What ``changes`` and the models of the file ``text`` (None: those that are) would bring about. Faults of the file
    call it by ``name``.

    Changes nothing. Raises ApiError in words where a name is not known or the file is not sound.
    """
    cluster, now = plane.cluster, plane.now()
    if text is not None:
        catalog = await asyncio.to_thread(_catalog_of, text, folder, cluster.name, name)
        changes = replace(changes, catalog=catalog)
    try:
        return await asyncio.to_thread(what_if, cluster, changes, now)
    except NotSupposable as error:
        raise ApiError(422, "not_supposable", str(error), "llmgw ctl nodes lists nodes and their fabrics") from error


def _catalog_of(text: str, folder: Path, cluster: str, name: str) -> Catalog:
    read_as = str(folder / FILE_NAME)
    try:
        config = parse_server(text, read_as)
    except ConfigError as error:
        raise ApiError(
            422, "config_refused", str(error).replace(read_as, name), "mend the file and ask again"
        ) from error
    if config.cluster != cluster:
        words = f"the file is that of cluster {config.cluster!r}, and this is {cluster!r}"
        raise ApiError(422, "other_cluster", words, "give the file of this cluster, changed as you mean to change it")
    return config.catalog
