"""Hides the packages that a GPU machine does not have, in this process and those it starts.

Python imports this module by itself where it is on PYTHONPATH. Carried packages are not hidden.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import PathFinder
from typing import Any

MODULES = set(os.environ.get("UEC_HIDDEN_MODULES", "").split())
PACKAGES = set(os.environ.get("UEC_HIDDEN_PACKAGES", "").split())
CARRIED = os.environ.get("UEC_CARRIED", "")


class Bare(PathFinder):
    """Finds what the machine has."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Look for hidden modules among the carried ones alone."""
        hidden = path is None and fullname in MODULES
        return super().find_spec(fullname, [CARRIED] if hidden else path, target)

    @classmethod
    def find_distributions(cls, *args: Any, **options: Any) -> Any:
        """Leave out hidden packages that are not carried."""
        for found in super().find_distributions(*args, **options):
            name = re.sub(r"[-_.]+", "-", found.metadata["Name"] or "").lower()
            if name not in PACKAGES or str(found.locate_file("")) == CARRIED:
                yield found


# An editable installation has a finder of its own, which would bring the checkout's library.
sys.meta_path[:] = [
    Bare if finder is PathFinder else finder
    for finder in sys.meta_path
    if type(finder).__name__ != "ScikitBuildRedirectingFinder"
]
