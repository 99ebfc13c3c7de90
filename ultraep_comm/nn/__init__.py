"""Layers with replicated experts: autograd hooks, and what uses them all.

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
from ultraep_comm.nn.instances import grouped_mm, join_instances
from ultraep_comm.nn.replication import LayerPass, Replication
from ultraep_comm.nn.weights import local_weights

__all__ = [
    "ExpertPass",
    "LayerPass",
    "ReplicatedExperts",
    "Replication",
    "grouped_mm",
    "join_instances",
    "join_reduction",
    "local_weights",
    "prefetch_replicas",
    "restore_replicas",
    "start_reduction",
]
