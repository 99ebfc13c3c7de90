"""reduce_expert_grads: add the gradients of replicas to those of main instances."""

from __future__ import annotations

import torch

from ultraep_comm import _core
from ultraep_comm.calls import traced
from ultraep_comm.calls.transfer import Call, address, find_mode, plan_of
from ultraep_comm.group.group import Group, session_of
from ultraep_comm.group.saved_plans import PlanHandle
from ultraep_comm.group.work import Work
from ultraep_comm.plan.plan import Plan
from ultraep_comm.weights.binding import Binding
from ultraep_comm.weights.segments import Weights

REDUCE_MODES = ("pull", "direct")
_REDUCE = _core.Operation.REDUCE


def reduce_expert_grads(
    grads: Weights | Binding,
    plan: Plan | PlanHandle,
    *,
    group: Group,
    async_op: bool = False,
    mode: str = "auto",
    zero: bool = True,
) -> Work | None:
    """Add the gradients of a plan's replicas to the main gradients. Collective.

    Each main gradient of a replicated expert becomes ``main + (r1 + r2 + ... + rn)``: the replicas'
    slot gradients in ascending rank order, added in fp32, and rounded once to the main gradient's
    dtype. These bits depend neither on the mode nor on tiles, threads or ranks.

    When the call has finished, this rank's main gradients are complete, no peer reads its slot
    gradients any more, and those of filled slots are zero (with ``zero=False`` undefined: they hold
    partial sums). Gradients of empty slots, of slots whose quota is 0, and of experts without
    replicas are untouched.

    Streams, plans on the device and capture into a CUDA graph are as for
    :func:`replicate_experts`; for a capture, bind the gradients first with ``group.bind_grads``.

    Args:
        grads: this rank's main gradients, ``{name: tensor [M, *shape] or sequence of M tensors}``
            for the segments of ``group.slot_grads``, each float32 or bfloat16, in any memory of the
            group's device; or what ``group.bind_grads`` returned. Not to be used before the call
            has finished.
        plan: the plan that filled the slots, the same on every rank; or its handle, which this call
            ends. In a CUDA graph, every replay reads the plan's memory.
        group: created with ``grads=``.
        async_op: return a :class:`Work` at once; a CUDA group then uses its own stream.
        mode: "pull" (each replica's rank sums a share, and the home rank loads the sums), "direct"
            (the home rank loads every replica), or "auto".
        zero: clear the slot gradients of filled slots, for the next microbatch. False: the next
            pass has to overwrite them.

    Raises:
        UltraEPError: as :func:`replicate_experts`, with gradients in place of weights. A
            PlanHandleError: was backward called twice? After a TransferError slot gradients and
            the main gradients of replicated experts are undefined.
    """
    session = session_of(group)
    if torch.compiler.is_dynamo_compiling():
        plan = plan_of(plan, "reduce_expert_grads", session)
        grads = grads.tensors if isinstance(grads, Binding) else grads
        return traced.reduce_expert_grads(grads, plan, group, async_op, mode, zero)

    mark = plan.mark if isinstance(plan, PlanHandle) else None
    call = Call(session, plan, "reduce_expert_grads")
    try:
        bound = session.grads.bind(grads)
        reduction = _core.TransferCall(
            operation=_REDUCE,
            plan=call.view,
            main_ptrs=bound.addresses.buffer_info()[0],
            num_segments=len(bound.types),
            mode=find_mode(mode, REDUCE_MODES, session.rank),
            background=async_op,
            tag=call.tag,
            main_types=bound.types.buffer_info()[0],
            zero=zero,
            on_device=call.on_device,
            own_home=call.plan.home is session.engine.home,
            table=address(bound.table),
            in_use=0 if mark is None else mark.data_ptr(),
            bank=call.bank,
        )
    except Exception as error:
        call.reject(error)
        raise
    _, expert_bytes = session.grads.select(None)
    return call.submit(reduction, bound, expert_bytes, async_op, consumes=True)
