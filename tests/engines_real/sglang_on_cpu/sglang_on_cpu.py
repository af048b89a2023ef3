"""Takes out of torchvision and torchaudio what was built for CUDA: without it they import with a torch that was not.

Imported at each start of the interpreter (``sglang_on_cpu.pth``).
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from typing import Any


class _Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name not in ("torchvision._meta_registrations", "torchaudio._extension"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Altered(spec.loader.name, spec.loader.path)
        return spec


class _Altered(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        if fullname == "torchvision._meta_registrations":
            return compile("", self.path, "exec")
        source = self.get_data(self.path).decode()
        lines = [
            "_IS_TORCHAUDIO_EXT_AVAILABLE = False" if line.startswith("_IS_TORCHAUDIO_EXT_AVAILABLE =") else line
            for line in source.splitlines()
        ]
        return compile("\n".join(lines), self.path, "exec")


sys.meta_path.insert(0, _Without())
