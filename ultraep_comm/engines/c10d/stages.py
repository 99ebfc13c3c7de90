"""The local stages of a c10d group on a device: done on the CPU."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from ultraep_comm.engines.host import HostStages
from ultraep_comm.errors import UnsupportedError
from ultraep_comm.plan.plan import Plan
from ultraep_comm.plan.planner import Costs
from ultraep_comm.plan.topology import IntArray, Topology

Tensor = torch.Tensor


class DeviceStages(HostStages):
    """Count, plan and reroute on the CPU what is on a device; results go back there.

    Plans stay on the CPU, where the engine reads them. Each copy waits for the device.
    """

    def __init__(self, topology: Topology, rank: int, device: torch.device) -> None:
        super().__init__(topology, rank)
        self._device = device

    def holds(self, value: object) -> bool:
        """Return whether a tensor, or a plan, is on the device."""
        tensor = value.slot_expert if isinstance(value, Plan) else value
        return isinstance(tensor, Tensor) and tensor.device.type == self._device.type

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""
        runtime = torch.get_device_module(self._device)
        found = getattr(runtime, "is_current_stream_capturing", None)
        return found is not None and bool(found())

    def on_host(self, tensor: Tensor, name: str) -> Tensor:
        """Return a tensor on the CPU; waits for the device."""
        if self.is_capturing():
            raise UnsupportedError(
                f"rank {self._rank}: {name} has to be copied to the CPU, which a capture cannot"
                " hold; the c10d engine cannot be captured"
            )
        return tensor.cpu()

    def plan_on_host(self, plan: Plan) -> Plan:
        """Return a plan with its tensors on the CPU."""
        if not self.holds(plan):
            return plan
        copies: dict[str, Any] = {
            field.name: self.on_host(value, "a plan")
            for field in fields(plan)
            if isinstance(value := getattr(plan, field.name), Tensor)
        }
        return replace(plan, **copies)

    def plan_for_call(self, plan: Plan, operation: str) -> tuple[Plan, bool]:
        """Return the plan on the CPU, and False."""
        if self.is_capturing():
            raise UnsupportedError(
                f"rank {self._rank}: {operation} while the current stream is being captured; the"
                " c10d engine cannot be captured"
            )
        return self.plan_on_host(plan), False

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy on the CPU, where plans are."""
        return tensor.cpu().clone()

    def beside(self, result: Tensor, given: Tensor) -> Tensor:
        """Return the result on the device of ``given``."""
        return result.to(given.device)

    def plan(
        self,
        load: Tensor,
        target_ppm: int,
        costs: Costs | None,
        *,
        apart: bool = False,
        residents: IntArray | None = None,
        bank_table: int = 0,
    ) -> Plan:
        """Plan a load on the CPU."""
        load = self.on_host(load, "the load") if self.holds(load) else load
        return super().plan(load, target_ppm, costs, apart=apart, residents=residents)
