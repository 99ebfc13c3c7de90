"""The CUDA engine, imported on first use."""
