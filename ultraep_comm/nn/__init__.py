"""Training with replicated experts: autograd hooks, and a module that uses them all.

Not imported by ``ultraep_comm``: ``import ultraep_comm.nn``.
"""

from ultraep_comm.nn.experts import ReplicatedExperts
from ultraep_comm.nn.hooks import (
    ExpertPass,
    join_reduction,
    prefetch_replicas,
    restore_replicas,
    start_reduction,
)

__all__ = [
    "ExpertPass",
    "ReplicatedExperts",
    "join_reduction",
    "prefetch_replicas",
    "restore_replicas",
    "start_reduction",
]
