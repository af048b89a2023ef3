"""NVIDIA GPUs: NVML where it can be read, else nvidia-smi; each bounded in time."""

from __future__ import annotations

from pathlib import Path

from llmgw.agent.discovery.files import names_in, read_text
from llmgw.agent.discovery.gpus import Device, GpuReport, loaded_driver, to_gpus, warn_about_gpus
from llmgw.agent.discovery.nvidia_smi import SmiFailed, ask_nvidia_smi, find_nvidia_smi
from llmgw.agent.discovery.nvml import NvmlUnreadable, ask_nvml
from llmgw.agent.discovery.probe import ProbeHung, ProbeMissing
from llmgw.agent.discovery.settings import DiscoverySettings
from llmgw.agent.discovery.smi_text import NO_DEVICE

_NVIDIA_VENDOR = "0x10de"
_NO_GPU = "it counts no GPU"
_DISPLAY_CLASSES = ("0x0300", "0x0302")


async def find_gpus(settings: DiscoverySettings, machine_memory_bytes: int, architecture: str) -> GpuReport:
    """Never raises for what a driver does: a problem is a warning, and ``gpus`` None where GPUs may be there."""
    smi = find_nvidia_smi(settings.nvidia_smi)
    driver = loaded_driver(settings.root)
    if smi is None and driver is None:
        return GpuReport(warnings=_undriven(settings.root))

    def report(devices: tuple[Device, ...], source: str, version: str | None, warnings: tuple[str, ...]) -> GpuReport:
        gpus = to_gpus(devices, machine_memory_bytes, settings.root, architecture)
        return GpuReport(
            gpus=gpus, source=source, driver=version or driver, warnings=(*warnings, *warn_about_gpus(gpus))
        )

    nvml_problem: str | None = None
    try:
        if settings.prefer_nvml or smi is None:
            try:
                nvml = await ask_nvml(settings.probe_limit_s)
                if nvml.devices:
                    return report(nvml.devices, "nvml", nvml.driver, ())
                # As in a container that was started without its devices: NVML finds nothing wrong with that.
                nvml_problem = _NO_GPU
            except NvmlUnreadable as error:
                nvml_problem = str(error)
        if smi is None and nvml_problem == _NO_GPU:
            return _silent(driver, f"NVML counts no GPU: {NO_DEVICE}")
        if smi is None:
            return _silent(driver, f"the NVIDIA driver is loaded, but NVML can't be read ({nvml_problem})")
        answer = await ask_nvidia_smi(smi, settings.probe_limit_s, settings.root)
    except ProbeHung as error:
        return _silent(driver, f"GPU probe hung ({error}): the driver may be wedged; see dmesg for Xid, then reboot")
    except ProbeMissing as error:
        if settings.nvidia_smi:
            words = f"discovery.nvidia_smi names {smi}, which can't be run ({error}): correct it, or leave it out"
            return _silent(driver, words)
        return _silent(driver, f"{smi} can't be run ({error})")
    except SmiFailed as error:
        return _silent(driver, str(error))
    fallback: tuple[str, ...] = ()
    if nvml_problem is not None and answer.devices:
        cost = "" if answer.links_known else "; which GPUs NVLink joins is not known"
        fallback = (f"NVML can't be read ({nvml_problem}): nvidia-smi used instead{cost}",)
    return report(answer.devices, "nvidia-smi", answer.driver, (*fallback, *answer.warnings))


def _silent(driver: str | None, words: str) -> GpuReport:
    return GpuReport(gpus=None, driver=driver, warnings=(words,))


def _undriven(root: Path) -> tuple[str, ...]:
    """NVIDIA cards on the PCI bus of a machine that has no NVIDIA driver at all: bought, and not used."""
    devices = root / "sys/bus/pci/devices"
    cards = [
        name
        for name in names_in(devices)
        if read_text(devices / name / "vendor") == _NVIDIA_VENDOR
        and (read_text(devices / name / "class") or "").startswith(_DISPLAY_CLASSES)
    ]
    if not cards:
        return ()
    return (f"NVIDIA card in this machine ({', '.join(cards)}), but no NVIDIA driver: install one to use it",)
