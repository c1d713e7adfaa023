"""Make smollm2_tokens.json again: token ids of SmolLM2 by transformers, which takes ten seconds to load the file.

    python tests/data/make_smollm2_tokens.py

transformers builds its tokenizer from the same GGUF file, but not the file's "smollm" rule, that digits are cut off
before the words: it cuts "\\n\\n1" to "\\n", "\\n", "1", where the model's own tokenizer.json has "\\n\\n", "1". So the
rule of that tokenizer.json is put in here; texts for which it makes a difference are marked.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from mini_engine.weights import find_smollm2

OUT = Path(__file__).with_name("smollm2_tokens.json")
TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "The quick brown fox doesn't jump; it's the dogs' day, they'll say WE'VE won.",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n",
    '#include <stdio.h>\nint main(void) {\n\tprintf("%d\\n", 0x1F + 42);\n\treturn 0;\n}\n',
    "SELECT a.id, COUNT(*) FROM t1 a WHERE x >= 3.14e-10 GROUP BY 1;",
    "Tiếng Việt có dấu: Hà Nội là thủ đô của nước Cộng hòa Xã hội chủ nghĩa Việt Nam.",
    "Đường phố đông đúc, trời mưa tầm tã.",  # decomposed accents
    "emoji: 😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇻🇳 ☕️",
    "中文、日本語のテキスト、한국어, العربية, עברית, हिन्दी, ไทย, Ελληνικά, русский",
    "tabs\t\tand  two   three    four spaces",
    "line\r\nline\r\n\r\nend\r",
    "\n\n\n",
    "   \n  \t \n x",
    "\x00\x01\x1b[31mred\x1b[0m\x7f\x85\u2028\u200b\ufeff\ufffd",
    "1234567890 1 22 333, 3.14159, ½ Ⅷ ٣ ²",
    "1. one\n2. two\n\n10. ten\n\n  42",
    "x =    5\n\n\n7",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "not special: <|im_start <|im_end| <|endoftext|>and<|endoftext|>",
    "https://example.org/path?q=a%20b&n=1#frag_ment user@example.org",
    "a" * 60 + " " + "ab" * 20 + " " + "=" * 50,
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﬁ ǅ ß İ ı ſ K",
]


def main() -> None:
    path = find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    plain = [tokenizer.encode(text) for text in TEXTS]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    cases = []
    for text, other in zip(TEXTS, plain, strict=True):
        ids = tokenizer.encode(text)
        cases.append({"text": text, "ids": ids, "digits_rule_matters": ids != other})
    OUT.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
    print(f"{len(cases)} texts, {sum(case['digits_rule_matters'] for case in cases)} by the digits rule: {OUT.name}")


if __name__ == "__main__":
    main()
