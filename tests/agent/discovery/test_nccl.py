from __future__ import annotations

from pathlib import Path

from llmgw.agent.discovery.nccl import warn_about_nccl
from llmgw.cluster.model import Fabric

from .machines import write_tree

FABRICS = (Fabric(name="ib-a", hcas=("mlx5_0",)),)


def test_a_machine_without_the_file_has_no_warning(tmp_path: Path) -> None:
    assert warn_about_nccl(tmp_path, FABRICS) == ()


def test_settings_that_apply_to_every_engine_are_named(tmp_path: Path) -> None:
    text = "# NCCL_NET=Socket\nNCCL_IB_DISABLE=1\n NCCL_DEBUG = INFO\nNCCL_IB_HCA=mlx5_0\n"
    write_tree(tmp_path, {"etc/nccl.conf": text})
    (warning,) = warn_about_nccl(tmp_path, FABRICS)
    assert warning.startswith("/etc/nccl.conf sets NCCL_DEBUG, NCCL_IB_DISABLE for every engine on this machine")
    assert warn_about_nccl(tmp_path, ()) == ()


def test_what_a_rank_is_told_anyway_is_no_matter(tmp_path: Path) -> None:
    write_tree(tmp_path, {"etc/nccl.conf": "NCCL_IB_HCA=mlx5_0\nNCCL_SOCKET_IFNAME=eth0\n"})
    assert warn_about_nccl(tmp_path, FABRICS) == ()
