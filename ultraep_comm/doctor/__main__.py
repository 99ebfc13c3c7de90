"""Entry point of ``python -m ultraep_comm.doctor``."""

import sys

from ultraep_comm.system import run_main

if __name__ == "__main__":
    sys.exit(run_main("ultraep_comm.doctor.cli"))
