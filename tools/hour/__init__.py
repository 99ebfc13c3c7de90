"""What tools/gpu_hour is made of: the stages, how they run, the report, and the rehearsal."""
