"""What a student might hand in to get points, to learn the hidden inputs, or to stop the grading."""

from __future__ import annotations

from dataclasses import dataclass

WRONG_A = "def kv_gib(tokens, bytes_per_token):\n    return 0\n"
WRONG_B = "def blocks(tokens, block_size):\n    return 0\n"
RIGHT_B = "def blocks(tokens, block_size):\n    return -(-tokens // block_size)\n"
RIGHT_A = "def kv_gib(tokens, bytes_per_token):\n    return tokens * bytes_per_token / 2**30\n"


@dataclass(frozen=True)
class Attack:
    """Sources of the answer cells, and what must come of it: (outcome, points) of parts a (2 points) and b (3)."""

    a: str
    b: str
    outcome_a: str
    outcome_b: str
    says: str = ""

    @property
    def points(self) -> float:
        return 2 * (self.outcome_a == "passed") + 3 * (self.outcome_b == "passed")


ATTACKS = {
    # things that go wrong by accident as well
    "good": Attack(RIGHT_A, RIGHT_B, "passed", "passed"),
    "syntax": Attack("def kv_gib(:", RIGHT_B, "failed", "passed", "SyntaxError"),
    "loop": Attack("def kv_gib(t, b):\n    while True: pass", RIGHT_B, "timeout", "passed", "endless loop"),
    "loop at once": Attack("while True: pass", RIGHT_B, "failed", "passed"),
    "stubborn loop": Attack(
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
        RIGHT_B, "died", "died", "not reached",
    ),
    "kill": Attack("import os\nos.kill(os.getpid(), 9)", RIGHT_B, "died", "died", "kernel had ended"),
    "kill in the check": Attack(
        "import os\ndef kv_gib(t, b):\n    os._exit(1)", RIGHT_B, "died", "died", "kernel died"
    ),
    "kill in the probe": Attack(
        "import os\ndef kv_gib(t, b):\n    return 1.125 if t == 8192 else os._exit(0)",
        RIGHT_B, "hidden", "hidden", "kernel died",
    ),
    "exit": Attack("import sys\ndef kv_gib(t, b):\n    sys.exit(0)", RIGHT_B, "error", "passed", "SystemExit"),
    "flood": Attack("while True: print('x' * 10_000)", RIGHT_B, "died", "died"),
    "one huge line": Attack("print('x' * 300_000_000)", RIGHT_B, "died", "died"),
    "memory": Attack("x = bytearray(64 << 30)\n" + RIGHT_A, RIGHT_B, "failed", "passed", "MemoryError"),
    "disk": Attack("open('big', 'wb').write(bytes(100 << 20))\n" + RIGHT_A, RIGHT_B, "failed", "passed", "OSError"),
    "overwritten names": Attack(
        RIGHT_A + "\nprint = json = len = sum = expect = probe = None", RIGHT_B, "passed", "passed"
    ),
    "redirected output": Attack(
        RIGHT_A + "\nimport io, sys\nsys.stdout = sys.stderr = io.StringIO()", RIGHT_B, "passed", "passed"
    ),
    # forgeries
    "silenced traceback": Attack(
        "get_ipython().showtraceback = lambda *a, **k: None\n" + WRONG_A,
        RIGHT_B, "error", "passed", "hid its traceback",
    ),
    "no assertion": Attack(
        "import ast\nclass T(ast.NodeTransformer):\n    def visit_Expr(self, node):\n        return ast.Pass()\n"
        "get_ipython().ast_transformers.append(T())\n" + WRONG_A,
        WRONG_B, "hidden", "hidden", "0 are right",
    ),
    "patched check": Attack(
        "import coursekit.checks as c\nc.expect = lambda *a, **k: None\n" + WRONG_A,
        RIGHT_B, "hidden", "passed", "0 are right",
    ),
    "patched probe": Attack(
        "import coursekit.checks as c\nc.expect = lambda *a, **k: None\n"
        "c.probe = lambda **k: print('textbook-probe {\"small\": 0.1, \"large\": 1}')\n" + WRONG_A,
        WRONG_B, "hidden", "hidden", "0 are right",
    ),
    "skipped cells": Attack("# NBVAL_SKIP\n# NBVAL_RAISES_EXCEPTION\n" + RIGHT_A, RIGHT_B, "passed", "passed"),
    "hard-coded": Attack("def kv_gib(t, b):\n    return 1.125", "def blocks(t, b):\n    return 7", "hidden", "hidden"),
    "cell magic": Attack("%%bash\nexit 0", "%%capture\n" + RIGHT_B, "failed", "passed"),
    "a process left behind": Attack(
        "import subprocess\nsubprocess.Popen(['sleep', '71.25'])\n" + RIGHT_A, RIGHT_B, "passed", "passed"
    ),
    # learning the hidden inputs from the feedback
    "told by the files": Attack(
        "from pathlib import Path\nfound = [path for path in Path('..').rglob('*') if path.is_file() and "
        "b'31337' in path.read_bytes()]\ndef kv_gib(t, b):\n    return found or t * b / 2**30",
        RIGHT_B, "passed", "passed",
    ),
    "told by an error": Attack(
        "def kv_gib(*args):\n    if args[0] == 8192: return 1.125\n    raise ValueError(f'inputs {args}')",
        "def blocks(*args):\n    if args[0] == 97: return 7\n    raise type(f'E{args}', (Exception,), {})()",
        "hidden", "hidden", "your code raises ValueError",
    ),
    "told by a later check": Attack(
        "seen = []\n" + RIGHT_A.replace("return", "seen.append(tokens)\n    return"),
        "def blocks(*args):\n    raise ValueError(f'inputs {seen}')", "passed", "failed", "inputs [8192]",
    ),
}  # fmt: skip
