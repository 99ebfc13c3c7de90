"""Balancer: physical ids for any dispatcher, such as DeepEP, HybridEP or one of your own."""

from __future__ import annotations

from typing import Any

import torch

import ultraep_comm as uec
from ultraep_comm.adapters.checks import warn_idle
from ultraep_comm.errors import InvalidArgumentError
from ultraep_comm.group.group import rejecting
from ultraep_comm.nn import Replication
from ultraep_comm.nn.replication import LayerPass
from ultraep_comm.weights.binding import Binding
from ultraep_comm.weights.segments import Weights

Tensor = torch.Tensor


class Balancer:
    """Replicates a layer's hot experts for each batch; for inference, or weights that are frozen::

        balancer = Balancer(group, {"w13": w13, "w2": w2})
        ids = balancer.begin(topk_ids)                # the transfer is under way
        x = dispatch(x, ids, balancer.num_instances)  # as with that many experts
        balancer.wait()
        y = experts(x, balancer.weights, group.slots) # mains, then slots

    A dispatcher sees an expert-parallel model of ``num_instances`` experts, ``instances_per_rank``
    on each rank; nothing else changes. :class:`ultraep_comm.nn.Replication` has the same calls with
    their backward passes, for training.

    Attributes:
        group: the group.
        weights: the main weights, as given.
        instances_per_rank: P, the most mains of a rank plus its slots; physical ids are
            ``rank * P + index``, as :func:`reroute` says.
        num_instances: G * P.
        plan: of the last batch; None: there was none.
    """

    def __init__(self, group: uec.Group, weights: Weights | Binding, **options: Any) -> None:
        """Describe a layer.

        Args:
            group: shared by layers whose experts have the same shape; see ``group_for``.
            weights: this rank's main weights, as for :meth:`Replication.begin`: bound ones for
                captures into CUDA graphs.
            options: as for :class:`Replication`: ``target``, ``cost``, ``min_tokens``, ``mode``,
                ``bank``, ``live`` and others.
        """
        self._calls = Replication(group, **options)
        if group.num_ranks == 1:
            warn_idle("Balancer", "up a group of several ranks")
        self.group = group
        self.weights = weights
        self.instances_per_rank = group.topology.instances_per_rank
        self.num_instances = group.num_ranks * self.instances_per_rank
        self.plan: uec.Plan | None = None
        self._run: LayerPass | None = None

    def begin(
        self,
        topk_ids: Tensor,
        *,
        num_tokens: int | Tensor | None = None,
        source: int | None = None,
    ) -> Tensor:
        """Plan, start to fill the slots, and return physical ids. Collective.

        Args:
            topk_ids: int32 or int64 ``[T, k]``, logical ids; -1 is padding.
            num_tokens: rows from this one on are padding; see ``gather_load``.
            source: where every rank has the same tokens: the rank that they count for; likewise.

        Returns:
            Physical ids of the same shape and dtype; weights ``[T, k]`` still belong to them.

        Raises:
            InvalidArgumentError: the last batch's replicas have not been waited for.
        """
        if self._run is not None:
            error = InvalidArgumentError(
                f"rank {self.group.rank}: begin() before wait() of layer {self._calls.layer}'s last"
                " batch, whose replicas would be overwritten; give each batch that is under way a"
                " Balancer of its own, with slots of its own (bank=)"
            )
            with rejecting(self.group):
                raise error
        with torch.no_grad():
            run = self._calls.begin(self.weights, topk_ids, num_tokens=num_tokens, source=source)
        assert run.topk_ids is not None
        self._run, self.plan = run, run.plan
        return run.topk_ids

    @property
    def is_under_way(self) -> bool:
        """Return whether a batch's replicas have not been waited for."""
        return self._run is not None

    def wait(self) -> None:
        """Order what follows after the replicas' arrival: on a CUDA group, in the current stream.

        Raises:
            InvalidArgumentError: nothing was begun.
            TransferError: the transfer failed.
        """
        run, self._run = self._run, None
        if run is None:
            raise InvalidArgumentError(
                f"rank {self.group.rank}: wait() of layer {self._calls.layer} without begin()"
            )
        run.work.wait()
