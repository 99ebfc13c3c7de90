"""Kernels of a few lines of PTX, each launched on the machine in a process of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from ptx_machine import Outcome, PtxMachine

HEAD = """
.version 8.6
.target sm_90
.address_size 64
.extern .shared .align 128 .b8 dynamic[];
.extern .func nvshmemx_putmem_nbi_warp
  (.param .b64 to, .param .b64 from, .param .b64 n, .param .b32 pe);
.extern .func nvshmem_quiet ();
.visible .entry kernel(.param .u64 own_param, .param .u64 peer_param) %s
{
  .reg .b64 %%rd<16>;
  .reg .b32 %%r<16>;
  .reg .pred %%p<8>;
  ld.param.u64 %%rd1, [own_param];
  ld.param.u64 %%rd2, [peer_param];
  mov.u32 %%r1, %%tid.x;
  mov.u32 %%r2, %%ctaid.x;
  mov.u32 %%r3, %%ctaid.y;
  mov.u32 %%r15, dynamic;
"""

# Launches `kernel` over two ranks' memory of 4 KiB each, prints what is there then.
RUNNER = """
import ctypes as c, json, os, sys
class Launch(c.Structure):
    _fields_ = [
        ("kernel", c.c_char_p), ("blocks", c.c_uint32), ("ranks", c.c_uint32),
        ("threads", c.c_uint32), ("shared_bytes", c.c_int64), ("args", c.POINTER(c.c_void_p)),
        ("first_rank", c.c_int32), ("together", c.c_int32), ("beside", c.c_int32),
    ]
shape = json.loads(sys.argv[1])
machine = c.CDLL(os.environ["UEC_PTX_MACHINE"])
machine.ptx_begin.restype = c.c_void_p
raw = [c.create_string_buffer(4096 + 128) for _ in range(2)]
at = [(c.addressof(r) + 127) // 128 * 128 for r in raw]
for rank in range(2):
    machine.ptx_memory(c.c_void_p(at[rank]), c.c_int64(4096), rank)
machine.ptx_symmetric((c.c_void_p * 2)(*at), 2, c.c_int64(4096))
values = [c.c_uint64(a) for a in at]
args = (c.c_void_p * 2)(*(c.addressof(v) for v in values))
launch = Launch(b"kernel", shape["blocks"], shape["ranks"], shape["threads"], 2048, args, 0, 1)
grid = machine.ptx_begin(c.byref(launch))
while not machine.ptx_advance(c.c_void_p(grid)):
    pass
words = [(c.c_uint32 * 1024).from_address(a) for a in at]
print(json.dumps([{i: w for i, w in enumerate(of) if w} for of in words]), flush=True)
c.CDLL(None).exit(0)
"""


@dataclass(frozen=True)
class Small:
    """A kernel's body, and how it is launched."""

    body: str
    blocks: int = 1
    ranks: int = 1
    threads: int = 32
    cluster: int = 1

    @property
    def text(self) -> str:
        directives = f".reqnctapercluster {self.cluster}" if self.cluster > 1 else ""
        return HEAD % directives + self.body + "\n  ret;\n}\n"

    def run(self, machine: PtxMachine, folder: Path, seed: int = 1, **environment: str) -> Outcome:
        kernels = folder / "small.ptx"
        kernels.write_text(self.text)
        shape = {"blocks": self.blocks, "ranks": self.ranks, "threads": self.threads}
        command = [sys.executable, "-S", "-E", "-c", RUNNER, json.dumps(shape)]
        return machine.run(command, kernels, seed=seed, **environment)


def memory(outcome: Outcome) -> list[dict[int, int]]:
    """Return the 32-bit words of both ranks' memory that are not zero after a run, by index."""
    ranks = json.loads(outcome.text.splitlines()[0])
    return [{int(at): word for at, word in words.items()} for words in ranks]
