"""Contexts cut over ranks, on the kernels: attention over a rank's part, and the merge of what the ranks send."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mini_engine import LLM, SamplingParams
from mini_engine.attention import AttentionState
from mini_engine.context_shard import ContextShard
from mini_engine.dcp import context_attention, merge_parts
from mini_engine.kv_cache import KVCache
from mini_engine.model_config import ModelConfig
from mini_engine.ops import Contexts
from mini_engine.triton_ops import TritonOps
from tests.builders import tiny_deepseek_v2_dir, tiny_llama_dir

PROMPTS = [[5], [7, 8, 9], list(range(20, 34))]


def test_a_context_may_be_empty_here(device):
    """Rows of one sequence whose part lies here, of one that has none, and of one that fills its block."""
    config = ModelConfig("llama", 1, 64, 4, 2, 16, 64, 64, False)
    kv = KVCache(config, 8, 4, torch.float32, device)
    random = torch.Generator().manual_seed(0)
    kv.k.copy_(torch.randn(kv.k.shape, generator=random))
    kv.v.copy_(torch.randn(kv.v.shape, generator=random))
    q = torch.randn(6, 4, 16, generator=random).to(device)
    table = torch.tensor([[3, 1], [0, 0], [5, 0]], dtype=torch.int32, device=device)
    contexts = Contexts(table, (3, 1, 2), (7, 0, 4))
    got = TritonOps().context_attention(contexts, kv, 0.25)(0, q)
    want = context_attention(q, *kv.layers[0], table, contexts.query_lens, contexts.lens, ContextShard(), 0.25)
    torch.testing.assert_close(got.out, want.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-5, atol=1e-5)
    assert torch.isneginf(got.lse[3]).all()
    assert not got.out[3].any()


def test_no_context_at_all_is_here(device):
    config = ModelConfig("llama", 1, 64, 4, 2, 16, 64, 64, False)
    kv = KVCache(config, 4, 4, torch.float32, device)
    contexts = Contexts(torch.zeros(2, 1, dtype=torch.int32, device=device), (1, 1), (0, 0))
    state = TritonOps().context_attention(contexts, kv, 0.25)(0, torch.ones(2, 4, 16, device=device))
    assert torch.isneginf(state.lse).all()


def test_the_kernel_merges_as_torch_does(device):
    random = torch.Generator().manual_seed(1)
    outs, lses = torch.randn(3, 5, 4, 16, generator=random), torch.randn(3, 5, 4, generator=random) * 30
    lses[0, 1], lses[:, 2] = -torch.inf, -torch.inf
    got: AttentionState = TritonOps().merge(outs.to(device), lses.to(device))
    want = merge_parts(outs, lses)
    torch.testing.assert_close(got.out.cpu(), want.out)
    torch.testing.assert_close(got.lse.cpu(), want.lse)


@pytest.mark.slow
@pytest.mark.parametrize("build", [partial(tiny_llama_dir, num_key_value_heads=1), tiny_deepseek_v2_dir])
def test_same_tokens_as_torch_alone(build, tmp_path, interpreter):
    """In processes: Triton's interpreter does not run in two threads at once."""
    model = str(build(tmp_path, num_attention_heads=4))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    common = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 12}

    def tokens(**options):
        with LLM(model, **common, **options) as llm:
            return [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)]

    ranks = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "dcp_comm_backend": "a2a"}
    assert tokens(attention_backend="triton", **ranks) == tokens(attention_backend="torch")
