"""Layers with replicated experts: a layer's whole sequence of calls, and a module that makes them.

Not imported by ``ultraep_comm``: ``import ultraep_comm.nn``.
"""

from ultraep_comm.nn.experts import ReplicatedExperts
from ultraep_comm.nn.instances import grouped_mm, join_instances
from ultraep_comm.nn.replication import Replication

__all__ = ["ReplicatedExperts", "Replication", "grouped_mm", "join_instances"]
