"""The stages: what runs on a GPU, in which order, and how long it takes there."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hour.running import Command, Stage, write_whole

ROOT = Path(__file__).resolve().parents[2]
PROBES = str(ROOT / "tools" / "gpu_probes" / "probes.py")
sys.path.insert(0, str(ROOT / "tools" / "gpu_probes"))
import probes  # noqa: E402

CLOCK = ROOT / "tests" / "ptx" / "clock_a.env"
PYTHON = [sys.executable]
# What goes into a run of a borrowed machine: stages whose times leave each of them a reserve.
CALLS = {
    "a": ["build", "doctor", "primitives", "replicate"],
    "b": ["build", "reduce", "plan", "graphs", "layers"],
    "c": ["build", "costs", "bandwidth", "faults"],
    "d": ["build", "nvshmem", "torch", "sanitizer"],
    "e": ["build", "links"],  # of several GPUs
}
BLOCKS = (8, 16, 24, 32, 64)
UNOPTIMISED = "-O0"
SANITIZERS = {"memcheck": 35.0, "synccheck": 35.0, "racecheck": 130.0}  # seconds of their tests


def find(program: str, *roots: str) -> str | None:
    """Return a program of this environment, of PATH, or of the roots."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    folders += [folder for root in roots if root for folder in (root, f"{root}/bin")]
    return shutil.which(program, path=os.pathsep.join(folders))


def cuda_program(name: str) -> str | None:
    """Return a program of CUDA's toolkit."""
    home = "/usr/local/cuda"
    return find(name, os.environ.get("CUDA_HOME", ""), home, f"{home}/{name}")


class Plan:
    """The stages for a GPU or, as far as they go, for a machine without.

    Attributes:
        package: folder of the library as built here; first on PYTHONPATH.
        wheels: folder of the carried packages that the machine lacks; second there.
        empty: folder in which commands run, so that none imports the checkout's Python files.
    """

    def __init__(
        self, out: Path, build: Path, *, arch: int = 90, num_gpus: int = 1, rehearsal: bool = False
    ) -> None:
        self._out, self._build, self._arch = out, build, arch
        self._num_gpus = max(n for n in (1, 2, 4, 8) if n <= max(1, num_gpus))
        self._rehearsal = rehearsal
        self.package, self.wheels = build / "python", build / "wheels"
        self.empty = build / "empty"
        self._nvcc = cuda_program("nvcc")
        self._cmake, self._ninja = find("cmake"), find("ninja")
        self._lacks = "" if self._nvcc else "no nvcc: it comes with CUDA's toolkit"
        self._kernels = str(build / ("probes.ptx" if rehearsal else "probes.cubin"))

    def env(self) -> dict[str, str]:
        """Return the environment of all commands."""
        first = [str(self.package), str(self.wheels)]
        kept = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        return {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join([*first, *kept])}

    def stages(self) -> dict[str, Stage]:
        """Return the stages in order."""
        tests, bench = self._pytest, self._bench
        nvshmem, gpus = self._needs_nvshmem(), ("-k", self._on_gpus())
        return {
            "build": Stage("the Python module and the cubins", self._builds(), of_machine=True),
            "doctor": Stage("what is here and what lacks", [self._doctor()], of_machine=True),
            "primitives": Stage(
                "each function of ptx.cuh alone, a process for each",
                [*self._compile(), *map(self._probe, probes.CHECKS)],
            ),
            "replicate": Stage(
                "every mode, every byte",
                [
                    *tests("test_gpu_replicate.py", "--exhaustive", seconds=35),
                    *tests("test_gpu_banks.py", "--exhaustive", seconds=20),
                    bench("replicate", "--check", seconds=20),
                ],
            ),
            "reduce": Stage(
                "sums of gradients, bit by bit",
                [
                    *tests("test_gpu_reduce.py", "--exhaustive", seconds=90),
                    bench("replicate", "--op", "reduce", "--check", name="reduce", seconds=30),
                ],
            ),
            "plan": Stage(
                "load, plan and reroute on the device",
                [
                    *tests("test_gpu_loads.py", seconds=15),
                    *tests("test_gpu_stages.py", seconds=30),
                ],
            ),
            "graphs": Stage(
                "replays of graphs, and saved plans",
                [
                    *tests("test_gpu_graphs.py", seconds=65, on_cpu=True),
                    *tests("test_gpu_plan_store.py", seconds=15),
                    *tests("test_gpu_saved_plans.py", seconds=15),
                ],
            ),
            "layers": Stage(
                "operators and compiled layers",
                [
                    *tests("test_gpu_ops.py", seconds=30),
                    *tests("test_gpu_views.py", seconds=8),
                ],
            ),
            "costs": Stage(
                "the constants of tests/ptx/clock_a.env, measured",
                [*self._compile(), *map(self._probe, (*probes.MEASURES, "launch"))],
                then=self._write_clock,
            ),
            "bandwidth": Stage(
                "transfers beside a copy of the driver's, and the critical path",
                [
                    *self._compile(),
                    *map(self._probe, ("device_copy", "measure_clock", "measure_all_copy")),
                    bench("links", "-b", "64M", seconds=20),
                    bench("calibrate", seconds=20),
                    bench("replicate", "-b", "64M", name="large", seconds=25),
                    self._kernel_times(),
                    self._plan_speed(),
                    self._critical_path(),
                ],
            ),
            "faults": Stage(
                "broken calls end, and name the rank",
                tests("test_gpu_faults.py", seconds=20, on_cpu=True),
            ),
            "nvshmem": Stage(
                "ranks as processes over NVSHMEM",
                [
                    nvshmem,
                    *([] if nvshmem.why else tests("test_gpu_nvshmem.py", *gpus, seconds=40)),
                ],
            ),
            "torch": Stage(
                "ranks as processes over torch's symmetric memory",
                tests("test_gpu_torch.py", *gpus, seconds=60),
            ),
            "sanitizer": Stage("compute-sanitizer, the smallest cases first", self._sanitizer()),
            "links": Stage("each link, and many senders to one receiver", self._links()),
        }

    def _on_gpus(self) -> str:
        """Return which tests of ranks as processes there are: those with a GPU for each rank."""
        return "not gpus" if self._num_gpus < 2 else f"{self._num_gpus}gpus"

    # ---- the build

    def _builds(self) -> list[Command]:
        """Return pip's build, by way of scikit-build-core, and CMake's own, if that fails.

        A rehearsal tries both, CMake's first, and optimises nothing: half the time on a busy
        machine. Neither changes the environment of Python.
        """
        by_pip, by_cmake = self._build_by_pip(), self._build_by_cmake()
        if self._rehearsal:
            clear = Command([str(self._cmake), "-E", "rm", "-r", str(self.package)])
            return [*by_cmake, self._load(), clear, by_pip, self._load()]
        return [replace(by_pip, otherwise=tuple(by_cmake)), self._load()]

    def _build_by_pip(self) -> Command:
        install = ["-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps"]
        install += ["--upgrade", "--target", str(self.package)]
        install += ["-C", f"build-dir={self._build / 'pip'}"]
        install += ["-C", f"cmake.define.ULTRAEP_CUDA_ARCHS={self._arch}"]
        if self._rehearsal:
            install += ["-C", f"cmake.define.CMAKE_CXX_FLAGS_RELEASE={UNOPTIMISED}"]
        env = {"ULTRAEP_CUDA": "AUTO" if self._rehearsal else "ON"}
        return Command([*PYTHON, *install, str(ROOT)], seconds=60, env=env)

    def _build_by_cmake(self) -> list[Command]:
        cmake = self._cmake
        if cmake is None:
            return [Command([], why="no cmake")]
        settings = {
            "CMAKE_BUILD_TYPE": "Release",
            "ULTRAEP_BUILD_PYTHON": "ON",
            "ULTRAEP_BUILD_TESTS": "OFF",
            "ULTRAEP_CUDA": "AUTO" if self._rehearsal else "ON",
            "ULTRAEP_CUDA_ARCHS": str(self._arch),
            "Python_EXECUTABLE": sys.executable,
        }
        if self._rehearsal:
            settings["CMAKE_CXX_FLAGS_RELEASE"] = UNOPTIMISED
        if self._ninja:
            settings |= {"CMAKE_GENERATOR": "Ninja", "CMAKE_MAKE_PROGRAM": self._ninja}
        folder, source = str(self._build / "cmake"), str(ROOT)
        defined = [f"-D{name}={value}" for name, value in settings.items()]
        copied = [str(place / "ultraep_comm") for place in (ROOT, self.package)]
        to = ["--prefix", str(self.package)]
        return [
            Command([cmake, "-E", "copy_directory", *copied], seconds=1),
            Command([cmake, "-S", source, "-B", folder, *defined], seconds=5),
            Command([cmake, "--build", folder, "--parallel", str(os.cpu_count())], seconds=50),
            Command([cmake, "--install", folder, "--component", "python", *to], seconds=2),
        ]

    def _load(self) -> Command:
        """Return what loads each kernel of what was built."""
        script = str(ROOT / "tools" / "hour" / "load_kernels.py")
        stand_in = ["--stand-in"] if self._rehearsal else []
        return Command([*PYTHON, script, str(self.package), *stand_in], seconds=10)

    def _doctor(self) -> Command:
        required = [] if self._rehearsal else ["--require", "cuda"]
        return Command([*PYTHON, "-m", "ultraep_comm.doctor", "--json", *required], seconds=20)

    # ---- probes

    def _compile(self) -> list[Command]:
        if self._lacks:
            return [Command([], why=self._lacks, needs_gpu=self._rehearsal)]
        form = ["-ptx", "-lineinfo"] if self._rehearsal else ["-cubin"]
        flags = [f"-arch=sm_{self._arch}", "-std=c++20", "-O3", "-I", str(ROOT / "src")]
        source = str(ROOT / "tools" / "gpu_probes" / "probes.cu")
        words = [str(self._nvcc), *form, *flags, "-o", self._kernels, source]
        compiled = [Command(words, seconds=15)]
        if self._rehearsal:
            make, folder = f"-DCMAKE_MAKE_PROGRAM={self._ninja}", str(self._build / "cpu")
            preset = [str(self._cmake), "-S", str(ROOT), "-B", folder, "--preset", "cpu", make]
            compiled += [Command(preset), Command([str(self._ninja), "-C", folder, "ptx_machine"])]
        return compiled

    def _probe(self, name: str, tool: tuple[str, ...] = ()) -> Command:
        program = [*tool, *PYTHON, PROBES]
        if self._lacks:
            return Command([], why=self._lacks, needs_gpu=self._rehearsal)
        if not self._rehearsal:
            return Command([*program, self._kernels, name], seconds=4 if tool else 1.5)
        if name in probes.HOST_ONLY:
            return Command([], why=f"{name}: needs a GPU", needs_gpu=True)
        timed = {"UEC_PTX_COSTS": str(CLOCK)} if name in probes.MEASURES else {}
        machine = ["--machine", str(self._build / "cpu/tests/ptx/libptx_machine.so")]
        env = {"UEC_PTX": self._kernels, **timed}
        return Command([*program, *machine, self._kernels, name], env=env)

    # ---- tests

    def _pytest(
        self, file: str, *options: str, seconds: float, on_cpu: bool = False
    ) -> list[Command]:
        """Return the tests of a file: on a GPU or, in a rehearsal, which ones there would be.

        With `on_cpu` a rehearsal also runs the same tests on the emulated device: some, as all of
        them are in the tiers.
        """
        words = [*PYTHON, "-m", "pytest", "--tb=short", str(ROOT / "tests/device" / file)]
        xml = self._out / ("_".join(re.findall(r"\w+", " ".join([file[:-3], *options]))) + ".xml")
        if not self._rehearsal:
            env = {"ULTRAEP_REQUIRE_GPU": "1"}
            words += ["-v", "-m", "gpu", *options, "--timeout", "200", "--junit-xml", str(xml)]
            return [Command(words, seconds=seconds, env=env, xml=xml)]
        # Status 5, nothing collected, is a failure: a test was renamed.
        collected = Command([*words, "-q", "-m", "gpu", *options, "--collect-only"])
        run = Command([*words, "-q", "-m", "not gpu", "--junit-xml", str(xml)], xml=xml)
        return [collected, run] if on_cpu else [collected]

    def _sanitizer(self) -> list[Command]:
        file = "test_gpu_sanitizer.py"
        program = cuda_program("compute-sanitizer")
        if program is None and not self._rehearsal:
            return [Command([], why="no compute-sanitizer: it comes with CUDA's toolkit")]
        small: list[Command] = []
        if not self._rehearsal:
            small = self._compile()
            for name in ("check_mbarrier_phases", "check_relay"):
                for tool in SANITIZERS:
                    options = (str(program), "--tool", tool, "--error-exitcode", "86")
                    small.append(self._probe(name, options))
        tests = [
            self._pytest(file, "-k", tool, seconds=seconds) for tool, seconds in SANITIZERS.items()
        ]
        return [*small, *(command for commands in tests for command in commands)]

    # ---- benchmarks

    def _words(self, command: str, *options: str, file: str) -> list[str]:
        output = "--output" if command == "calibrate" else "--json"
        path = str(self._out / f"bench_{file}.json")
        return [*PYTHON, "-m", "ultraep_comm.bench", command, *options, output, path]

    def _bench(self, command: str, *options: str, name: str = "", seconds: float) -> Command:
        words = self._words(command, "--ranks", "4", *options, file=name or command)
        if self._rehearsal:
            # Calibrated are times, which have to make sense on a busy machine, too.
            size = "4M" if command == "calibrate" else "64K"
            return Command([*words, "-b", size, "--engine", "host"])
        return Command([*words, "--engine", "cuda", "--fabric", "loopback"], seconds=seconds)

    def _plan_speed(self) -> Command:
        few = ["--seeds", "1", "--workload", "zipf1.0", "--tokens", "8192", "--sizes"]
        sizes = "8/32/1" if self._rehearsal else "8/128/2,64/256/2"
        words = self._words("plan", *few, sizes, file="plan")
        engine = [] if self._rehearsal else ["--engine", "cuda"]
        return Command([*words, *engine], seconds=25)

    def _kernel_times(self) -> Command:
        if self._rehearsal:
            return Command([], why="kernel_times: needs a GPU", needs_gpu=True)
        script = str(ROOT / "bench" / "speed" / "kernel_times.py")
        file = str(self._out / "kernel_times.json")
        return Command([*PYTHON, script, "--json", file], seconds=30)

    def _critical_path(self) -> Command:
        if self._rehearsal:
            return Command([], why="critical-path: needs a GPU", needs_gpu=True)
        options = ["--ranks", "8", "--experts", "64", "--check"]
        return Command(self._words("critical-path", *options, file="path"), seconds=60)

    def _links(self) -> list[Command]:
        """Return the links of several GPUs, with few and with many blocks."""
        if self._num_gpus < 2 and not self._rehearsal:
            return [Command([], why="1 GPU here, at least 2 needed", needs_gpu=True)]
        patterns = {"links": ["--one-at-a-time"], "incast": ["--pattern", "incast"]}
        if self._num_gpus > 2 or self._rehearsal:
            patterns |= {name: ["--pattern", name] for name in ("ring", "ring-beside-incast")}
        engine = ["--engine", "host", "-b", "64K", "-n", "2"]
        num_ranks, blocks = 4, BLOCKS[:1]
        if not self._rehearsal:
            engine = ["--engine", "cuda", "-b", "32M", "-n", "5", "-w", "1"]
            num_ranks, blocks = self._num_gpus, BLOCKS
        return [
            Command(
                self._words(
                    *(
                        "links",
                        "--ranks",
                        str(num_ranks),
                        *engine,
                        "--num-workers",
                        str(n),
                        *options,
                    ),
                    file=f"{name}_{n}",
                ),
                seconds=17,
            )
            for name, options in patterns.items()
            for n in blocks
        ]

    # ---- what a stage needs, and what comes of it

    def _needs_nvshmem(self) -> Command:
        """Return what says how NVSHMEM is reached; without words where it is not."""
        path = [str(self.wheels), *([] if self._rehearsal else sys.path)]
        importlib.invalidate_caches()  # it may just have been unpacked
        if importlib.machinery.PathFinder.find_spec("nvshmem", path) is None:
            why = "no nvshmem4py: bring its wheel in .whl/, as in docs/developing.md"
            return Command([], why=why, needs_gpu=self._rehearsal)
        code = "import nvshmem; print('nvshmem4py from', *nvshmem.__path__)"
        return Command([*PYTHON, "-c", code], seconds=2)

    def _write_clock(self, out: Path, lines: list[dict[str, Any]]) -> None:
        found = probes.clock(lines)
        where = " on the machine in software" if self._rehearsal else ""
        text = f"# Measured by tools/gpu_hour{where}.\n"
        for line in CLOCK.read_text().splitlines():
            name, equals, rest = line.partition("=")
            if equals and not line.startswith("#"):
                value = max(1, round(found[name])) if name in found else rest.split()[0]
                text += f"{name}={value}" + ("" if name in found else "  # not measured") + "\n"
        write_whole(out / "clock_measured.env", text)
