"""What this machine has, what is missing, and what mends it: ``python -m ultraep_comm.doctor``."""
