"""The CUDA engine. Nothing here is imported before it is used."""
