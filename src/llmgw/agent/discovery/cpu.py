"""The processor: model, cores that may be used, and the vector extensions that engines care about."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.discovery.cgroups import Limits
from llmgw.agent.discovery.files import read_text
from llmgw.cluster.model import Cpu

EXTENSIONS = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "fphp", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)

_VIRTUAL_MODELS = re.compile(r"QEMU|KVM|Virtual CPU", re.IGNORECASE)

# Main ID Register: implementer and part, as in Linux' arch/arm64/include/asm/cputype.h.
_ARM_PARTS = {
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd07"): "Cortex-A57",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd42"): "Cortex-A78AE",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x41", "0xd83"): "Neoverse-V3AE",
    ("0x41", "0xd84"): "Neoverse-V3",
    ("0x41", "0xd85"): "Cortex-X925",
    ("0x41", "0xd87"): "Cortex-A725",
    ("0x41", "0xd8e"): "Neoverse-N3",
    ("0x48", "0xd01"): "Kunpeng-920",
    ("0x4e", "0x004"): "Carmel",
    ("0x4e", "0x010"): "Olympus",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1a",
}
_ARM_IMPLEMENTERS = {
    "0x41": "Arm",
    "0x42": "Broadcom",
    "0x43": "Cavium",
    "0x46": "Fujitsu",
    "0x48": "HiSilicon",
    "0x4e": "NVIDIA",
    "0x50": "APM",
    "0x51": "Qualcomm",
    "0x61": "Apple",
    "0xc0": "Ampere",
}


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """What /proc/cpuinfo says. ``flags`` are those that every processor has; None: it does not say."""

    model: str
    processors: int
    flags: frozenset[str] | None

    @property
    def virtual(self) -> bool:
        return "hypervisor" in (self.flags or ()) or bool(_VIRTUAL_MODELS.search(self.model))


def parse_cpuinfo(text: str) -> CpuInfo:
    blocks = [block for part in re.split(r"\n\s*\n", text) if (block := _fields(part))]
    flag_sets = [frozenset(flags.split()) for block in blocks if (flags := block.get("flags") or block.get("Features"))]
    return CpuInfo(
        model=_model(blocks),
        processors=sum(1 for line in text.splitlines() if re.match(r"processor\s*:\s*[0-9]+\s*$", line)),
        flags=frozenset.intersection(*flag_sets) if flag_sets else None,
    )


def parse_cpu_list(text: str) -> int | None:
    """How many processors "0-7,16-23" names; None where it is no such list."""
    count = 0
    for part in text.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            return None
        count += int(match[2] or match[1]) - int(match[1]) + 1
    return count


def warn_about_cpu(info: CpuInfo, architecture: str) -> tuple[str, ...]:
    """Only of what is known to be missing: flags that can't be read are no warning."""
    if architecture != "x86_64" or not info.flags or "avx2" in info.flags:
        return ()
    way_out = (
        'this looks like a virtual machine with an emulated processor: set its CPU type to "host" '
        "(Proxmox: qm set VMID --cpu host), then stop and start it"
        if info.virtual
        else "no setting adds it to this processor: place models that run on the CPU on other nodes"
    )
    return (f"no AVX2: {info.model} runs models on the CPU about five times slower than one that has it; {way_out}",)


def read_cpu(root: Path, limits: Limits) -> tuple[Cpu, tuple[str, ...]]:
    """The processor, and warnings about it."""
    info = parse_cpuinfo(read_text(root / "proc/cpuinfo") or "")
    architecture = read_text(root / "proc/sys/kernel/arch") or os.uname().machine
    cores = _allowed(root) or info.processors or len(os.sched_getaffinity(0))
    if limits.cpus is not None:
        cores = max(1, min(cores, int(limits.cpus)))
    cpu = Cpu(
        model=info.model,
        architecture=architecture,
        cores=cores,
        extensions=tuple(name for name in EXTENSIONS if name in (info.flags or ())),
    )
    return cpu, warn_about_cpu(info, architecture)


def _allowed(root: Path) -> int | None:
    """The processors this process may run on: what sched_getaffinity counts, as the kernel prints it."""
    for line in (read_text(root / "proc/self/status") or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return parse_cpu_list(line.partition(":")[2]) or None
    return None


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _model(blocks: Sequence[dict[str, str]]) -> str:
    for key in ("model name", "Model Name", "cpu", "uarch", "Processor"):
        for block in blocks:
            if block.get(key):
                return " ".join(block[key].split())
    arm = dict.fromkeys(
        _arm_model(block["CPU implementer"], block.get("CPU part", "unknown"))
        for block in blocks
        if "CPU implementer" in block
    )
    return " + ".join(arm) or "unknown"


def _arm_model(implementer: str, part: str) -> str:
    vendor = _ARM_IMPLEMENTERS.get(implementer.lower(), f"implementer {implementer}")
    return f"{vendor} {_ARM_PARTS.get((implementer.lower(), part.lower()), f'part {part}')}"
