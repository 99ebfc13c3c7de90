"""What cannot be expressed as a plan is reported, with the value, the place and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_tokens import QUOTA, ROWS, ULTRAEP

import ultraep_comm as uec
from ultraep_comm import interop
from ultraep_comm.errors import InvalidArgumentError

SIZES = {"num_ranks": 2, "num_experts": 4}
TABLE = [0, 1, 2, 2, 3, 0]
Case = tuple[Any, dict[str, Any], str]  # the table, further arguments, and what the error says

EPLB_CASES: list[Case] = [
    ([TABLE, TABLE], {}, r"shape \(2, 6\); expected \[P\], one layer's rows.*\[layer\]"),
    (TABLE[:5], {}, r"shape \(5,\).* a multiple of 2 ranks"),
    (torch.tensor(TABLE) / 2, {}, "dtype torch.float32; expected integers"),
    ("rows", {}, "physical_to_logical is not a tensor"),
    ([*TABLE[:5], 4], {}, r"physical_to_logical\[5\] is 4; expected an expert in \[0, 4"),
    ([0, 1, 2, 2, 1, 0], {}, "expert 3 has no row; expected each of 4 .* the 6 rows"),
    (TABLE, {"home": [0, 1, 1, 1]}, r"expert 1 .* rank 1: its rows are \[1\], on"),
    (TABLE, {"home": [0, 0, 1, 2]}, r"home\[3\] is 2; expected a rank in \[0, 2\)"),
    (TABLE, {"load": torch.tensor([1, 2])}, r"load has shape \(2,\) .*, or \(4,\)"),
    (TABLE, {"load": torch.tensor([1, 2, -3, 4])}, r"load\[2\] is -3"),
    (TABLE, {"load": torch.full((2, 4), 2**31 - 1)}, f"the load of expert 0 is {2**32 - 2}"),
    (TABLE, {"slots_per_rank": 0}, r"rank 0 needs 1 slots, for experts \[2\], but"),
    (TABLE, {"slots_per_rank": -1}, "slots_per_rank is -1; expected 0 to"),
    (TABLE, {"num_ranks": 0}, "num_ranks is 0; expected 1 to"),
]
LLEP_CASES: list[Case] = [
    ([(0, 0, 1)], {}, "lpt_plan is a list; expected a mapping .* compute_llep_lpt_plan"),
    ({4: [(0, 0, 1)]}, {}, r"lpt_plan has expert 4; expected an expert in \[0, 4\)"),
    ({0: [(0, 1)]}, {}, r"lpt_plan\[0\]\[0\] is \(0, 1\); expected \(rank, start, end"),
    ({0: [(2, 0, 1)]}, {}, r"lpt_plan\[0\]\[0\] is on rank 2; expected a rank in \[0, 2"),
    ({0: [(0, 1, 2)]}, {}, "on rank 0 has tokens 1 to 2; expected some from 0"),
    ({0: [(0, 0, 2), (1, 1, 3)]}, {}, r"\[0\]\[1\] on rank 1 .* 1 to 3; .* from 2 on"),
    ({0: [(0, 0, 2**70)]}, {}, rf"computes {2**70} tokens of expert 0; expected 0 to"),
    ({"a": []}, {}, "an expert is 'a'; expected an integer"),
    ({0: 7}, {}, r"lpt_plan\[0\] is 7; expected a list"),
    ({0: [5]}, {}, r"lpt_plan\[0\]\[0\] is 5; expected \(rank, start, end"),
    ({}, {"num_ranks": 3, "num_experts": 4}, "num_experts is 4 for 3 ranks; .* LLEP"),
    (
        {0: [(0, 0, 9)]},
        {"load": torch.tensor([[4, 0, 0, 0], [4, 0, 0, 0]])},
        "quotas of expert 0 sum to 9; expected its load, 8",
    ),
]
MOONEP_CASES: list[Case] = [
    ([2, 3], {}, r"experts_to_copy has shape \(2,\); expected \[R, B\]"),
    ([[4], [0]], {}, r"experts_to_copy\[0\]\[0\] is 4; expected an exp"),
    ([[1], [0]], {}, r"slot_expert\[0, 0\] is 1: the slot is on .* home"),
    ([[2], [0]], {"num_experts": 5}, "num_experts is 5 for 2 ranks; .* MoonEP"),
    (
        [[2], [0]],
        {"alloc": torch.ones(2, 4, dtype=torch.int32)},
        r"alloc\[0, 3\] is 1, but rank 0 is not the home of expert 3 .*\[0\] is \[2\]. Exp",
    ),
    ([[2], [0]], {"alloc": [1, 2]}, r"alloc has shape \(2,\); expec"),
    (
        [[2, 3], [0, -1]],
        {"slots_per_rank": 1},
        r"rank 0 needs 2 slots, for experts \[2, 3\].* MoonEP fills up to E / R",
    ),
]
ULTRAEP_CASES: list[Case] = [
    ([2, 1, 3, 2, 3, 1], {}, r"\[3\], a master of rank 1, is expert 2, as on rank 0"),
    ([2, -1, 3, 0, 3, 1], {}, r"\[1\], a master of rank 0, is unused; .* first 2 rows"),
    ([2, 0], {}, "a rank has 1 of 2 rows; expected its 2 masters"),
    (ROWS, {"quota": None}, "only logical_to_physical was given; expected both"),
    (ROWS, {"quota": [[1]] * 4}, r"shape \(4, 2\) and quota \(4, 1\); expected \["),
    (
        ROWS,
        {"quota": [[7, 1], *QUOTA[1:]]},
        r"quota\[0, 1\] is 1, but logical_to_physical\[0, 1\] is -1; expected 0",
    ),
    (
        ROWS,
        {"logical_to_physical": [[3, -1], [1, 2], [0, -1], [4, 5]]},
        r"logical_to_physical\[1, 1\] is 2, which is not a row of expert 1; .* rows \[1, 5\]",
    ),
    (
        ROWS,
        {"logical_to_physical": [[3, -1], [1, 1], [0, -1], [4, 2]]},
        r"logical_to_physical\[1, 1\] is 1: expert 1 is twice on rank 0",
    ),
    (
        ROWS,
        {
            "logical_to_physical": [[3, -1], [1, -1], [0, -1], [4, 2]],
            "quota": [[7, 0], [2, 0], [1, 0], [5, 4]],
        },
        r"\[5\] on rank 1 is expert 1, but logical_to_physical\[1\] is \[1, -1\]; expe",
    ),
    (ROWS, {"num_ranks": 3, "num_experts": 4}, "num_experts is 4 for 3 ranks; .* UltraEP"),
]
CASES = [
    *((interop.from_eplb, SIZES, *case) for case in EPLB_CASES),
    *((interop.from_llep, SIZES, *case) for case in LLEP_CASES),
    *((interop.from_moonep, {"num_experts": 4}, *case) for case in MOONEP_CASES),
    *((interop.from_ultraep, ULTRAEP, *case) for case in ULTRAEP_CASES),
]


@pytest.mark.parametrize("call, sizes, table, changes, message", CASES)
def test_what_cannot_be_expressed_is_reported(
    call: Callable[..., uec.Plan],
    sizes: dict[str, Any],
    table: Any,
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call(table, **{**sizes, **changes})
