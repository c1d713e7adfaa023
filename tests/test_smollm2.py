"""The real SmolLM2 against transformers, which reads the same GGUF file by its own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mini_engine import LLM, SamplingParams
from mini_engine.weights import find_smollm2

NUM_TOKENS = 16
TEXTS = {
    "english": "The capital of France is",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "vietnamese": "Hà Nội là thủ đô của Việt Nam. Thành phố này",
    "chinese": "機器學習是",
    "emoji": "I ❤️ pizza 🍕 and my family 👨‍👩‍👧‍👦 loves",
    "whitespace": "  a\t\tb\n\n\n   c   \r\n d ",
    "digits": "1, 2, 3, 4, 5, 6,",
    "one token": "Hello",
    "markup": '<div class="x">&nbsp;</div>\n<p>',
    "600 tokens": " ".join(f"Item {i} costs {i * 7 % 100} dollars." for i in range(70)),
}
QUESTION = [{"role": "user", "content": "What is the capital of Vietnam?"}]
DIALOGUE = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "Is the sky blue?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Is grass red?"},
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2-135m", dtype="float32", max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def oracle() -> Any:
    """transformers' model, its weights dequantised by the gguf package: about 20 s."""
    from transformers import AutoModelForCausalLM

    path = find_smollm2()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ours(llm: LLM) -> dict[str, tuple[list[int], list[int]]]:
    """(prompt, greedy output) of every text, all in one batch."""
    prompts = [*TEXTS.values(), llm.chat_prompt(QUESTION), llm.chat_prompt(DIALOGUE)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    names = [*TEXTS, "chat", "chat with system prompt"]
    return {n: (o.prompt_token_ids, o.outputs[0].token_ids) for n, o in zip(names, outputs, strict=True)}


@pytest.mark.parametrize("name", [*TEXTS, "chat", "chat with system prompt"])
def test_greedy_tokens_equal_transformers(name: str, ours: dict, oracle: Any) -> None:
    prompt, tokens = ours[name]
    if name == "600 tokens":
        assert len(prompt) >= 600
    ids = torch.tensor([prompt])
    out = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    assert tokens == out[0, len(prompt) :].tolist()


def test_logprobs_equal_transformers(llm: LLM, oracle: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    output = llm.generate(TEXTS["english"], params)[0]
    logits = oracle(torch.tensor([output.prompt_token_ids])).logits[0, -1]
    expected = torch.log_softmax(logits.double(), -1).topk(5)
    report = (output.outputs[0].logprobs or [])[0]
    assert list(report) == expected.indices.tolist()
    assert [entry.logprob for entry in report.values()] == pytest.approx(expected.values.tolist(), abs=1e-3)
    assert [entry.rank for entry in report.values()] == [1, 2, 3, 4, 5]


def test_it_knows_where_an_answer_ends(llm: LLM) -> None:
    output = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=60))[0].outputs[0]
    assert output.finish_reason == "stop"
    assert "Vietnam" in output.text
    assert "<|im_end|>" not in output.text
    assert output.token_ids[-1] in llm.engine.eos_token_ids


@pytest.mark.parametrize("name", TEXTS)
def test_text_round_trips(name: str, llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    assert tokenizer.decode(tokenizer.encode(TEXTS[name])) == TEXTS[name]
