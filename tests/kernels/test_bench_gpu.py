"""The GPU bench where there is no GPU: its arithmetic and its path through the kernels; with one, its whole report."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mini_engine.config import ModelConfig
from mini_engine.kernels import bench_gpu
from mini_engine.kernels.gpus import GPUS

TINY = ModelConfig("qwen3", 1, 32, 4, 2, 16, 32, 50, True)


def test_share_of_peak_is_a_slope(device):
    """A clock of 10 us a launch and 1 ns a key: the launch falls out, one point would show a third less."""
    times = iter([10e-6 + 32e-9 * 2, 10e-6 + 96e-9 * 2])

    def timer(call):
        call()
        return next(times)

    row = bench_gpu.decode_attention(TINY, 2, (32, 96), device, timer, GPUS["sm_120"])
    key_bytes = 2 * 2 * 16 * 2  # K and V, 2 KV heads of 16 in bf16
    assert row["kv_bytes"] == [2 * 32 * key_bytes, 2 * 96 * key_bytes]
    assert row["slope_bytes_per_s"] == pytest.approx(key_bytes / 1e-9)
    assert row["share_of_peak"] == pytest.approx(128e9 / 1.792e12)


def test_batch_is_what_the_kernels_expect(device):
    """Every new token has a slot of its own, within the blocks of its sequence."""
    batch = bench_gpu.uniform_batch(3, 5, 40, device)
    assert len(batch.slot_mapping.unique()) == 15
    for row in range(3):
        blocks = batch.slot_mapping[5 * row : 5 * row + 5] // bench_gpu.BLOCK_SIZE
        assert blocks.tolist() == batch.block_table[row, 2:3].repeat(5).tolist()
    assert batch.positions.tolist() == [35, 36, 37, 38, 39] * 3


@pytest.mark.parametrize(
    "name, bandwidth",
    [
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 1.792e12),
        ("NVIDIA GeForce RTX 5090", None),
    ],
)
def test_peaks_are_only_of_the_card_they_belong_to(name, bandwidth):
    card = bench_gpu.find_gpu(name)
    assert (card and card.bandwidth) == bandwidth


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_skips_where_there_is_no_gpu():
    command = [sys.executable, "-m", "mini_engine.kernels.bench_gpu"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and not result.stdout and result.stderr.startswith("skipped: no CUDA device")


@pytest.mark.gpu
@pytest.mark.slow
def test_report_on_a_gpu():
    report = bench_gpu.report(torch.device("cuda"), bench_gpu.cuda_timer)
    assert all(row["slope_bytes_per_s"] > 0 for row in report["decode_attention"])
    assert report["steps"]["decode_ms"] >= (report["steps"]["decode_floor_ms"] or 0)
