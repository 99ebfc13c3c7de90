"""Entry point of ``python -m ultraep_comm.doctor``."""

import sys

from ultraep_comm.doctor.cli import main

if __name__ == "__main__":
    sys.exit(main())
