"""Bytes that kernels load, counted load by load in the interpreter, against the least possible."""

from __future__ import annotations

import pytest
import torch

from mini_engine.kernels.merge import merge_states
from mini_engine.kernels.rms_norm import rms_norm
from mini_engine.kernels.rope import rope
from mini_engine.kernels.swiglu import swiglu
from mini_engine.kernels.tiles import SHORT_QUERY, TileConfig
from mini_engine.kernels.traffic import attention_traffic, counting_loads, latent_traffic
from tests.kernels.paged import make_paged
from tests.kernels.test_paged_attention import attention

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.mark.parametrize("heads, kv_heads, dim", [(8, 2, 128), (9, 3, 64), (7, 1, 80)])
@pytest.mark.parametrize("query_len", [1, 4])
def test_short_queries_read_k_and_v_once_per_kv_head(heads, kv_heads, dim, query_len):
    loaded, least = attention_traffic(heads, kv_heads, dim, query_len)
    assert loaded == least


def test_a_tile_too_small_for_the_queries_reads_them_again():
    """The counter sees it: 8 queries of 4 heads are 32 rows, two tiles of 16. The first tile sees 4 keys less."""
    case = make_paged((8,), (40,), torch.device("cpu"))
    with counting_loads(k=case.k_cache) as counter:
        attention(case, TileConfig(16, 16, 0, 4, 2))
    assert counter.loaded["k"] == (48 + 44) * 64 * 4


def test_a_chunk_skips_what_its_queries_cannot_see():
    """Causal: 4 tiles of 8 queries see 8, 16, 24 and 32 of 32 keys."""
    case = make_paged((32,), (0,), torch.device("cpu"))
    with counting_loads(k=case.k_cache, v=case.v_cache) as counter:
        attention(case, TileConfig(32, 16, 0, 4, 2))
    assert counter.loaded == {"k": 80 * 64 * 4, "v": 80 * 64 * 4}


def test_all_drafts_of_a_short_query_fit_one_tile_at_a_group_of_4():
    loaded, least = attention_traffic(4, 1, 64, SHORT_QUERY)
    assert loaded == least


@pytest.mark.parametrize(
    "heads, query_len, tiles",
    [(1, 1, 1), (8, 2, 1), (16, 1, 1), (16, 2, 1), (128, 1, 4), (40, 1, 2)],
)
def test_latents_are_read_once_for_all_heads_of_a_tile(heads, query_len, tiles):
    """As keys and as values by the same load; again only for the next 32 heads."""
    loaded, least = latent_traffic(heads, 48, 32, query_len)
    assert loaded == tiles * least


def test_merge_leaves_empty_parts_unread():
    outs, lses = torch.zeros(3, 2, 2, 64), torch.zeros(3, 2, 2)
    lses[1] = float("-inf")
    with counting_loads(outs=outs) as counter:
        merge_states(outs, lses)
    assert counter.loaded["outs"] == 2 * outs[0].nbytes


def test_small_kernels_read_their_input_once():
    x, gate_up, table = torch.zeros(3, 5, 64), torch.zeros(3, 3000), torch.zeros(9, 2, 64)
    positions = torch.tensor([8, 0, 1])
    with counting_loads(x=x, gate_up=gate_up, table=table) as counter:
        rms_norm(x, torch.ones(64), 1e-6)
        swiglu(gate_up)
        rope(x, table, positions)
    assert counter.loaded == {"x": 2 * x.nbytes, "gate_up": gate_up.nbytes, "table": 3 * table[0].nbytes}
