"""The device kernels as built: symbols, resources and instructions. No GPU is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cubin_files import Resources, architecture, cuda_tool, disassemble, resources, spills

DEFAULT_ARCHS = [90, 100]
BUDGET = json.loads((Path(__file__).parent / "budget.json").read_text())
TRANSFERS = [f"ultraep_replicate_{tile}{far}" for tile in (16384, 32768) for far in ("", "_far")]
LOADS = ["ultraep_load", "ultraep_load_far", "ultraep_load_plan"]
PLANS = {"ultraep_plan", "ultraep_load_plan"}
REROUTES = [f"ultraep_reroute_{form}" for form in ("int32", "int64", "map")]
# What nvshmem4py's library_init asks the loaded cubin for.
NVSHMEM_SYMBOLS = {"nvshmemi_device_state_d", "nvshmemi_device_lib_version_d"}

# Instructions of sm_90 and later, as nvdisasm writes them: each a sequence of patterns, of which a
# later one is looked for in the few instructions after the one before.
INSTRUCTIONS = {
    "bulk copy from global to shared memory": [r"UBLKCP\.S\.G"],
    "bulk copy from shared to global memory": [r"UBLKCP\.G\.S"],
    # Without the CCTL it is the wait of which the protocol says that it only frees the source.
    "wait until bulk copies are delivered": [r"DEPBAR\.LE SB0", r"CCTL\.IVALL"],
    "end of a group of bulk copies": [r"UTMACMDFLUSH"],
    "fence between the generic and the async proxy": [r"FENCE\.VIEW\.ASYNC"],
    "load-acquire at system scope": [r"LDG?\.E\.64\.STRONG\.SYS", r"CCTL\.IVALL"],
    "store-release at system scope": [r"MEMBAR\.(ALL|SC)\.SYS", r"STG?\.E\.64\.STRONG\.SYS"],
}
# A row of loads is counted in shared memory, and leaves by bulk copies.
OF_LOADS = {name: INSTRUCTIONS[name] for name in list(INSTRUCTIONS)[1:]}
# The same for what blocks of one launch tell each other.
BETWEEN_BLOCKS = {
    "load-acquire at device scope": [r"LDG?\.E\.64\.STRONG\.GPU", r"CCTL\.IVALL"],
    "store-release at device scope": [r"MEMBAR\.(ALL|SC)\.GPU", r"STG?\.E\.64\.STRONG\.GPU"],
    "acquire and release by an arrival": [
        r"MEMBAR\.(ALL|SC)\.GPU",
        r"ATOMG?\.E\.ADD\.S32\.STRONG\.GPU",
        r"CCTL\.IVALL",
    ],
}
NEARBY = 8

pytestmark = pytest.mark.timeout(600)  # the first test builds


@pytest.fixture(params=DEFAULT_ARCHS, ids=lambda arch: f"sm_{arch}")
def cubin(request: pytest.FixtureRequest, cubins: Path) -> Path:
    return cubins / f"ultraep_comm-sm_{request.param}.cubin"


@pytest.fixture(scope="session")
def code(cubins: Path) -> dict[int, dict[str, list[str]]]:
    """Instructions by architecture and function."""
    program = cuda_tool("nvdisasm")
    return {architecture(c): disassemble(c, program) for c in cubins.glob("*.cubin")}


def absent(instructions: list[str], wanted: dict[str, list[str]] = INSTRUCTIONS) -> set[str]:
    """Return the entries of `wanted` that a function does not have."""

    def found(patterns: list[str], begin: int, end: int) -> bool:
        if not patterns:
            return True
        return any(
            re.search(patterns[0], instructions[at])
            and found(patterns[1:], at + 1, min(at + 1 + NEARBY, len(instructions)))
            for at in range(begin, end)
        )

    return {name for name, patterns in wanted.items() if not found(patterns, 0, len(instructions))}


def symbols(cubin: Path) -> dict[str, str]:
    """Return the type of every global symbol."""
    elffile = pytest.importorskip("elftools.elf.elffile")
    with cubin.open("rb") as file:
        table = elffile.ELFFile(file).get_section_by_name(".symtab")
        return {
            symbol.name: symbol["st_info"]["type"]
            for symbol in table.iter_symbols()
            if symbol["st_info"]["bind"] == "STB_GLOBAL" and symbol["st_shndx"] != "SHN_UNDEF"
        }


def test_default_architectures_are_those_of_the_build() -> None:
    text = (Path(__file__).parents[2] / "cmake" / "cuda.cmake").read_text()
    default = re.search(r'set\(ULTRAEP_CUDA_ARCHS "([0-9;]+)"', text)
    assert default is not None
    assert [int(arch) for arch in default[1].split(";")] == DEFAULT_ARCHS


def test_cubin_exports_the_kernels_and_what_nvshmem_asks_for(cubin: Path) -> None:
    exported = symbols(cubin)
    for name in [*NVSHMEM_SYMBOLS, "ultraep_cubin_info"]:
        assert exported.get(name) == "STT_OBJECT", name
    # A linked cubin has functions of NVSHMEM too; what a host can launch is what nvlink lists.
    kernels = set(resources(cubin))
    assert {*TRANSFERS, *LOADS, *PLANS, *REROUTES, "ultraep_reroute_shares"} <= kernels
    for kernel in kernels:
        assert exported[kernel] == "STT_FUNC"
        assert re.search("load|plan|replicate|reroute", kernel)  # so that a profile can be filtered


def test_resources_are_within_the_budget(cubin: Path) -> None:
    used = resources(cubin)
    show = "python tests/device/cubin_files.py shows what is used; tests/device/budget.json has"
    assert set(used) == set(BUDGET), f"{show} other kernels"
    for kernel, values in used.items():
        for name, value, allowed in zip(
            Resources._fields, values, Resources(**BUDGET[kernel]), strict=True
        ):
            assert value <= allowed, f"{cubin.name}: {kernel}: {name} {value}; {show} {allowed}"


def test_budget_allows_64_registers_and_no_stack_but_for_nvshmem() -> None:
    for kernel in PLANS:  # one block of it for each rank
        assert BUDGET[kernel] == {"registers": 128, "stack": 0, "shared": 0}
    for kernel, allowed in BUDGET.items():
        if kernel in PLANS:
            continue
        # What calls NVSHMEM's library has its code in line, and a stack for what it calls in turn.
        calls_nvshmem = kernel.endswith("_far")
        assert allowed["registers"] <= (104 if calls_nvshmem else 64), kernel
        assert allowed["stack"] == 0 or calls_nvshmem or kernel == "ultraep_replicate_notice"


def test_nothing_spills(cubin: Path) -> None:
    spilled = spills(cubin)
    assert set(spilled) >= set(BUDGET)
    assert {name: num_bytes for name, num_bytes in spilled.items() if num_bytes > 0} == {}


@pytest.mark.parametrize("kernel", TRANSFERS)
@pytest.mark.parametrize("arch", DEFAULT_ARCHS, ids=lambda arch: f"sm_{arch}")
def test_transfers_have_the_instructions_that_the_protocol_rests_on(
    code: dict[int, dict[str, list[str]]], arch: int, kernel: str
) -> None:
    assert absent(code[arch][kernel]) == set()


@pytest.mark.parametrize("kernel", LOADS)
@pytest.mark.parametrize("arch", DEFAULT_ARCHS, ids=lambda arch: f"sm_{arch}")
def test_loads_have_the_instructions_that_the_protocol_and_their_blocks_rest_on(
    code: dict[int, dict[str, list[str]]], arch: int, kernel: str
) -> None:
    arrival = "acquire and release by an arrival"
    wanted = OF_LOADS | {arrival: BETWEEN_BLOCKS[arrival]}
    assert absent(code[arch][kernel], wanted) == set()


@pytest.mark.parametrize("kernel", REROUTES)
@pytest.mark.parametrize("arch", DEFAULT_ARCHS, ids=lambda arch: f"sm_{arch}")
def test_reroutes_have_the_instructions_that_order_their_blocks(
    code: dict[int, dict[str, list[str]]], arch: int, kernel: str
) -> None:
    assert absent(code[arch][kernel], BETWEEN_BLOCKS) == set()


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_an_absent_instruction_is_noticed(code: dict[int, dict[str, list[str]]], name: str) -> None:
    for pattern in INSTRUCTIONS[name]:
        without = [line for line in code[90][TRANSFERS[0]] if not re.search(pattern, line)]
        assert name in absent(without), pattern
