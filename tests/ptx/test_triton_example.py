"""examples/slot_by_slot in Triton, compiled without a GPU, on the machine beside calls."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from cpp_build import ROOT
from ptx_machine import RACE_FREE, VIOLATED, PtxMachine

EXAMPLE = ROOT / "examples/slot_by_slot/slot_gemm_triton.py"
TYPES = {
    **{"ready": "*i64", "slots": "*i8", "tokens": "*i8", "out": "*i32", "slots_used": "*i32"},
    **{"number": "i64", "num_tokens": "i32", "n": "i32", "k": "i32", "BLOCK": "constexpr"},
}
# Triton's spelling, and that of nvcc, which the machine reads.
SPELLINGS = {
    r"\{ (%\w+) \}": r"\1",
    r"\[ (%\w+) \+ 0 \]": r"[\1]",
    r"ld\.global\.gpu\.acquire\.b64": "ld.acquire.gpu.global.b64",
    r" \.ptr \.global \.align 1": "",
    r"\.reqntid 32\n": "",
    r"(?m)^\s*(//|\.loc).*\n": "",
    r"\$L_": "$LT_",  # not the labels of other kernels
}


def compiled() -> str:
    """Return the kernel's PTX."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    spec = importlib.util.spec_from_file_location("slot_gemm_triton", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    source = ASTSource(fn=example.slot_gemm, signature=TYPES, constexprs={"BLOCK": 32})
    kernel = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    (text,) = re.findall(r"\.visible \.entry.*?\n}\n", kernel.asm["ptx"], re.S)
    for pattern, spelling in SPELLINGS.items():
        text = re.sub(pattern, spelling, text)
    return text


@pytest.mark.exhaustive
@pytest.mark.builds("cpu", "ptx", "ptx_kernels_90")
def test_a_kernel_in_triton_waits_for_its_slots(machine: PtxMachine, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    own, path = compiled(), tmp_path / "both.ptx"
    for text, status in ((own, RACE_FREE), (own.replace(".acquire.", ".relaxed."), VIOLATED)):
        path.write_text(machine.kernels().read_text() + text)
        outcome = machine.run_program("ready", path, UEC_SLOT_GEMM_TRITON="1")
        assert outcome.status == status, outcome.text
