"""What a run of ranks as processes comes to: a fabric that does not work here, or a failure."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu import script_environment
from process_ranks import REFUSED, outcome, status_of
from ranks import run_python

from ultraep_comm import errors

HERE = str(Path(__file__).parent)
SCRIPT = f"""
import sys
sys.path.insert(0, {HERE!r})
import process_ranks
import torch.distributed as dist
from ultraep_comm import errors

def case(fabric):
    if dist.get_rank() == 1:
        raise TypeError("a wrong argument")
    raise errors.BootstrapError("rank 1 failed")

process_ranks.CASES["case"] = case
if __name__ == "__main__":
    sys.exit(process_ranks.main())
"""


@pytest.mark.parametrize(
    ("error", "made", "status"),
    [
        (errors.UnsupportedError("no fabric"), 0, REFUSED),
        (errors.BootstrapError("rank 1 has none"), 0, REFUSED),
        (errors.UnsupportedError("no more of it"), 1, 1),
        (errors.TransferTimeoutError("late"), 1, 1),
        (TypeError("a wrong argument"), 0, 1),
        (AssertionError(), 0, 1),
    ],
)
def test_only_a_group_that_cannot_be_made_is_a_refusal(
    error: BaseException, made: int, status: int
) -> None:
    assert status_of(error, made) == status


def test_one_failure_is_a_failure_whatever_the_others_say() -> None:
    assert outcome([0, 0]) == 0
    assert outcome([REFUSED, REFUSED]) == outcome([0, REFUSED]) == REFUSED
    assert outcome([REFUSED, 1]) == outcome([1, 0]) == outcome([REFUSED, -11]) == 1
    assert outcome([None, REFUSED]) == REFUSED
    assert outcome([None, 0]) == outcome([None, 1]) == 1


def test_a_bug_on_one_rank_is_no_refusal(tmp_path: Path) -> None:
    """Though its peer says that the group could not be made."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_python(str(script), "shm", "case", "2", **script_environment())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "TypeError: a wrong argument" in done.stderr
