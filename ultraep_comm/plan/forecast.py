"""LoadForecast: what the next microbatch of a layer will load, from those before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from ultraep_comm.errors import InvalidArgumentError, InvalidLoadError
from ultraep_comm.plan.topology import as_int, as_number, check_load_form

_FRACTION = 256  # parts of a token in the mean, and steps of the decay
_METHODS = ("last", "mean")
Method = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class LoadForecast:
    """Predicts the load of a layer's next microbatch. One for each layer, the same on every rank.

    It computes in integers, so that ranks that have seen the same loads predict the same. A wrong
    forecast costs transfers, never balance: the exact load is planned on top.

    Args:
        method: "last": the last load; "mean": their mean, each counting ``decay`` times as much as
            the one after it; or a function of the last loads, int64 ``[E]``, the latest last, that
            returns a load.
        decay: of "mean", from 0 (the last load) to below 1, in steps of 1/256.
        history: loads that a function is given, at most.

    Raises:
        InvalidArgumentError: an argument is out of range.
    """

    def __init__(
        self, method: str | Method = "last", *, decay: float = 0.5, history: int = 8
    ) -> None:
        if not callable(method) and method not in _METHODS:
            raise InvalidArgumentError(
                f"method is {method!r}; expected one of {list(_METHODS)}, or a function of loads"
            )
        if not 0 <= as_number(decay, "decay") < 1:
            raise InvalidArgumentError(f"decay is {decay}; expected 0 to below 1")
        if as_int(history, "history") < 1:
            raise InvalidArgumentError(f"history is {history}; expected 1 or more")
        self._function = method if callable(method) else None
        self._decay = round(decay * _FRACTION) if method == "mean" else 0
        self._mean: torch.Tensor | None = None  # int64 [E], in parts of a token
        self._loads: deque[torch.Tensor] = deque(maxlen=as_int(history, "history"))

    def update(self, load: torch.Tensor) -> None:
        """Add the load of a microbatch, once it is known.

        Args:
            load: int32 or int64 ``[G, E]`` by source rank, or ``[E]``.

        Raises:
            InvalidLoadError: another shape or dtype, or other experts than before.
        """
        check_load_form(load)
        tokens = load.sum(dim=0, dtype=torch.int64) if load.dim() == 2 else load.to(torch.int64)
        if self._mean is not None and self._mean.shape != tokens.shape:
            raise InvalidLoadError(
                f"load has {tokens.shape[0]} experts; expected {self._mean.shape[0]}, as before: a"
                " forecast is for one layer"
            )
        now = tokens * _FRACTION
        if self._mean is not None:
            now = (self._mean * self._decay + now * (_FRACTION - self._decay)) // _FRACTION
        self._mean = now
        if self._function is not None:
            self._loads.append(tokens.clone())

    def predict(self) -> torch.Tensor | None:
        """Return the expected load, int64 ``[E]``; None: no load has been seen."""
        if self._mean is None:
            return None
        if self._function is not None:
            return self._function(list(self._loads))
        return (self._mean + _FRACTION // 2) // _FRACTION
