"""Benchmarks of the library: ``python -m ultraep_comm.bench``. Not imported by the library."""
