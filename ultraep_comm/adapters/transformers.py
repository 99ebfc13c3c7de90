"""Hugging Face transformers: replicas for all models with expert parallelism. Import it once::

    import ultraep_comm.adapters.transformers  # registers the implementation "ultraep"
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="ultraep")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)

Tokens travel as with the implementation "all_to_all", to instances instead of experts, and the
model's own experts compute them, by whichever ``experts_implementation`` it was loaded with. Main
weights are never copied, and parameters, checkpoints and optimizers do not see replicas.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

import ultraep_comm as uec
from ultraep_comm.adapters.checks import check_experts, check_signatures, find, is_alone, warn_idle
from ultraep_comm.adapters.options import calls_of, check_options
from ultraep_comm.nn import Replication
from ultraep_comm.nn.traced import breaks_graph

Tensor = torch.Tensor
Weights = dict[str, Tensor]

NAME = "ultraep"
_REMEDY = 'use ep_implementation="all_to_all" for this model'
_EP = "transformers.distributed.expert_parallel"
_CONFIG = "transformers.distributed.configuration_utils:DistributedConfig"
_SETTING = "ep_size above 1 in DistributedConfig"
_CALL = "self hidden_states top_k_index top_k_weights"
# What is called or overridden here, and the parameters with which it was tried.
PATCH_POINTS = {
    f"{_CONFIG}.__post_init__": "self",
    f"{_EP}:EPImplementation.__init__": "self experts ep_mesh tp_mesh",
    f"{_EP}:EPImplementation.__call__": _CALL,
    f"{_EP}:AllToAllEP.__call__": _CALL,
    f"{_EP}:AllToAllEP._dispatch_tokens": _CALL,
    f"{_EP}:AllToAllEP._combine_tokens": "self expert_output state",
    f"{_EP}:EPImplementationInterface.register": "key value",
}
_options: dict[str, Any] = {"slots_per_rank": 2, "live": 1}


def configure(*, slots_per_rank: int = 2, live: int = 1, **options: Any) -> None:
    """Set how models that are loaded from now on replicate; the same on every rank.

    Args:
        slots_per_rank, live, options: as for :func:`ultraep_comm.adapters.options.open_layer`.

    Raises:
        InvalidArgumentError: another option.
    """
    global _options  # noqa: PLW0603 - transformers makes implementations from three arguments
    check_options("configure()", options, "slots_per_rank", "live")
    _options = {"slots_per_rank": slots_per_rank, "live": live, **options}


def layers(model: nn.Module) -> dict[str, UltraEP]:
    """Return the implementations of a model's layers by the name of their experts' module."""
    found = {name: vars(module).get(NAME) for name, module in model.named_modules()}
    return {name: value for name, value in found.items() if value is not None}


class UltraEP(AllToAllEP):
    """An all-to-all of tokens among local experts, and replicas made for each microbatch.

    transformers makes one for each layer. Every call is collective over the expert-parallel ranks,
    with or without tokens. Without gradients it only fills the slots.

    Attributes:
        plan: of the last microbatch; None: there was none.
        group: shared by layers whose experts have the same shape; None before the first
            microbatch, and where there is one expert-parallel rank, which needs no replicas.
    """

    num_local_experts: int  # as the dispatch sees it

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        """Check the experts of a layer; the first microbatch opens the group.

        Raises:
            UnsupportedError: something in the experts would not travel with a replica.
        """
        super().__init__(experts, ep_mesh, tp_mesh)
        self._experts = experts
        self._options = _options
        self._num_local_experts = self.num_local_experts
        self._calls: Replication | None = None
        self.plan: uec.Plan | None = None
        self._is_alone = is_alone(ep_mesh.get_group(), "transformers", _SETTING)
        if not self._is_alone:
            check_experts(experts, self._num_local_experts, _REMEDY)
        setattr(experts, NAME, self)

    @property
    def group(self) -> uec.Group | None:
        """Return the group."""
        return None if self._calls is None else self._calls.group

    @breaks_graph
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs for each token.

        Args:
            hidden_states: ``[T, H]``; the same on ranks of a tensor-parallel group, which then
                take a part each.
            top_k_index: int64 ``[T, k]``, logical ids.
            top_k_weights: ``[T, k]``.

        Returns:
            ``[T, H]``.
        """
        if self._is_alone:
            output: Tensor = super().__call__(hidden_states, top_k_index, top_k_weights)
            return output
        self._calls, weights = calls_of(
            self._calls,
            self.ep_mesh.get_group(),
            self._experts,
            self._num_local_experts,
            _REMEDY,
            self._options,
            hooks=False,  # they are around the dispatch
        )
        self.num_local_experts = self._calls.group.topology.instances_per_rank
        own = self._own_rows(len(top_k_index))
        run = self._calls.begin(weights, top_k_index[own])
        self.plan, physical_ids = run.plan, run.topk_ids
        assert physical_ids is not None
        if len(physical_ids) != len(top_k_index):
            # The dispatch takes its part of all tokens; nobody reads the ids of the others.
            physical_ids = torch.zeros_like(top_k_index).index_copy_(
                0, torch.arange(own.start, own.stop, device=top_k_index.device), physical_ids
            )
        hidden_states = run.before_dispatch(hidden_states)
        rows, ids, scale, state = self._dispatch_tokens(hidden_states, physical_ids, top_k_weights)
        rows, weights, slots = run.before_experts(rows)
        rows = run.after_experts(self._run_instances(rows, ids, scale, weights, slots))
        return run.after_combine(self._combine_tokens(rows, state))

    def _own_rows(self, num_tokens: int) -> slice:
        """Return which tokens the dispatch takes here of those that a TP group shares."""
        share = -(-num_tokens // self.tp_mesh.size())
        start = min(self.tp_mesh.get_local_rank() * share, num_tokens)
        return slice(start, min(start + share, num_tokens))

    def _run_instances(
        self, rows: Tensor, ids: Tensor, scale: Tensor, weights: Weights, slots: Weights
    ) -> Tensor:
        """Run the model's own experts on main weights, then on slots, which are other tensors.

        Args:
            rows: ``[R, H]``.
            ids: ``[R, 1]``, indices of instances: local experts, then slots.
            scale: ``[R, 1]``, factors of the outputs.
            weights: ``{name: [M, *shape]}``.
            slots: ``{name: [S, *shape]}``.
        """
        if not len(rows):
            return rows  # gradients go on through the exchange all the same
        # The exchange has synchronised already.
        num_home = int((ids < self._num_local_experts).sum())
        if num_home == len(rows):
            return self._run(weights, rows, ids, scale)
        order = ids[:, 0].argsort(stable=True)
        rows, ids, scale = (t.index_select(0, order) for t in (rows, ids, scale))
        home, away = slice(num_home), slice(num_home, None)
        outputs = [self._run(slots, rows[away], ids[away] - self._num_local_experts, scale[away])]
        if num_home:
            outputs.insert(0, self._run(weights, rows[home], ids[home], scale[home]))
        return torch.cat(outputs).index_select(0, order.argsort())

    def _run(self, weights: Weights, rows: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
        """Run the model's own experts on other weights, of as many experts as these are."""
        experts = self._experts
        module = nn.Module()
        module.experts, module.forward = experts, self.experts_forward
        given = {f"experts.{name}": weight for name, weight in weights.items()}
        number, experts.num_experts = experts.num_experts, len(next(iter(weights.values())))
        try:
            output: Tensor = functional_call(module, given, (rows, ids, scale))
        finally:
            experts.num_experts = number
        return output


def _watch_config() -> None:
    """Warn of a model for which transformers would not make a layer's implementation at all."""
    config = find(_CONFIG)
    resolve = config.__post_init__

    @functools.wraps(resolve)
    def __post_init__(self: Any) -> None:  # noqa: N807
        resolve(self)
        if self.ep_implementation == NAME and self.ep_size == 1:
            warn_idle("transformers", _SETTING)

    config.__post_init__ = __post_init__


check_signatures("transformers", "5.23", PATCH_POINTS)
_watch_config()
EPImplementationInterface.register(NAME, UltraEP)
