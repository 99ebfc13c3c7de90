"""Entry point of ``python -m ultraep_comm.bench``."""

import sys

from ultraep_comm.system import run_main

# Rank processes import this module again under another name.
if __name__ == "__main__":
    sys.exit(run_main("ultraep_comm.bench.cli"))
