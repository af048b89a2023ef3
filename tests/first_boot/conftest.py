from __future__ import annotations

import os

ASKED_FOR = "LLMGW_FIRST_BOOT"
"""A folder with the root of a Debian 12 that has cloud-init, or where one is to be made (`make test-first-boot`)."""

collect_ignore_glob = [] if os.environ.get(ASKED_FOR) else ["test_*.py"]
