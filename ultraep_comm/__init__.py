"""ultraep_comm: collective communication for irregular expert transfers.

Data flows one way: counts -> load -> plan -> schedule -> engine -> work.
"""

from __future__ import annotations

import sys
from importlib import import_module

from ultraep_comm import errors as errors

# Public names by defining module; ``__init__.pyi`` is the same list for type checkers.
_HOMES = {
    "calls.gather": ("gather_and_plan", "gather_load"),
    "calls.plan": ("plan_replicas",),
    "calls.prefetch": ("prefetch_experts",),
    "calls.reduce": ("reduce_expert_grads",),
    "calls.replicate": ("replicate_experts",),
    "calls.reroute": ("reroute", "reroute_map"),
    "engines.cuda.kernels": ("get_include",),
    "group.create": ("new_group",),
    "group.group": ("Group",),
    "group.memory": ("group_memory",),
    "group.saved_plans": ("PlanHandle",),
    "group.work": ("Work",),
    "plan.certificate": ("verify_plan",),
    "plan.forecast": ("LoadForecast",),
    "plan.plan": ("Plan", "PlanCost"),
    "plan.topology": ("slots_for_exact",),
    "recording.recorder": ("Recorder",),
    "weights.segments": ("Segment",),
}
_PACKAGES = ("adapters", "interop", "model", "nn", "testing")

__version__ = "0.1.0"
__all__ = sorted([*(name for names in _HOMES.values() for name in names), "errors", "ops"])  # noqa: PLE0605


def _load() -> None:
    """Import torch and all public names; this also registers the operators."""
    import_module("ultraep_comm.ops")
    for home, names in _HOMES.items():
        module = import_module(f"ultraep_comm.{home}")
        globals().update({name: getattr(module, name) for name in names})


def __getattr__(name: str) -> object:
    if name in _PACKAGES:  # as attributes, also of who has not imported them
        return import_module(f"ultraep_comm.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _load()
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Importing torch takes a second. Without it, names load on first use, so that --help stays fast.
if "torch" in sys.modules:
    _load()
