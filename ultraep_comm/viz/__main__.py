"""Entry point of ``python -m ultraep_comm.viz``."""

import sys

from ultraep_comm.viz.cli import main

if __name__ == "__main__":
    sys.exit(main())
