"""Entry point of ``python -m ultraep_comm.bench``."""

import sys

from ultraep_comm.bench.cli import main

# Rank processes import this module again under another name.
if __name__ == "__main__":
    sys.exit(main())
