"""Predicted times of transfers on described machines.

>>> from ultraep_comm.model import predict
>>> predict(plan, 37_748_736, "nvl72").over_bound
1.05

docs/model.md describes what is modelled and what is left out.
"""

from ultraep_comm.model.bound import transfer_bound_us
from ultraep_comm.model.machine import MACHINES, Machine, find_machine
from ultraep_comm.model.predict import Prediction, predict, predict_reduction

__all__ = [
    "MACHINES",
    "Machine",
    "Prediction",
    "find_machine",
    "predict",
    "predict_reduction",
    "transfer_bound_us",
]
