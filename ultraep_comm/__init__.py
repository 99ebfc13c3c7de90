"""ultraep_comm: collective communication for irregular expert transfers.

Data flows one way: counts -> load -> plan -> schedule -> engine -> work.
"""

from ultraep_comm import errors, ops
from ultraep_comm.collectives import gather_and_plan, gather_load, replicate_experts
from ultraep_comm.costs import PlanCost
from ultraep_comm.creation import new_group, new_loopback_groups
from ultraep_comm.group import Group
from ultraep_comm.health import GroupHealth
from ultraep_comm.plan import Plan
from ultraep_comm.plan_store import PlanHandle
from ultraep_comm.planning import plan_replicas
from ultraep_comm.recorder import Recorder
from ultraep_comm.reduction import reduce_expert_grads
from ultraep_comm.rerouting import reroute, reroute_map
from ultraep_comm.segments import BoundWeights, Segment
from ultraep_comm.work import Work

__version__ = "0.1.0"
__all__ = [
    "BoundWeights",
    "Group",
    "GroupHealth",
    "Plan",
    "PlanCost",
    "PlanHandle",
    "Recorder",
    "Segment",
    "Work",
    "errors",
    "gather_and_plan",
    "gather_load",
    "new_group",
    "new_loopback_groups",
    "ops",
    "plan_replicas",
    "reduce_expert_grads",
    "replicate_experts",
    "reroute",
    "reroute_map",
]
