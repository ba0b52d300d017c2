"""What is made of nvidia-smi's text, whole GPUs and MIG instances."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcjobs import nvidia
from hpcjobs.nvidia import find, parse

WHOLE = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111-aaaa-bbbb-cccc-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-22222222-aaaa-bbbb-cccc-000000000000)
"""
DETAILS = """\
GPU-11111111-aaaa-bbbb-cccc-000000000000, 143771, 00000000:18:00.0
GPU-22222222-aaaa-bbbb-cccc-000000000000, [N/A], 00000000:2A:00.0
"""
MIG = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-11111111-aaaa-bbbb-cccc-000000000000)
  MIG 3g.20gb     Device  0: (UUID: MIG-aaaaaaaa-0000-5000-8000-000000000001)
  MIG 1g.5gb+me   Device  1: (UUID: MIG-aaaaaaaa-0000-5000-8000-000000000002)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-22222222-aaaa-bbbb-cccc-000000000000)
"""


def test_whole_gpus_are_named_by_uuid() -> None:
    found = parse(WHOLE, DETAILS)
    assert (found.vendor, found.model, found.mode, found.missing) == ("nvidia", "NVIDIA H200", None, 0)
    assert [gpu.environment for gpu in found.gpus] == [
        {"CUDA_VISIBLE_DEVICES": "GPU-11111111-aaaa-bbbb-cccc-000000000000"},
        {"CUDA_VISIBLE_DEVICES": "GPU-22222222-aaaa-bbbb-cccc-000000000000"},
    ]
    assert [gpu.memory_gib for gpu in found.gpus] == [143771 / 1024, None]
    assert found.gpus[1].bdf == "00000000:2a:00.0"


def test_mig_instances_take_the_place_of_their_gpu() -> None:
    found = parse(MIG, DETAILS).gpus
    assert [(gpu.index, gpu.gpu, gpu.partition_id, gpu.memory_gib) for gpu in found] == [
        (0, 0, 0, 20.0), (1, 0, 1, 5.0), (2, 1, 0, None),
    ]  # fmt: skip
    assert found[1].environment == {"CUDA_VISIBLE_DEVICES": "MIG-aaaaaaaa-0000-5000-8000-000000000002"}
    assert len({gpu.identity for gpu in found}) == 3


def test_only_what_the_job_was_given_is_used() -> None:
    assert [gpu.gpu for gpu in parse(WHOLE, DETAILS, "1").gpus] == [1]
    assert [gpu.gpu for gpu in parse(WHOLE, DETAILS, "GPU-2222").gpus] == [1]
    assert [gpu.index for gpu in parse(MIG, DETAILS, "MIG-aaaaaaaa-0000-5000-8000-000000000002").gpus] == [1]
    assert parse(WHOLE, DETAILS, "").vendor == "none"


def test_no_gpu_is_a_clear_answer() -> None:
    assert parse("No devices found.\n", "").note == "no GPU visible"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the place of the program; the test writes its text."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script = tmp_path / "nvidia-smi"
    script.touch(0o755)
    return script


def test_the_program_is_asked_for_names_then_for_memory(nvidia_smi: Path) -> None:
    nvidia_smi.write_text(f'#!/bin/sh\nif [ "$1" = -L ]; then cat <<E\n{WHOLE}E\nelse cat <<E\n{DETAILS}E\nfi\n')
    assert [gpu.memory_gib for gpu in find().gpus] == [143771 / 1024, None]


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "version mismatch"),
        ("trap '' TERM; exec sleep 600", "gives no answer within 1 s"),
    ],
)
def test_a_driver_that_fails_or_hangs_is_a_clear_answer(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, script: str, note: str
) -> None:
    monkeypatch.setattr(nvidia, "TIMEOUT_S", 1)
    nvidia_smi.write_text(f"#!/bin/sh\n{script}\n")
    found = find()
    assert (found.gpus, note in found.note) == ((), True)
