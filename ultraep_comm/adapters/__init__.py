"""Adapters: the library inside frameworks' own code. Each module is imported on demand."""

from importlib import import_module


def __getattr__(name: str) -> object:
    module = f"{__name__}.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name != module:  # the framework is not installed
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
