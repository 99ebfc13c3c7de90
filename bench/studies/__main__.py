"""Entry point of ``python bench/studies``."""

import sys
from pathlib import Path

from ultraep_comm.system import run_main

if __name__ == "__main__":
    # The folder above in place of this one: its modules import each other as a package.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.exit(run_main("studies.cli"))
