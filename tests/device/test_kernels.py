"""The device kernels as built: symbols, resources and instructions. No GPU is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cubin_files import (
    Resources,
    architecture,
    cuda_tool,
    disassemble,
    frames,
    resources,
    saved_bytes,
)

DEFAULT_ARCHS = [90, 100]
BUDGET = json.loads((Path(__file__).parent / "budget.json").read_text())
TRANSFERS = ["ultraep_replicate", "ultraep_replicate_far"]
REDUCTION = "ultraep_reduce"
LOADS = ["ultraep_load", "ultraep_load_far", "ultraep_load_plan"]
PLANS = {"ultraep_plan", "ultraep_load_plan"}
# One warp of it searches with more registers, and has the search's arrays on its stack: addresses,
# which its searches for room are given as one object.
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
# A block that is made from a plan on the device: by a rank's first block, for all others of it.
OF_MADE_BLOCKS = {
    "ordinary stores before bulk loads": [r"FENCE\.VIEW\.ASYNC", r"BAR\.SYNC"],
    "release at device scope, of what all threads did": [
        r"BAR\.SYNC",
        r"MEMBAR\.(ALL|SC)\.GPU",
        r"STG?\.E\.64\.STRONG\.GPU",
    ],
    "acquire at device scope": [r"LDG?\.E\.64\.STRONG\.GPU", r"CCTL\.IVALL"],
    "acquire and release by an arrival": BETWEEN_BLOCKS["acquire and release by an arrival"],
}
NEARBY = 16
# What a context gives every thread unless it is told otherwise, and nobody here does. A launch that
# needs more has the driver allocate, which may wait for kernels that wait for that launch.
DEFAULT_STACK = 1024
ADDS_IN_FLIGHT = 8
SOURCES_AT_ONCE = 16

pytestmark = pytest.mark.timeout(600)  # the first test waits for the build


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


def data_objects(cubin: Path) -> set[str]:
    """Return the names of all symbols in global memory."""
    elffile = pytest.importorskip("elftools.elf.elffile")
    with cubin.open("rb") as file:
        elf = elffile.ELFFile(file)
        memory = re.compile(r"\.nv\.(global|constant3)")
        return {
            symbol.name
            for symbol in elf.get_section_by_name(".symtab").iter_symbols()
            if symbol["st_info"]["type"] == "STT_OBJECT"
            and isinstance(symbol["st_shndx"], int)
            and memory.match(elf.get_section(symbol["st_shndx"]).name)
        }


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
    assert {*TRANSFERS, REDUCTION, *LOADS, *PLANS, *REROUTES, "ultraep_reroute_shares"} <= kernels
    for kernel in kernels:
        assert exported[kernel] == "STT_FUNC"
        # So that a profile can be filtered.
        assert re.search("load|plan|reduce|replicate|reroute", kernel)


def test_constants_are_in_the_code(cubin: Path) -> None:
    """From a list in braces the compiler may make an object in memory, and load it each time.

    That is a trip to memory in the middle of a chain. Fields that are assigned one by one are not.
    """
    of_nvshmem = r"nvshmem|cuda3std|^\$str"  # its state, what its headers include, its messages
    found = {name for name in data_objects(cubin) if not re.search(of_nvshmem, name)}
    assert found == {"ultraep_cubin_info"}


def test_resources_are_within_the_budget(cubin: Path) -> None:
    used = resources(cubin)
    show = "python tests/device/cubin_files.py shows what is used; tests/device/budget.json has"
    assert set(used) == set(BUDGET), f"{show} other kernels"
    assert max(allowed["stack"] for allowed in BUDGET.values()) <= DEFAULT_STACK
    for kernel, values in used.items():
        for name, value, allowed in zip(
            Resources._fields, values, Resources(**BUDGET[kernel]), strict=True
        ):
            assert value <= allowed, f"{cubin.name}: {kernel}: {name} {value}; {show} {allowed}"


def test_no_kernel_has_a_stack_of_its_own(cubin: Path) -> None:
    found = frames(cubin)
    for kernel in BUDGET:
        # NVSHMEM takes more arguments than registers hold.
        own = 8 if kernel.endswith("_far") else 0
        assert found[kernel].stack <= own, kernel
        assert (found[kernel].stores, found[kernel].loads) == (0, 0), kernel


def test_functions_save_registers_and_spill_nothing_else(
    code: dict[int, dict[str, list[str]]], cubin: Path
) -> None:
    """Everything reported as spilled is stored on entry and loaded on return."""
    called = {name: frame for name, frame in frames(cubin).items() if name not in BUDGET}
    assert any("prepare_call" in name for name in called)  # what makes a block
    for name, frame in called.items():
        saved = saved_bytes(code[architecture(cubin)][name])
        assert (frame.stores, frame.loads) == (saved, saved), name


def test_a_spill_is_told_from_a_saved_register() -> None:
    """Negative control: loads before the end or into another register do not count."""
    save, restore = "STL [R1+0x4], R16", "LDL R16, [R1+0x4]"
    body = ["IADD3 R2, R2, R3, RZ"] * 200
    assert saved_bytes([save, *body, restore, "RET.REL.NODEC R20 `(f)"]) == 4
    assert saved_bytes([save, restore, *body, "RET.REL.NODEC R20 `(f)"]) == 0
    assert saved_bytes([save, *body, "LDL R17, [R1+0x4]", "RET.REL.NODEC R20 `(f)"]) == 0
    assert saved_bytes([*body, save, restore, "RET.REL.NODEC R20 `(f)"]) == 0


ARRIVAL = "acquire and release by an arrival"
WANTED = dict.fromkeys(TRANSFERS, INSTRUCTIONS)
WANTED |= dict.fromkeys(LOADS, OF_LOADS | {ARRIVAL: BETWEEN_BLOCKS[ARRIVAL]})
WANTED |= dict.fromkeys(REROUTES, BETWEEN_BLOCKS)


@pytest.mark.parametrize("kernel", WANTED)
@pytest.mark.parametrize("arch", DEFAULT_ARCHS, ids=lambda arch: f"sm_{arch}")
def test_kernels_have_the_instructions_that_the_protocol_and_their_blocks_rest_on(
    code: dict[int, dict[str, list[str]]], arch: int, kernel: str
) -> None:
    assert absent(code[arch][kernel], WANTED[kernel]) == set()


@pytest.mark.parametrize("arch", DEFAULT_ARCHS, ids=lambda arch: f"sm_{arch}")
def test_reductions_observe_publish_and_arrive(
    code: dict[int, dict[str, list[str]]], arch: int
) -> None:
    (worker,) = (body for name, body in code[arch].items() if "ReduceWorker" in name)
    wanted = {name: INSTRUCTIONS[name] for name in INSTRUCTIONS if "at system scope" in name}
    assert absent(worker, wanted | {ARRIVAL: BETWEEN_BLOCKS[ARRIVAL]}) == set()


@pytest.mark.parametrize("arch", DEFAULT_ARCHS, ids=lambda arch: f"sm_{arch}")
def test_gradients_are_loaded_coherently_and_added_alone(
    code: dict[int, dict[str, list[str]]], arch: int
) -> None:
    adding = {n: body for n, body in code[arch].items() if re.search("add_rows|add_numbers", n)}
    assert len(adding) == 13  # rows: of two types into two, sums apart, of a few and of many
    for name, body in adding.items():
        loads = [line for line in body if re.search(r"\bLDG?\.E", line)]
        assert loads, name
        assert not [line for line in loads if "CONSTANT" in line], name  # through another cache
        adds = [i for i, line in enumerate(body) if re.search(r"\bFADD", line)]
        assert adds, name
        assert not [line for line in body if re.search(r"FTZ|\bFFMA", line)], name
        if "add_rows" in name:  # all of a batch are under way before any is added
            wide = [i for i, line in enumerate(body) if re.search(r"\bLDG?\.E\.128", line)]
            assert wide[-1] < adds[0], name
            # From float32 to bfloat16 they are loaded by halves, the other way two to a quad.
            halves = "GradTypeE0ELS3_1E" in name
            assert len(wide) >= (4 if halves else 6), name
            fewer = halves or re.search("E1ELS3_0ELb1ELi1E|E0ELS3_0ELb1ELi2E", name)
            assert fewer or len(wide) == ADDS_IN_FLIGHT


@pytest.mark.parametrize("kernel", sorted(PLANS))
@pytest.mark.parametrize("arch", DEFAULT_ARCHS, ids=lambda arch: f"sm_{arch}")
def test_plans_load_the_rows_of_a_load_together(
    code: dict[int, dict[str, list[str]]], arch: int, kernel: str
) -> None:
    """A store between two loads may alias the second, which would then have to wait."""
    memory = [line for line in code[arch][kernel] if re.search(r"\b(LDG?|STG?)\.E\b", line)]
    runs = re.findall(r"L+", "".join("S" if re.search(r"\bSTG?\.", m) else "L" for m in memory))
    assert max(map(len, runs)) >= SOURCES_AT_ONCE


@pytest.mark.parametrize("kernel", [*TRANSFERS, REDUCTION])
@pytest.mark.parametrize("arch", DEFAULT_ARCHS, ids=lambda arch: f"sm_{arch}")
def test_calls_order_the_making_of_a_block(
    code: dict[int, dict[str, list[str]]], arch: int, kernel: str
) -> None:
    instructions = code[arch][kernel]
    assert absent(instructions, OF_MADE_BLOCKS) == set()

    # Of the words that are released, for its blocks and for kernels of users, one is acquired.
    def offsets(instruction: str) -> set[str]:
        lines = (re.match(instruction, line) for line in instructions)
        return {line[1] for line in lines if line}

    at = r".*\[R\d+\.64(\+0x[0-9a-f]+)?\]"
    released = offsets(r"STG?\.E\.64\.STRONG\.GPU" + at)
    acquired = offsets(r"LDG?\.E\.64\.STRONG\.GPU" + at)
    assert len(acquired) == 1
    assert acquired <= released <= {*acquired, None}


@pytest.mark.parametrize(
    ("wanted", "name"),
    [(wanted, name) for wanted in (INSTRUCTIONS, OF_MADE_BLOCKS) for name in wanted],
    ids=str,
)
def test_an_absent_instruction_is_noticed(
    code: dict[int, dict[str, list[str]]], wanted: dict[str, list[str]], name: str
) -> None:
    for pattern in wanted[name]:
        without = [line for line in code[90][TRANSFERS[0]] if not re.search(pattern, line)]
        assert name in absent(without, wanted), pattern
