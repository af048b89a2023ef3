"""``python -m tests.simulation --seed 123 --steps 1000``: one run, with its story where it fails."""

from __future__ import annotations

import sys

from .run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
