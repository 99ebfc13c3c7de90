"""Replication: all calls of a layer with replicas, around its own dispatch and experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import ultraep_comm as uec
from ultraep_comm.errors import InvalidArgumentError, UnsupportedError
from ultraep_comm.group.bank import Bank
from ultraep_comm.group.group import is_on_device, rejecting, session_of
from ultraep_comm.nn.hooks import (
    ExpertPass,
    find_trained,
    join_reduction,
    prefetch_replicas,
    restore_replicas,
    start_reduction,
    start_transfer,
)
from ultraep_comm.nn.weights import local_weights
from ultraep_comm.plan.topology import as_int
from ultraep_comm.weights.binding import Binding
from ultraep_comm.weights.segments import Weights

Tensor = torch.Tensor


class Replication:
    """The calls of one layer, in the order in which its forward pass makes them::

        run = replication.begin(weights, topk_ids)    # behind the router
        x = run.before_dispatch(x)                    # dispatch by run.topk_ids, physical ids
        x, weights, slots = run.before_experts(x)     # of local experts and of replicas
        y = run.after_experts(y)
        y = run.after_combine(y)

    With gradients enabled these save the plan, refill the slots in the backward pass, reduce the
    replicas' gradients, and let main gradients leave the layer when they are complete. Without,
    they only fill the slots. All of it is collective: every rank runs the same layers and
    microbatches in the same order. Recomputation (torch.utils.checkpoint) works.

    A copy (copy.deepcopy) shares the group, with main weights of its own. Saving leaves the group
    out: set ``group`` of what was loaded.

    Attributes:
        group: the group.
        layer: the layer's number.
    """

    def __init__(
        self,
        group: uec.Group,
        *,
        layer: int = 0,
        live: int = 1,
        bank: int = 0,
        reuse: bool = False,
        target: float = 1.01,
        cost: uec.PlanCost | None = None,
        min_tokens: int = 0,
        mode: str = "auto",
        backward_segments: Sequence[str] | None = None,
    ) -> None:
        """Describe a layer.

        Args:
            group: shared by layers whose experts have the same shape; created with ``grads=`` if
                their weights are trained.
            layer: the same on every rank.
            live: microbatches of this layer whose passes overlap: that are between ``begin`` and
                their experts, forward or backward, at one time. Each needs slots of its own, a bank
                of the group; they use these in turn.
            bank: the first of the banks that this layer uses.
            reuse: they are its own, and keep what they hold from call to call: call
                ``group.banks[bank].invalidate()`` whenever main weights have changed. False: layers
                may share them, and every pass fills them.
            target: of the plans; see ``plan_replicas``.
            cost: replaces the target, and cannot be combined with ``reuse``.
            min_tokens: with fewer routed tokens than this on all ranks together, the plan is empty.
                Where plans are made on the device, use ``cost`` instead.
            mode: of the transfers.
            backward_segments: segments that the backward pass needs; None: all.

        Raises:
            InvalidArgumentError: the group has too few banks.
        """
        self.layer = layer
        self._first = as_int(bank, "bank")
        self._live = as_int(live, "live")
        self._reuse = reuse
        self._owner = object()  # of what slots hold: that of a copy is another
        self._calls = 0
        self._target, self._cost = target, cost
        self._min_tokens = as_int(min_tokens, "min_tokens")
        self._mode = mode
        self._segments = backward_segments
        self.group = group

    @property
    def group(self) -> uec.Group:
        """Return the group."""
        return self._group

    @group.setter
    def group(self, group: uec.Group) -> None:
        session_of(group)
        first, live, count = self._first, self._live, len(group.banks)
        if live < 1 or not 0 <= first <= count - live:
            raise InvalidArgumentError(
                f"rank {group.rank}: layer {self.layer} is to have {live} live microbatches, with"
                f" slots from bank {first} on, and the group has {count} banks; expected one bank"
                f" for each: create it with banks={first + max(live, 1)} or more"
            )
        self._group = group

    def begin(
        self,
        weights: Weights | Binding,
        topk_ids: Tensor | None = None,
        *,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        plan: uec.Plan | None = None,
        num_tokens: int | Tensor | None = None,
        source: int | None = None,
        microbatch: int | None = None,
        main_grads: Weights | Binding | None = None,
    ) -> LayerPass:
        """Plan, start to fill the slots, and map the routing to instances. Collective.

        Args:
            weights: the main weights, see `local_weights`; or bound, as captures into CUDA graphs
                need them: see ``group.bind``.
            topk_ids: int ``[T, k]``, logical ids; -1 is padding.
            routing_map: instead of ids: bool ``[T, E]``.
            probs: of the map, ``[T, E]``; gradients flow back through ``probs`` of the result.
            plan: None: the load is exchanged and planned. A plan: used as it is.
            num_tokens: as for ``gather_load``.
            source: likewise.
            microbatch: as for ``group.save``.
            main_grads: where the experts accumulate the gradients of main weights themselves, as
                for ``reduce_expert_grads``; None: autograd has them. Whatever returns the gradient
                of the experts' input has by then accumulated into these, and into ``slot_grads``.

        Raises:
            InvalidWeightsError, InvalidLoadError, InvalidArgumentError: wrong input; peers fail
                too.
            UnsupportedError: ``min_tokens`` with a routing on the device; or weights that need
                gradients and are neither float32 nor bfloat16.
        """
        group = self.group
        with rejecting(group):
            given = weights.tensors if isinstance(weights, Binding) else weights
            local = local_weights(given, group)
            sources = weights if isinstance(weights, Binding) else local
            if torch.is_grad_enabled() and main_grads is None:
                find_trained(local, group)
            bank = group.banks[self._first + self._calls % self._live]
            self._calls += 1
            if plan is None:
                plan = self._plan(topk_ids, routing_map, num_tokens, source, bank)
            if (bank.index or self._reuse) and not (plan.bank or plan.reuse):
                plan = plan.in_bank(bank.index, reuse=self._reuse)
            saved: uec.Plan | uec.PlanHandle = plan
            run: ExpertPass | None = None
            if torch.is_grad_enabled():
                saved = group.save(plan, layer=self.layer, microbatch=microbatch)
                run = ExpertPass(
                    saved,
                    sources,
                    main_grads=main_grads,
                    mode=self._mode,
                    segments=self._segments,
                    owner=self._owner,
                )
            work = start_transfer(
                sources,
                saved,
                group,
                mode=self._mode,
                segments=None,
                owner=self._owner,
                layer=self.layer,
            )
            how: dict[str, Any] = {"group": group, "num_tokens": num_tokens, "source": source}
            if topk_ids is not None:
                topk_ids = uec.reroute(topk_ids, saved, **how)
            if routing_map is not None:
                routing_map, probs = uec.reroute_map(routing_map, probs, saved, **how)
            return LayerPass(
                plan=plan,
                work=work,
                _weights=local,
                _slots=group.banks[plan.bank].slots,
                _run=run,
                topk_ids=topk_ids,
                routing_map=routing_map,
                probs=probs,
            )

    def _plan(
        self,
        topk_ids: Tensor | None,
        routing_map: Tensor | None,
        num_tokens: int | Tensor | None,
        source: int | None,
        bank: Bank,
    ) -> uec.Plan:
        group, target = self.group, self._target
        given: dict[str, Any] = {"routing_map": routing_map, "num_tokens": num_tokens}
        if not (self._reuse or self._min_tokens):
            return uec.gather_and_plan(
                topk_ids, **given, group=group, source=source, target=target, cost=self._cost
            )
        load = uec.gather_load(topk_ids, **given, group=group, source=source)
        if self._min_tokens:
            if is_on_device(load, group):
                raise UnsupportedError(
                    f"rank {group.rank}: min_tokens={self._min_tokens} with a load on the device,"
                    " which the host does not read; use cost=PlanCost(...), by which small batches"
                    " get no replicas either"
                )
            if int(load.sum()) < self._min_tokens:
                # No rank has more than all tokens, which is G times the mean.
                return uec.plan_replicas(load, group=group, target=float(group.num_ranks))
        return uec.plan_replicas(
            load, group=group, target=target, cost=self._cost, bank=bank, reuse=self._reuse
        )


@dataclass(kw_only=True, eq=False, repr=False)
class LayerPass:
    """One forward pass of a layer, and its backward pass. Returned by :meth:`Replication.begin`.

    Attributes:
        plan: the plan.
        topk_ids: physical ids, as of ``reroute``; None: no ids were given.
        routing_map: the physical map, as of ``reroute_map``; None: no map was given.
        probs: its probabilities.
        work: the transfer, under way.
    """

    plan: uec.Plan
    work: uec.Work
    topk_ids: Tensor | None
    routing_map: Tensor | None
    probs: Tensor | None
    _weights: dict[str, Any]
    _slots: Mapping[str, Tensor]
    _run: ExpertPass | None
    _anchor: Tensor | None = None

    def before_dispatch(self, x: Tensor) -> Tensor:
        """Return the layer's input; backward, its gradient waits for the reduction."""
        if self._run is not None:
            x, self._weights = join_reduction(x, self._run, self._weights)
        return x

    def before_experts(self, x: Tensor) -> tuple[Tensor, dict[str, Any], dict[str, Tensor]]:
        """Wait for the replicas; backward, start the reduction.

        Args:
            x: the experts' input.

        Returns:
            The input, main weights ``{name: [M, *shape] or M tensors}`` and slots ``{name: [S,
            *shape]}``, for the experts to use. With ``main_grads`` too, if hooks on parameters take
            any gradient as a sign that those are complete.
        """
        self.work.wait()
        weights, slots = self._weights, dict(self._slots)
        if self._run is not None:
            x, weights, slots = start_reduction(x, self._run, weights, slots)
        self._anchor = x
        return x, weights, slots

    def after_experts(self, y: Tensor) -> Tensor:
        """Return the experts' output; backward, the replicas are there again before the experts."""
        return y if self._run is None else restore_replicas(y, self._run, anchor=self._anchor)

    def after_combine(self, y: Tensor) -> Tensor:
        """Return the layer's output; backward, start to fill the slots again."""
        return y if self._run is None else prefetch_replicas(y, self._run)
