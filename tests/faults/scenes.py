"""All scenes."""

from __future__ import annotations

from deaths import DEATHS
from interrupts import INTERRUPTS
from jobs import JOBS
from meetings import MEETINGS
from messages import MESSAGES
from orders import ORDERS
from scene import Scene
from stops import STOPS

SCENES: list[Scene] = [*DEATHS, *STOPS, *ORDERS, *MEETINGS, *INTERRUPTS, *JOBS, *MESSAGES]
assert len({scene.name for scene in SCENES}) == len(SCENES)
