"""`python -m mini_engine.simulator`: see `cli.py`."""

from mini_engine.simulator.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
