"""Pictures: ``python -m ultraep_comm.viz``."""
