"""vLLM: its load balancer (EPLB) moves experts by this library, or each batch gets replicas.

Installing the library declares :func:`register` as a general plugin of vLLM. It does nothing unless
the environment variable ULTRAEP_VLLM is set, so that this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ultraep_comm import env
from ultraep_comm.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

EPLB = "vllm.distributed.eplb"
LOGGER = logging.getLogger("vllm.ultraep_comm")  # vLLM shows INFO of its own loggers only
SETTING = "--enable-expert-parallel and --enable-eplb, with several ranks"
_CREATE = "create_eplb_communicator"
_PARAMETERS = "group_coordinator backend expert_weights expert_buffer"

# What is called, replaced or overridden, and the parameters that it was written for.
FACTORY = {
    f"{EPLB}.eplb_communicator:{_CREATE}": _PARAMETERS,
    f"{EPLB}.eplb_state:{_CREATE}": _PARAMETERS,
}


def register() -> None:
    """Do what ULTRAEP_VLLM says, in a process of vLLM: nothing, ``eplb`` or ``batch``.

    With ``eplb`` a communicator is made collectively, and raises on every rank UnsupportedError for
    elastic expert parallelism or tensors without one row per expert, InvalidArgumentError for rows
    that are not dense, and what ``new_group`` raises. With ``batch`` see
    ``ultraep_comm.adapters.vllm.batch``.

    Raises:
        InvalidArgumentError: the variable has another value.
        UnsupportedError: this release of vLLM has other signatures; or what ``batch`` raises.
    """
    mode = env.vllm()
    if mode is not None:
        importlib.import_module(f"{__name__}.{mode}").register()


def replace_factory(mode: str, points: Mapping[str, str], make: Callable[..., Any]) -> bool:
    """Let ``make`` give a model's EPLB its communicator; False: this has been done before.

    Args:
        mode: of ULTRAEP_VLLM.
        points: what else is used of vLLM, as :data:`FACTORY`.
        make: called with the coordinator of the ranks, ``expert_weights`` and ``expert_buffer``.

    Raises:
        UnsupportedError: this release of vLLM has other signatures.
    """
    from ultraep_comm.adapters import checks

    places = [checks.find(f"{EPLB}.{module}") for module in ("eplb_communicator", "eplb_state")]
    original = getattr(places[0], _CREATE)
    if original.__module__ == __name__:  # plugins may be loaded more than once
        return False
    checks.check_signatures("vllm", "0.33", {**FACTORY, **points})
    elastic = checks.find("vllm.distributed.stateless_coordinator:StatelessGroupCoordinator")

    def create(
        group_coordinator: Any,
        backend: str,
        expert_weights: Sequence[Sequence[torch.Tensor]],
        expert_buffer: list[torch.Tensor],
    ) -> Any:
        if isinstance(group_coordinator, elastic):
            raise UnsupportedError(
                f"ULTRAEP_VLLM={mode}: elastic expert parallelism changes the ranks of a group;"
                " unset ULTRAEP_VLLM, or enable_elastic_ep"
            )
        if not expert_weights or checks.is_alone(group_coordinator.cpu_group, "vLLM", SETTING):
            return original(group_coordinator, backend, expert_weights, expert_buffer)
        return make(group_coordinator, expert_weights, expert_buffer)

    for place in places:
        setattr(place, _CREATE, create)
    return True
