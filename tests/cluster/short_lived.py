"""``llmgw server``, whose certificates live for seconds: shorter than its file lets anybody say.

``python -m tests.cluster.short_lived SERVER.YAML SECONDS``
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from llmgw.cli.processes import set_up_logging
from llmgw.config import load_server
from llmgw.control.main import serve


def main() -> None:
    path, lifetime_s = Path(sys.argv[1]), float(sys.argv[2])
    set_up_logging()
    config = load_server(path)
    asyncio.run(serve(path, replace(config, tls=replace(config.tls, lifetime_s=lifetime_s)), new_admin_token=False))


if __name__ == "__main__":
    main()
