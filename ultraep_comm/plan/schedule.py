"""The modes in which a schedule is executed; `src/core/schedule/` makes the schedules."""

from ultraep_comm import _core

MODES = {mode.name.lower(): mode for mode in _core.Mode}  # by name
