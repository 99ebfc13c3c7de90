"""SGLang: its EPLB moves weights by this library, or experts get replicas for each batch.

Installing the library declares :func:`register` as a plugin of SGLang. It does nothing unless the
environment variable ULTRAEP_SGLANG is set, so that this module imports neither torch nor SGLang.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

from ultraep_comm import env
from ultraep_comm.errors import PlanMismatchError

_LOGGER = logging.getLogger("ultraep_comm")
_EPLB = "sglang.srt.eplb"
_MOE = "sglang.srt.layers.moe"
_UPDATE = f"{_EPLB}.expert_location_updater:update_expert_weights_single_layer"
_BUFFERS = f"{_EPLB}.expert_location_updater:create_temp_buffers"
_ELASTIC = "sglang.srt.elastic_ep.elastic_ep:ElasticEPStateManager.instance"
_LOCATION = f"{_EPLB}.expert_location"
_LAY_OUT = f"{_LOCATION}:compute_initial_expert_location_metadata"
_SET_UP = "sglang.srt.model_executor.model_runner_components.moe_ep_setup:prepare_moe_topk"
_ROUTED = f"{_MOE}.topk:_post_process_topk_ids"
_MAP_IDS = f"{_EPLB}.expert_location_dispatch:topk_ids_logical_to_physical"
_EXPERTS = f"{_MOE}.fused_moe_triton.layer:FusedMoE"

# What is called or replaced, for each mode, and the parameters that it was written for.
SEAM: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "eplb": {
            _UPDATE: "routed_experts_weights temp_buffers old_physical_to_logical_map"
            " new_physical_to_logical_map num_local_physical_experts num_gpu_per_node rank"
            " world_size missing_logical_experts_info debug log_metrics",
            _BUFFERS: "sample_tensors",
            _ELASTIC: "",
        },
        "batch": {
            _LAY_OUT: "model_config moe_ep_rank",
            f"{_LOCATION}:ExpertLocationMetadata.init_by_mapping": "model_config"
            " physical_to_logical_map moe_ep_rank",
            f"{_LOCATION}:get_global_expert_location_metadata": "",
            _SET_UP: "model model_config",
            _ROUTED: "topk_ids topk_weights topk_config router_logits layer_id num_token_non_padded"
            " expert_location_dispatch_info",
            _MAP_IDS: "topk_ids info log2phy_prob",
            _EXPERTS: "num_experts hidden_size intermediate_size layer_id",
            f"{_EXPERTS}.run_moe_core": "self dispatch_output",
            f"{_MOE}.utils:is_moe_input_scattered_across_dp_ranks": "",
            "sglang.srt.distributed.parallel_state:get_moe_ep_group": "",
            "sglang.srt.runtime_context:get_exec": "",
        },
    }
)


def register() -> None:
    """Do what ULTRAEP_SGLANG says, in a process of SGLang: nothing, ``eplb`` or ``batch``.

    Raises:
        InvalidArgumentError: the variable has another value.
        UnsupportedError: this release of SGLang has other signatures.
    """
    mode = env.sglang()
    if mode is None:
        return
    from ultraep_comm.adapters import seams

    found = seams.check_seam("sglang", "0.5.23", "0.5.23", SEAM[mode])
    hooks: Any = seams.find("sglang.srt.plugins.hook_registry:HookRegistry")
    kinds: Any = seams.find("sglang.srt.plugins.hook_registry:HookType")

    def around(path: str, hook: Callable[..., Any]) -> None:
        hooks.register(path.replace(":", "."), hook, kinds.AROUND)

    if mode == "eplb":
        updater = Updater(found[_UPDATE], found[_ELASTIC])
        hooks.register(_UPDATE.replace(":", "."), updater.update, kinds.REPLACE)
        around(_BUFFERS, updater.make_buffers)
        return
    from ultraep_comm.adapters.sglang_batch import Batches

    batches = Batches({path.rpartition(":")[2]: each for path, each in found.items()})
    around(_LAY_OUT, batches.lay_out)
    around(_SET_UP, batches.set_up)
    around(_ROUTED, batches.note)
    around(_MAP_IDS, batches.map_ids)
    around(f"{_EXPERTS}.run_moe_core", batches.run)


class Updater:
    """Moves a layer's experts in place of ``update_expert_weights_single_layer``."""

    def __init__(self, original: Callable[..., Any], get_elastic: Callable[[], Any]) -> None:
        self._original, self._signature = original, inspect.signature(original)
        self._get_elastic = get_elastic

    def make_buffers(self, original: Callable[..., Any], sample_tensors: Any) -> Any:
        """Return no buffers where a group's slots take their place."""
        import torch.distributed as dist

        return [] if dist.get_world_size() > 1 else original(sample_tensors)

    def update(self, *args: Any, **given: Any) -> list[str] | None:
        """Bring a layer's experts where the new map has them. Collective over WORLD.

        Returns:
            With ``debug`` a line for each row of this rank that has changed.

        Raises:
            UnsupportedError: elastic expert parallelism, ranks that are not WORLD's, or tensors
                without one dense row for each expert; on every rank, as the next two.
            PlanMismatchError: ranks have different maps.
            InvalidPlanError: the new map has an expert that no rank has.
            TransferError: the transfer failed.
        """
        import torch
        import torch.distributed as dist

        import ultraep_comm as uec
        from ultraep_comm.adapters import rows, seams

        world = dist.group.WORLD
        assert world is not None
        if seams.is_alone(world, "SGLang's EPLB"):
            result: list[str] | None = self._original(*args, **given)
            return result
        bound = self._signature.bind(*args, **given)
        bound.apply_defaults()
        call = SimpleNamespace(**bound.arguments)
        tensors, count = call.routed_experts_weights, call.num_local_physical_experts
        old, new = call.old_physical_to_logical_map, call.new_physical_to_logical_map
        digest = hashlib.sha256(json.dumps([old, new]).encode()).hexdigest()
        every = seams.gather_json(world, (digest, self._find_problem(call)))
        rank = world.rank()
        rows.raise_problems([problem for _, problem in every], "ULTRAEP_SGLANG", "SGLang")
        for other, (found, _) in enumerate(every):
            if found != every[0][0]:
                raise PlanMismatchError(
                    f"rank {rank}: EPLB of rank {other} has other maps of experts than rank 0's;"
                    " nothing was moved",
                    rank=rank,
                    peer=other,
                )
        group = rows.group_of_rows(world, tensors)
        sources, fills = rows.plan_update(old, new, count, group.topology.domain.tolist())
        by_rank = torch.tensor(sources, dtype=torch.int32, device="cpu").view(-1, count)
        own = torch.arange(len(by_rank), device="cpu")[:, None]
        plan = rows.plan_of(by_rank.masked_fill(by_rank // count == own, -1), group)
        pairs = [(t, group.slots[name]) for name, t in rows.by_name(tensors).items()]
        for slot, source in enumerate(by_rank[rank].tolist()):
            for tensor, slots in pairs if source // count == rank else ():
                slots[slot].copy_(tensor[source % count])
        if plan.num_replicas:
            uec.replicate_experts(rows.by_name(tensors), plan, group=group)
        changed = [(i, s) for i, s in enumerate(fills[rank * count :][:count]) if s >= 0]
        for row, slot in changed:
            for tensor, slots in pairs:
                tensor[row].copy_(slots[slot])
        if call.log_metrics:
            received = int((plan.slot_expert[rank] >= 0).sum())
            nbytes = received * sum(tensor[0].nbytes for tensor in tensors)
            _LOGGER.info("SGLang's EPLB: %d experts received, %d bytes", received, nbytes)
        first = rank * count
        lines = [f"row {first + r}: from row {sources[first + s]}" for r, s in changed]
        return lines if call.debug else None

    def _find_problem(self, call: Any) -> str:
        """Return why an update cannot be made; nothing: an empty text."""
        import torch.distributed as dist

        from ultraep_comm.adapters import rows

        if self._get_elastic() is not None:
            return "has elastic expert parallelism, whose ranks change"
        if call.rank != dist.get_rank():
            return f"is rank {dist.get_rank()} of WORLD, and {call.rank} of SGLang's EPLB"
        count, tensors = call.num_local_physical_experts, call.routed_experts_weights
        expected = dist.get_world_size() * count
        for found in (call.old_physical_to_logical_map, call.new_physical_to_logical_map):
            if len(found) != expected:
                return f"has a map of {len(found)} rows; expected {expected}"
        if not tensors or any(t.dim() == 0 or len(t) != count for t in tensors):
            shapes = [tuple(t.shape) for t in tensors]
            return f"has tensors of shapes {shapes}, not with {count} rows each"
        return rows.find_problem([tensors])
