from ultraep_comm import adapters as adapters
from ultraep_comm import errors, ops
from ultraep_comm import interop as interop
from ultraep_comm import model as model
from ultraep_comm import nn as nn
from ultraep_comm import testing as testing
from ultraep_comm.calls.gather import gather_and_plan, gather_load
from ultraep_comm.calls.plan import plan_replicas
from ultraep_comm.calls.prefetch import prefetch_experts
from ultraep_comm.calls.reduce import reduce_expert_grads
from ultraep_comm.calls.replicate import replicate_experts
from ultraep_comm.calls.reroute import reroute, reroute_map
from ultraep_comm.engines.cuda.kernels import get_include
from ultraep_comm.group.create import new_group
from ultraep_comm.group.group import Group
from ultraep_comm.group.memory import group_memory
from ultraep_comm.group.saved_plans import PlanHandle
from ultraep_comm.group.work import Work
from ultraep_comm.plan.certificate import verify_plan
from ultraep_comm.plan.forecast import LoadForecast
from ultraep_comm.plan.plan import Plan, PlanCost
from ultraep_comm.plan.topology import slots_for_exact
from ultraep_comm.recording.recorder import Recorder
from ultraep_comm.weights.segments import Segment

__version__: str
__all__ = [
    "Group",
    "LoadForecast",
    "Plan",
    "PlanCost",
    "PlanHandle",
    "Recorder",
    "Segment",
    "Work",
    "errors",
    "gather_and_plan",
    "gather_load",
    "get_include",
    "group_memory",
    "new_group",
    "ops",
    "plan_replicas",
    "prefetch_experts",
    "reduce_expert_grads",
    "replicate_experts",
    "reroute",
    "reroute_map",
    "slots_for_exact",
    "verify_plan",
]
