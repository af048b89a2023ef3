from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.discovery.smi_text import (
    CORE_FIELDS,
    FIELDS,
    explain_failure,
    parse_devices,
    parse_driver,
    parse_instances,
    parse_lost,
)

from .machines import FIXTURES, fixture

MIB = 1 << 20


def smi(name: str) -> str:
    return fixture(f"nvidia_smi/{name}")


def test_eight_gpus_with_all_that_is_asked_for() -> None:
    devices = parse_devices(smi("h100x8.csv"))
    assert [device.index for device in devices] == list(range(8))
    assert len({device.uuid for device in devices}) == 8
    assert {(device.name, device.memory_bytes) for device in devices} == {("NVIDIA H100 80GB HBM3", 81559 * MIB)}
    assert devices[1].bus_id == "0000:2a:00.0"
    assert not any(device.problem or device.mig or device.unsupported_memory for device in devices)
    assert parse_driver(smi("h100x8.csv")) == "570.124.06"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("h100x8_core_fields.csv", 8),
        ("header_and_units.csv", 2),
        ("header_other_order.csv", 1),
        ("ansi.csv", 2),
        ("crlf.csv", 2),
        ("infocorrupt.csv", 2),
        ("vgpu.csv", 2),
        ("gh200.csv", 1),
        ("mig.csv", 2),
        ("not_supported.csv", 1),
    ],
)
def test_every_form_of_the_csv_gives_its_gpus_with_their_memory(name: str, count: int) -> None:
    devices = parse_devices(smi(name))
    assert len(devices) == count
    for device in devices:
        assert device.uuid.startswith("GPU-")
        assert device.memory_bytes is not None
        assert device.memory_bytes > 8 << 30
        assert device.problem is None


def test_a_header_decides_the_columns() -> None:
    (device,) = parse_devices(smi("header_other_order.csv"))
    assert (device.index, device.name, device.memory_bytes) == (0, "NVIDIA GeForce RTX 4090", 24564 * MIB)


def test_vgpu_names_and_memory() -> None:
    assert [(device.name, device.memory_bytes) for device in parse_devices(smi("vgpu.csv"))] == [
        ("GRID A100-20C", 20480 * MIB),
        ("NVIDIA A40-12Q", 12288 * MIB),
    ]


@pytest.mark.parametrize("name", [path.name for path in sorted((FIXTURES / "nvidia_smi").glob("*.txt"))])
def test_no_message_is_ever_read_as_a_gpu(name: str) -> None:
    assert parse_devices(smi(name)) == ()
    assert parse_devices(smi(name), CORE_FIELDS) == ()


def test_garbage_is_no_gpu() -> None:
    assert parse_devices(smi("garbage.bin")) == ()


def test_memory_that_does_not_apply_is_told_from_memory_that_is_not_told() -> None:
    (unified,) = parse_devices(smi("gb10.csv"))
    assert (unified.memory_bytes, unified.unsupported_memory, unified.problem) == (None, True, None)
    assert unified.bus_id == "000f:01:00.0"
    (secret,) = parse_devices(smi("memory_not_said.csv"))
    assert (secret.memory_bytes, secret.unsupported_memory, secret.problem) == (None, False, None)


@pytest.mark.parametrize(
    ("name", "uuid"),
    [("lost_gpu_3_cells.csv", "GPU-5c1d7a30-33f1-8f6e-0b7a-9d2c4e6f8a13"), ("lost_gpu_3_whole_row.csv", "unknown-3")],
)
def test_a_lost_gpu_stands_beside_seven_usable_ones(name: str, uuid: str) -> None:
    devices = parse_devices(smi(name))
    assert [device.index for device in devices if device.problem is None] == [0, 1, 2, 4, 5, 6, 7]
    assert (devices[3].uuid, devices[3].problem, devices[3].memory_bytes) == (uuid, "GPU is lost", None)


@pytest.mark.parametrize(
    ("name", "words"), [("requires_reset.csv", "GPU requires reset"), ("unknown_error.csv", "Unknown Error")]
)
def test_a_gpu_in_trouble_says_so_in_the_drivers_words(name: str, words: str) -> None:
    good, bad = parse_devices(smi(name))
    assert good.problem is None
    assert bad.problem == words


@pytest.mark.parametrize("name", ["lost_gpu_no_handle.txt", "lost_gpu_no_handle_new_form.txt"])
def test_a_gpu_without_a_handle_is_known_by_its_bus(name: str) -> None:
    assert list(parse_lost(smi(name))) == ["0000:5d:00.0"]


def test_the_words_about_a_lost_gpu_are_whole_across_a_line_break() -> None:
    (words,) = parse_lost(smi("lost_gpu_no_handle.txt")).values()
    assert words == "GPU is lost. Reboot the system to recover this GPU"


def test_mig_instances_are_found_under_their_gpu() -> None:
    instances = parse_instances(smi("mig_L.txt"))
    assert list(instances) == ["GPU-5c1d7a00-33f1-8f6e-0b7a-9d2c4e6f8a10"]
    (slices,) = instances.values()
    assert [one.device for one in slices] == list(range(7))
    assert {one.profile for one in slices} == {"1g.10gb"}
    assert all(one.uuid.startswith("MIG-") and one.memory_bytes is None for one in slices)


def test_mig_instances_in_the_old_form() -> None:
    (slices,) = parse_instances(smi("mig_L_old_form.txt")).values()
    assert [one.uuid.rsplit("/", 2)[1:] for one in slices] == [["1", "0"], ["2", "0"]]


@pytest.mark.parametrize(
    ("status", "name", "said", "advice"),
    [
        (4, "rc4.txt", "Insufficient Permissions", "as root"),
        (6, "rc6.txt", "No devices were found", "in a container, start that with the GPUs (`--gpus all`"),
        (6, "rc6.txt", "No devices were found", "see dmesg"),
        (9, "rc9.txt", "couldn't communicate", "modprobe nvidia"),
        (12, "rc12.txt", "couldn't find libnvidia-ml.so", "user libraries"),
        (15, "rc15.txt", "GPU is lost", "reboot"),
        (18, "rc18.txt", "version mismatch", "reboot"),
        (255, "rc18.txt", "version mismatch", "reboot"),
        (255, "rc255.txt", "Unknown Error", "(`systemctl daemon-reload`): restart the container, with `--gpus all`"),
        (255, "rc255.txt", "Unknown Error", "outside of one, see dmesg"),
        (-11, "empty.txt", "signal 11", "by hand"),
    ],
)
def test_a_failure_is_explained_with_its_words_and_a_next_step(status: int, name: str, said: str, advice: str) -> None:
    words = explain_failure(status, smi(name))
    assert said in words
    assert advice in words
    assert "\n" not in words


_CELLS = st.sampled_from(
    [
        "0",
        "3",
        "GPU-5c1d7a00-33f1",
        "NVIDIA H100",
        "81559",
        "0",
        "[N/A]",
        "[GPU is lost]",
        "Enabled",
        '"',
        "\x1b[4m",
        "\r",
    ]
)


@given(st.text() | st.lists(st.lists(_CELLS, max_size=9).map(", ".join)).map("\n".join), st.integers(-64, 255))
def test_nothing_that_is_printed_raises_or_makes_memory_of_nothing(text: str, status: int) -> None:
    for fields in (FIELDS, CORE_FIELDS):
        for device in parse_devices(text, fields):
            assert device.memory_bytes is None or device.memory_bytes > 0
            assert device.uuid
    parse_driver(text)
    parse_instances(text)
    parse_lost(text)
    assert explain_failure(status, text)
