"""The C++ core. Arrays are dense, row-major and on the CPU: NumPy arrays or torch tensors.

An array of another dtype, layout or device raises TypeError; a shape or value out of range raises
ValueError. Nothing is converted or copied.
"""

import enum
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray

_Int32Input = NDArray[np.int32] | torch.Tensor
_Int64Input = NDArray[np.int64] | torch.Tensor

def plan_replicas(
    load: _Int64Input,
    home: _Int32Input,
    domain: _Int32Input,
    slots_per_rank: int,
    allow_cross_domain: bool,
    target_ppm: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Plan from global sums: `(slot_expert [G, S], slot_quota [G, S], home_quota [E])`.

    `load [E]`, `home [E]`, `domain [G]`; `target_ppm` from `planner.target_to_ppm`.
    """

class RerouteFault(enum.Enum):
    """What a reroute found wrong; the status names the place.

    BAD_COUNT: a load or quota of `expert` is `value`, below 0 or with a sum of 2**31 or more.
    BAD_SLOT: `slot_expert` has `value` at the flat index `position`: no expert, or one that this
    rank has already. QUOTA_MISMATCH: the quotas of `expert` sum to `counted`, its load to
    `expected`. ID_OUT_OF_RANGE: `topk_ids` has `value` at the flat index `position`.
    COUNT_MISMATCH: `topk_ids` has `expert` `counted` times, `load[rank]` says `expected`.
    """

    NONE = 0
    BAD_COUNT = 1
    BAD_SLOT = 2
    QUOTA_MISMATCH = 3
    ID_OUT_OF_RANGE = 4
    COUNT_MISMATCH = 5

class RerouteStatus:
    """The first fault found, or NONE; fields that the fault does not name are -1."""

    @property
    def fault(self) -> RerouteFault: ...
    @property
    def expert(self) -> int: ...
    @property
    def counted(self) -> int: ...
    @property
    def expected(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def value(self) -> int: ...

@overload
def reroute(
    topk_ids: NDArray[np.int32] | torch.Tensor,
    load: _Int32Input,
    slot_expert: _Int32Input,
    slot_quota: _Int32Input,
    home_quota: _Int32Input,
    home: _Int32Input,
    rank: int,
    out: NDArray[np.int32] | torch.Tensor,
) -> RerouteStatus:
    """Write the physical instance ids of `topk_ids` (any shape, -1 stays) to `out`.

    `load [G, E]`, `slot_expert [G, S]`, `slot_quota [G, S]`, `home_quota [E]`, `home [E]`. `out`
    has the size and dtype of `topk_ids`; after a fault its contents mean nothing.
    """

@overload
def reroute(
    topk_ids: NDArray[np.int64] | torch.Tensor,
    load: _Int32Input,
    slot_expert: _Int32Input,
    slot_quota: _Int32Input,
    home_quota: _Int32Input,
    home: _Int32Input,
    rank: int,
    out: NDArray[np.int64] | torch.Tensor,
) -> RerouteStatus: ...
