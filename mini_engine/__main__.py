"""`python -m mini_engine` is `mini-engine`."""

import sys

from mini_engine.cli import main

sys.exit(main())
