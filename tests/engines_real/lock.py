"""The lock of SGLang on a processor, whose kernels are stood in for: ``python -m tests.engines_real.lock FIND_LINKS…``.

Run where ``deploy/lock_engine.py`` is, at the top of the repository; ``patches`` writes one of the folders.
"""

from __future__ import annotations

import sys

from deploy.lock_engine import Build, lock, resolve

from tests.engines_real import SGLANG_LOCK, SGLANG_VERSION
from tests.engines_real.patches import SGL_KERNEL

SGLANG_ON_CPU = Build(
    requirements=("sglang=={version}",),
    without=(
        *("cuda-python", "flash-attn-4", "flashinfer-python", "humming-kernels", "nvidia-cutlass-dsl", "nvidia-mathdx"),
        *(
            "nvshmem4py-cu13",
            "quack-kernels",
            "sgl-deep-ep",
            "sgl-deep-gemm",
            "sgl-flash-mla",
            "tilelang",
            "torchcodec",
        ),
        *("torch-memory-saver", "torch-c-dlpack-ext", "kernels", "deepseek-recipe", "tml-renderers"),
        *("smg-grpc-servicer", "modelscope"),
    ),
    overrides=("torch==2.13.0+cpu", "torchvision==0.28.0", f"sglang-kernel=={SGL_KERNEL}", "triton==3.9.0"),
    options=("--prerelease", "allow"),
    unpacked=4.2,
    note="it is for tests alone: its kernels compute nothing",
)


def main() -> None:
    packages = resolve(SGLANG_ON_CPU, SGLANG_VERSION, "x86_64", sys.argv[1:])
    SGLANG_LOCK.write_text(lock("sglang", SGLANG_VERSION, "cpu", "x86_64", SGLANG_ON_CPU, packages))


if __name__ == "__main__":
    main()
