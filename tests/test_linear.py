"""Products by 4-bit weights: the groups are the file's own, and the error is that of bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mini_engine import LLM, SamplingParams
from mini_engine import linear as linears
from mini_engine.errors import ModelLoadError
from mini_engine.linear import HalfLinear, Int4Groups, Int4Linear, Linear, extra_bytes
from mini_engine.weights import open_checkpoint
from tests.builders import tiny_llama_dir, tiny_qwen3_dir, to_gguf


def random_groups(rows: int, columns: int) -> tuple[torch.Tensor, Int4Groups]:
    """A weight that is exactly what its groups say, and the groups."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=draw)
    scale = torch.rand(rows, columns // 32, generator=draw) * 0.02 + 0.001
    minimum = -8 * scale + 0.01 * torch.randn(rows, columns // 32, generator=draw)
    weight = q.unflatten(1, (-1, 32)) * scale[..., None] + minimum[..., None]
    return weight.flatten(1), Int4Groups(q, scale, minimum)


def error(product: torch.Tensor, exact: torch.Tensor) -> float:
    return ((product - exact).norm() / exact.norm()).item()


@pytest.fixture(params=[False, True], ids=["no AMX", "AMX"])
def amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A CPU that multiplies tiles of bfloat16, and one that does not."""
    monkeypatch.setattr(linears, "has_amx", lambda: request.param)
    return request.param


@pytest.mark.parametrize("rows", [1, 3, 8, 16])
def test_few_rows_are_as_exact_as_bfloat16(rows: int, amx: bool) -> None:
    weight, groups = random_groups(96, 192)
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(1))
    exact = F.linear(x, weight)
    bfloat16 = error(F.linear(x.bfloat16(), weight.bfloat16()).float(), exact)
    for linear in (Int4Linear(weight.to(linears.many_rows_dtype()), groups), HalfLinear(weight)):
        product = linear(x)
        assert product.dtype == torch.float32 and not torch.equal(product, exact)
        assert error(product, exact) < 1.5 * bfloat16 < 0.01


@pytest.mark.parametrize("rows", [1, 8, 9, 32, 33])
def test_all_ways_to_ask_for_a_product_agree(rows: int, amx: bool) -> None:
    """Whichever way round the matrices are multiplied. A result's rows lie one after the other."""
    weight, groups = random_groups(96, 192)
    draw = torch.Generator().manual_seed(1)
    x, residual = torch.randn(rows, 192, generator=draw), torch.randn(rows, 96, generator=draw)
    for linear in (Linear(weight), Int4Linear(weight.to(linears.many_rows_dtype()), groups), HalfLinear(weight)):
        product, out = linear(x), torch.empty(rows, 96)
        assert product.is_contiguous() and error(product, F.linear(x, weight)) < 0.01
        if type(linear) is HalfLinear:  # for the vocabulary alone
            continue
        linear.write(x, out)
        assert torch.equal(out, product)
        linear.write_sum(residual, x, out)
        added = linear.add_to(residual, x)
        assert torch.equal(out, added) and added.is_contiguous()
        assert error(added, residual + product) < 1e-6


def test_which_weights_multiply_how_many_rows(amx: bool) -> None:
    """Seen by the zeros that take the place of one form of the weight."""
    weight, groups = random_groups(96, 192)
    limit = 8 if amx else 16
    linear = Int4Linear(torch.zeros_like(weight, dtype=linears.many_rows_dtype()), groups)
    assert linear(torch.ones(limit, 192)).any() and not linear(torch.ones(limit + 1, 192)).any()
    head = HalfLinear(weight)
    head.half.zero_()
    assert not head(torch.ones(1, 192)).any() and not head(torch.ones(16, 192)).any()
    assert head(torch.ones(17, 192)).any() == (not amx)


def test_many_rows_are_exact_where_float32_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "has_amx", lambda: False)
    weight, groups = random_groups(96, 192)
    x = torch.randn(17, 192, generator=torch.Generator().manual_seed(1))
    for linear in (Int4Linear(weight, groups), HalfLinear(weight)):
        assert torch.equal(linear(x), F.linear(x, weight))


def test_bytes_held_and_read() -> None:
    weight, groups = random_groups(96, 192)
    packed = 96 * 192 // 2 + 2 * 2 * 96 * 192 // 32  # half a byte an element, two bfloat16 a group
    for dense in (weight, weight.bfloat16()):
        assert Int4Linear(dense, groups).read_bytes() == packed
        assert sum(tensor.nbytes for tensor in Int4Linear(dense, groups).tensors()) == packed + dense.nbytes
    assert HalfLinear(weight).read_bytes() == weight.nbytes // 2
    assert Linear(weight).read_bytes() == weight.nbytes


def test_bytes_are_known_from_the_header(tmp_path: Path, amx: bool) -> None:
    path = str(to_gguf(tiny_llama_dir(tmp_path), tmp_path / "q4.gguf", "Q4_1"))
    held = {dtype: LLM(path, dtype=dtype, device="cpu").engine.runner.weight_bytes for dtype in ("auto", "float32")}
    with open_checkpoint(path) as checkpoint:
        assert held["auto"] - held["float32"] == extra_bytes(checkpoint)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("build", [tiny_llama_dir, tiny_qwen3_dir])
def test_groups_multiply_out_to_the_dequantised_matrix(build, kind: str, tmp_path: Path) -> None:
    with open_checkpoint(str(to_gguf(build(tmp_path), tmp_path / "model.gguf", kind))) as checkpoint:
        for name in checkpoint.names():
            assert checkpoint.holds_int4(name) == (len(checkpoint.shape(name)) == 2)
            if not checkpoint.holds_int4(name):
                with pytest.raises(ModelLoadError, match="is F32, not one of Q4_0, Q4_1"):
                    checkpoint.read_int4(name)
                continue
            groups = checkpoint.read_int4(name)
            assert groups.q.max() < 16
            dense = torch.empty(checkpoint.shape(name))
            checkpoint.read(name, dense)
            product = groups.q.unflatten(1, (-1, 32)) * groups.scale[..., None] + groups.minimum[..., None]
            torch.testing.assert_close(product.flatten(1), dense, rtol=0, atol=1e-6)


def test_only_auto_on_a_cpu_uses_them(tmp_path: Path) -> None:
    def kinds(model: Path, dtype: str) -> set[type]:
        layers = LLM(str(model), dtype=dtype, device="cpu").engine.runner.model.layers
        return {type(part) for layer in layers for part in vars(layer).values() if isinstance(part, Linear)}

    path = tiny_llama_dir(tmp_path)
    quantised = to_gguf(path, tmp_path / "q4.gguf", "Q4_1")
    assert kinds(quantised, "auto") == {Int4Linear}
    assert kinds(quantised, "float32") == kinds(path, "auto") == {Linear}
    assert kinds(to_gguf(path, tmp_path / "q8.gguf", "Q8_0"), "auto") == {Linear}


@pytest.mark.parametrize("rows", [8, 512], ids=["few rows a step", "many"])
def test_smollm2_is_as_near_to_float32_as_bfloat16_is(rows: int, amx: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=200)
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "1, 2, 3,"]
    top: dict[str, list[dict[int, float]]] = {}
    for dtype in ("float32", "bfloat16", "auto"):
        llm = LLM("smollm2-135m", dtype=dtype, device="cpu", max_num_batched_tokens=rows)
        outputs = llm.generate(prompts, params)
        top[dtype] = [{t: e.logprob for t, e in (o.outputs[0].logprobs or [])[0].items()} for o in outputs]

    def distance(dtype: str) -> float:
        pairs = zip(top["float32"], top[dtype], strict=True)
        gaps = [abs(exact[token] - other[token]) for exact, other in pairs for token in exact.keys() & other.keys()]
        return sum(gaps) / len(gaps)

    assert 0 < distance("auto") < 1.5 * distance("bfloat16")
