"""``python -m llmgw``: the same as the ``llmgw`` command."""

from llmgw.cli import main

if __name__ == "__main__":
    main()
