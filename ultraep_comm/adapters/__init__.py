"""Adapters: the library inside frameworks' own code. Each module is imported on demand."""
