"""The GPU bench where there is no GPU: its arithmetic and its path through the kernels; with one, all its rows."""

from __future__ import annotations

import pytest
import torch

from mini_engine.analysis.dcp_shapes import AttentionShape
from mini_engine.bench import gpu
from mini_engine.cli import main
from mini_engine.config import ModelConfig
from mini_engine.kernels.gpus import GPUS

TINY = ModelConfig("qwen3", 1, 32, 4, 2, 16, 32, 50, True)


def test_share_of_peak_is_a_slope(device):
    """A clock of 10 us a launch and 1 ns a key: the launch falls out, one point would show a third less."""
    times = iter([10e-6 + 32e-9 * 2, 10e-6 + 96e-9 * 2])

    def timer(call):
        call()
        return next(times)

    row = gpu.decode_attention(TINY, 2, (32, 96), device, timer, GPUS["sm_120"])
    key_bytes = 2 * 2 * 16 * 2  # K and V, 2 KV heads of 16 in bf16
    assert row["value"] == pytest.approx(key_bytes / 1e-9 / 1e12)
    assert row["share_of_bound"] == pytest.approx(128e9 / 1.792e12)


def test_share_of_peak_of_latents_is_a_slope(device):
    """Latents count once, though they are keys and values; a clock of 10 us a launch and 1 ns a key."""
    shape = AttentionShape("tiny", 1, 32, heads=4, kv_heads=1, key_dim=48, value_dim=32, cached_values=48)
    times = iter([10e-6 + 32e-9 * 2, 10e-6 + 96e-9 * 2])

    def timer(call):
        assert call().out.shape == (2, 4, 32)
        return next(times)

    row = gpu.latent_decode_attention(shape, 2, (32, 96), device, timer, GPUS["sm_120"])
    assert row["value"] == pytest.approx(48 * 2 / 1e-9 / 1e12)
    assert row["share_of_bound"] == pytest.approx(96e9 / 1.792e12)


def test_steps_run_eagerly_and_replayed(device):
    """Every timed call runs; a recording that only counts its replays stands in for a CUDA graph."""
    replays = []

    def capture(run):
        return lambda: replays.append(1) or run()

    def timer(call):
        assert call().shape == (1, TINY.vocab_size)
        return next(times)

    times = iter([8e-3, 4e-3, 1e-3])
    eager, graph, prefill = gpu.steps(TINY, 32, device, timer, GPUS["sm_120"], capture)
    assert (eager["value"], graph["value"], len(replays)) == (8.0, 4.0, 1)
    assert graph["ratio_to_peer"] == 2.0 and eager["ratio_to_peer"] == pytest.approx(26.26 / 8)
    floor = (TINY.weight_read_bytes("bfloat16") + 32 * TINY.kv_bytes_per_token("bfloat16")) / 1.792e12 * 1e3
    assert eager["bound"] == pytest.approx(floor) and eager["share_of_bound"] == pytest.approx(floor / 8)
    assert prefill["value"] > 0


def test_the_floor_of_the_books_step():
    """8.62 ms, book 8.2.1: the weights and 2,048 tokens of Qwen3-8B over the bandwidth of an RTX PRO 6000."""
    model = gpu.MODELS["Qwen3-8B"]
    read = model.weight_read_bytes("bfloat16") + gpu.CHUNK * model.kv_bytes_per_token("bfloat16")
    assert read / GPUS["sm_120"].bandwidth * 1e3 == pytest.approx(8.62, abs=0.005)


def test_batch_is_what_the_kernels_expect():
    """Every new token has a slot of its own, within the blocks of its sequence."""
    batch = gpu.uniform_batch(3, 5, 40)
    assert len(batch.slot_mapping.unique()) == 15
    for row in range(3):
        blocks = batch.slot_mapping[5 * row : 5 * row + 5] // gpu.BLOCK_SIZE
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
    card = gpu.find_gpu(name)
    assert (card and card.bandwidth) == bandwidth


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_skips_where_there_is_no_gpu(capsys):
    assert main(["bench", "--device", "cuda"]) == 0
    out, err = capsys.readouterr()
    assert not out and err.startswith("skipped: no CUDA device")


@pytest.mark.gpu
@pytest.mark.slow
def test_rows_on_a_gpu():
    rows = list(gpu.rows(torch.device("cuda"), gpu.cuda_timer))
    assert all(row["value"] > 0 for row in rows)
    assert all(row["share_of_bound"] <= 1.05 for row in rows if "share_of_bound" in row)
