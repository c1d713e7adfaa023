"""The course machinery: notebooks are released, checked, run and graded.

Knows notebooks and points, nothing of inference: neither `mini_engine` nor torch is ever imported here. The command
is `course` (cli.py). In a check cell: `from coursekit.checks import expect`.
"""
