"""A look at a model file before an engine is given it."""

from __future__ import annotations

from pathlib import Path

_MAGIC = b"GGUF"


def complaint(path: Path) -> str | None:
    """Why this can't be the weights of a model, in words; None where nothing speaks against it."""
    try:
        if path.is_dir():
            return f"{path} is a directory; name the file in it" if not _looks_like_a_model(path) else None
        with path.open("rb") as file:
            head = file.read(4)
    except FileNotFoundError:
        return f"{path} is not on this node"
    except PermissionError:
        return f"{path} can't be read by the agent: look at the permissions of the file and of the folders above it"
    except OSError as error:
        return f"{path} can't be read: {error.strerror}"
    if path.suffix != ".gguf" or head == _MAGIC:
        return None
    if head == b"vers":
        return f"{path} is a pointer of Git LFS, not the file itself: get the file with git lfs pull"
    if not head:
        return f"{path} is empty"
    return f"{path} is no GGUF file: it begins with {head!r}, and GGUF files begin with {_MAGIC!r}"


def _looks_like_a_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()
