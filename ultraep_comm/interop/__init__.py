"""Other systems' plans, in their own output formats, as plans of this library.

Not imported by ``ultraep_comm``: ``from ultraep_comm import interop``. Each function takes what the
system's planner returns for one layer, and checks it: a plan that cannot be expressed raises, with
the expert, the rank and the reason. Inputs on a device are copied to the CPU, which synchronises;
the plan is on the device of the first argument. It has no domains: a group checks its own.
"""

from ultraep_comm.interop.eplb import from_eplb, home_from_eplb
from ultraep_comm.interop.llep import from_llep
from ultraep_comm.interop.moonep import from_moonep
from ultraep_comm.interop.ultraep import from_ultraep

__all__ = ["from_eplb", "from_llep", "from_moonep", "from_ultraep", "home_from_eplb"]
