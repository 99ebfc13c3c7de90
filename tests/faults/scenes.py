"""All scenes."""

from __future__ import annotations

from deaths import DEATHS
from orders import ORDERS
from scene import Scene
from stops import STOPS

SCENES: list[Scene] = [*DEATHS, *STOPS, *ORDERS]
assert len({scene.name for scene in SCENES}) == len(SCENES)
