"""Groups whose ranks are threads of one process, for tests and for trying things out."""

from __future__ import annotations

from ultraep_comm.group.create import new_loopback_groups

__all__ = ["new_loopback_groups"]
