"""What cannot be expressed as a plan is told, with the value, the place and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_tokens import QUOTA, ROWS, ULTRAEP

import ultraep_comm as uec
from ultraep_comm import interop
from ultraep_comm.errors import InvalidArgumentError

EPLB, LLEP, MOONEP, READ = (
    interop.from_eplb,
    interop.from_llep,
    interop.from_moonep,
    interop.from_ultraep,
)
SIZES = {"num_ranks": 2, "num_experts": 4}
TABLE = [0, 1, 2, 2, 3, 0]


@pytest.mark.parametrize(
    "call, table, arguments, message",
    [
        (
            EPLB,
            [TABLE, TABLE],
            SIZES,
            r"shape \(2, 6\); expected \[P\], one layer's rows.*\[layer\]",
        ),
        (EPLB, TABLE[:5], SIZES, r"shape \(5,\).* a multiple of 2 ranks"),
        (EPLB, torch.tensor(TABLE) / 2, SIZES, "dtype torch.float32; expected integers"),
        (EPLB, "rows", SIZES, "physical_to_logical is not a tensor"),
        (
            EPLB,
            [*TABLE[:5], 4],
            SIZES,
            r"physical_to_logical\[5\] is 4; expected an expert in \[0, 4",
        ),
        (EPLB, [*TABLE[:5], -2], SIZES, r"\[5\] is -2; expected .* or -1"),
        (EPLB, [0, 1, 2, 2, 1, 0], SIZES, "expert 3 has no row; expected each of 4 .* the 6 rows"),
        (
            EPLB,
            TABLE,
            {**SIZES, "home": [0, 1, 1, 1]},
            r"expert 1 .* rank 1: its rows are \[1\], on",
        ),
        (EPLB, TABLE, {**SIZES, "home": [0, 0, 1]}, r"home has shape \(3,\) .*; expected \[4\]"),
        (
            EPLB,
            TABLE,
            {**SIZES, "home": [0, 0, 1, 2]},
            r"home\[3\] is 2; expected a rank in \[0, 2\)",
        ),
        (EPLB, TABLE, {**SIZES, "load": torch.ones(3)}, "load has shape .* dtype float32"),
        (
            EPLB,
            TABLE,
            {**SIZES, "load": torch.tensor([1, 2])},
            r"load has shape \(2,\) .*, or \(4,\)",
        ),
        (EPLB, TABLE, {**SIZES, "load": torch.tensor([1, 2, -3, 4])}, r"load\[2\] is -3"),
        (
            EPLB,
            TABLE,
            {**SIZES, "load": torch.full((2, 4), 2**31 - 1)},
            f"the load of expert 0 is {2**32 - 2}",
        ),
        (
            EPLB,
            TABLE,
            {**SIZES, "slots_per_rank": 0},
            r"rank 0 needs 1 slots, for experts \[2\], but",
        ),
        (EPLB, TABLE, {**SIZES, "slots_per_rank": -1}, "slots_per_rank is -1; expected 0 to"),
        (EPLB, TABLE, {**SIZES, "num_ranks": 0}, "num_ranks is 0; expected 1 to"),
        (EPLB, TABLE, {**SIZES, "num_experts": 2**24 + 1}, "num_experts is 16777217"),
        (
            LLEP,
            [(0, 0, 1)],
            SIZES,
            "lpt_plan is a list; expected a mapping .* compute_llep_lpt_plan",
        ),
        (LLEP, {4: [(0, 0, 1)]}, SIZES, r"lpt_plan has expert 4; expected an expert in \[0, 4\)"),
        (
            LLEP,
            {0: [(0, 1)]},
            SIZES,
            r"lpt_plan\[0\]\[0\] is \(0, 1\); expected \(rank, start, end",
        ),
        (
            LLEP,
            {0: [(2, 0, 1)]},
            SIZES,
            r"lpt_plan\[0\]\[0\] is on rank 2; expected a rank in \[0, 2",
        ),
        (LLEP, {0: [(0, 1, 2)]}, SIZES, "on rank 0 has tokens 1 to 2; expected some from 0"),
        (LLEP, {0: [(0, 0, 2), (1, 1, 3)]}, SIZES, r"\[0\]\[1\] on rank 1 .* 1 to 3; .* from 2 on"),
        (LLEP, {0: [(0, 0, 0)]}, SIZES, "has tokens 0 to 0"),
        (LLEP, {0: [(0, 0, 2**70)]}, SIZES, rf"computes {2**70} tokens of expert 0; expected 0 to"),
        (LLEP, {0: [(0, 0, 1.5)]}, SIZES, r"lpt_plan\[0\]\[0\] is 1.5; expected an integer"),
        (LLEP, {"a": []}, SIZES, "an expert is 'a'; expected an integer"),
        (LLEP, {0: 7}, SIZES, r"lpt_plan\[0\] is 7; expected a list"),
        (LLEP, {0: [5]}, SIZES, r"lpt_plan\[0\]\[0\] is 5; expected \(rank, start, end"),
        (LLEP, {}, {"num_ranks": 3, "num_experts": 4}, "num_experts is 4 for 3 ranks; .* LLEP"),
        (
            LLEP,
            {0: [(1, 0, 9)], 1: [(1, 0, 9)]},
            {**SIZES, "slots_per_rank": 1},
            r"rank 1 needs 2 slots, for experts \[0, 1\], but slots_per_rank is 1. .* LLEP's max",
        ),
        (
            LLEP,
            {0: [(0, 0, 9)]},
            {**SIZES, "load": torch.tensor([[4, 0, 0, 0], [4, 0, 0, 0]])},
            "quotas of expert 0 sum to 9; expected its load, 8",
        ),
        (
            MOONEP,
            [2, 3],
            {"num_experts": 4},
            r"experts_to_copy has shape \(2,\); expected \[R, B\]",
        ),
        (
            MOONEP,
            [[4], [0]],
            {"num_experts": 4},
            r"experts_to_copy\[0\]\[0\] is 4; expected an exp",
        ),
        (
            MOONEP,
            [[1], [0]],
            {"num_experts": 4},
            r"slot_expert\[0, 0\] is 1: the slot is on .* home",
        ),
        (MOONEP, [[2, 2], [0, 1]], {"num_experts": 4}, "expert 2 is twice on rank 0"),
        (MOONEP, [[2], [0]], {"num_experts": 5}, "num_experts is 5 for 2 ranks; .* MoonEP"),
        (
            MOONEP,
            [[2], [0]],
            {"num_experts": 4, "alloc": torch.ones(2, 4, dtype=torch.int32)},
            r"alloc\[0, 3\] is 1, but rank 0 is not the home of expert 3 .*\[0\] is \[2\]. Exp",
        ),
        (
            MOONEP,
            [[2], [0]],
            {"num_experts": 4, "alloc": [[1, -1, 0, 0], [0, 0, 1, 1]]},
            "rank 0 computes -1 tokens of expert 1; expected 0 to",
        ),
        (MOONEP, [[2], [0]], {"num_experts": 4, "alloc": [1, 2]}, r"alloc has shape \(2,\); expec"),
        (
            MOONEP,
            [[2, 3], [0, -1]],
            {"num_experts": 4, "slots_per_rank": 1},
            r"rank 0 needs 2 slots, for experts \[2, 3\].* MoonEP fills up to E / R",
        ),
        (
            READ,
            [2, 1, 3, 2, 3, 1],
            ULTRAEP,
            r"\[3\], a master of rank 1, is expert 2, as on rank 0",
        ),
        (
            READ,
            [2, -1, 3, 0, 3, 1],
            ULTRAEP,
            r"\[1\], a master of rank 0, is unused; .* first 2 rows",
        ),
        (READ, [2, 0], ULTRAEP, "a rank has 1 of 2 rows; expected its 2 masters"),
        (
            READ,
            ROWS,
            {**ULTRAEP, "quota": None},
            "only logical_to_physical was given; expected both",
        ),
        (READ, ROWS, {**ULTRAEP, "logical_to_physical": None}, "only quota was given"),
        (
            READ,
            ROWS,
            {**ULTRAEP, "quota": [[1]] * 4},
            r"shape \(4, 2\) and quota \(4, 1\); expected \[",
        ),
        (
            READ,
            ROWS,
            {**ULTRAEP, "quota": [[7, 1], *QUOTA[1:]]},
            r"quota\[0, 1\] is 1, but logical_to_physical\[0, 1\] is -1; expected 0",
        ),
        (
            READ,
            ROWS,
            {**ULTRAEP, "logical_to_physical": [[3, -1], [1, 2], [0, -1], [4, 5]]},
            r"logical_to_physical\[1, 1\] is 2, which is not a row of expert 1; .* rows \[1, 5\]",
        ),
        (
            READ,
            ROWS,
            {**ULTRAEP, "logical_to_physical": [[3, -1], [1, 1], [0, -1], [4, 2]]},
            r"logical_to_physical\[1, 1\] is 1: expert 1 is twice on rank 0",
        ),
        (
            READ,
            ROWS,
            {**ULTRAEP, "logical_to_physical": [[3, -1], [1, 5], [0, -1], [4, -9]]},
            r"logical_to_physical\[3, 1\] is -9, which is not a row of expert 3",
        ),
        (
            READ,
            ROWS,
            {
                **ULTRAEP,
                "logical_to_physical": [[3, -1], [1, -1], [0, -1], [4, 2]],
                "quota": [[7, 0], [2, 0], [1, 0], [5, 4]],
            },
            r"\[5\] on rank 1 is expert 1, but logical_to_physical\[1\] is \[1, -1\]; expe",
        ),
        (
            READ,
            ROWS,
            {"num_ranks": 3, "num_experts": 4},
            "num_experts is 4 for 3 ranks; .* UltraEP",
        ),
    ],
)
def test_what_cannot_be_expressed_is_told(
    call: Callable[..., uec.Plan], table: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call(table, **arguments)
