"""What the documents show works, and what they list exists."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import ultraep_comm as uec
from ultraep_comm import env

ROOT = Path(__file__).resolve().parents[2]
USAGE = (ROOT / "docs" / "usage.md").read_text()
README = (ROOT / "README.md").read_text()


def test_the_training_example_runs(tmp_path: Path) -> None:
    shown = re.search(r"```python\n(# train\.py: .*?)```", USAGE, re.DOTALL)
    assert shown is not None
    script = tmp_path / "train.py"
    script.write_text(shown[1] + 'print("trained")\n')
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2


def test_environment_variables_are_documented() -> None:
    assert env.__doc__ is not None
    for variable in re.findall(r"ULTRAEP_[A-Z_]+", inspect.getsource(env)):
        assert variable in env.__doc__
        assert variable in USAGE


def test_every_error_is_documented() -> None:
    for name, kind in vars(uec.errors).items():
        if inspect.isclass(kind) and issubclass(kind, uec.errors.UltraEPError):
            assert kind.__doc__
            own = name == kind.__name__ and name not in ("UltraEPError", "TransferError")
            assert not own or name in USAGE, name


def test_public_names_are_documented() -> None:
    for name in uec.__all__:
        assert name in USAGE + README, name


def test_new_group_of_the_docs_is_the_one_of_the_code() -> None:
    parameters = inspect.signature(uec.new_group).parameters
    shown = re.search(r"group = uec\.new_group\((.*?)\n\)", USAGE, re.DOTALL)
    assert shown is not None
    for name in re.findall(r"^    (\w+)=", shown[1], re.MULTILINE):
        assert name in parameters, name
