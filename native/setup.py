"""Compile one library for every Python: it uses only the stable C interface of torch."""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
FLAGS = "-std=c++20 -O3 -ffp-contract=fast -fPIC -fvisibility=hidden -Wall -Wno-psabi".split()
if os.environ.get("SACCADE_CPU_SANITIZE"):  # for tests: stop at the first access out of bounds or undefined behaviour
    FLAGS += "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined".split()
if os.environ.get("SACCADE_CPU_EMULATE_TILES"):  # for tests on processors without AMX
    FLAGS.append("-DEMULATED_TILES")
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mprefer-vector-width=512".split()
BF16 = [*AVX512, "-mavx512bf16"]
AMX = [*BF16, "-mamx-tile", "-mamx-bf16"]
X86 = {"plain": [], "avx2": ["-mavx2", "-mfma"], "avx512": AVX512, "avx512_bf16": BF16, "amx": AMX}
ARM = {"neon": [], "neon_bf16": ["-march=armv8.2-a+bf16"]}
"""The levels of each architecture with their flags, from the lowest on; src/cpu_dispatch.cpp chooses among them."""


class Compiler:
    """The C++ compiler that CXX names, and the levels that it can compile."""

    def __init__(self):
        self.command = shlex.split(os.environ.get("CXX") or ("c++" if sys.platform == "darwin" else "g++"))
        name = Path(self.command[0]).stem
        if sys.platform == "win32" or name in ("cl", "clang-cl"):
            raise SystemExit("saccade-cpu: Windows is not supported; the kernels need g++ or clang++ on Linux or macOS")
        target, said = self._output("-dumpmachine"), shlex.join(self.command)
        if target is None:
            raise SystemExit(f"saccade-cpu: no working C++ compiler {said}; install g++ or clang++, or name one as CXX")
        if not self._accepts(["-std=c++20"]):
            raise SystemExit(f"saccade-cpu: {said} does not know C++20, as g++ 11 and clang++ 15 do")
        is_gcc = "Free Software Foundation" in (self._output("--version") or "")
        self.flags = [*FLAGS, *(["-Wno-uninitialized", "-Wno-maybe-uninitialized"] if is_gcc else [])]
        machine = target.split("-")[0]
        known = X86 if machine == "x86_64" else ARM if machine in ("aarch64", "arm64") else {"plain": []}
        self.levels = {}
        for level, flags in known.items():
            if not self._accepts(flags):
                break  # a level is only used if those below it are, so the ones above it are left out too
            self.levels[level] = flags

    def _output(self, option):
        try:
            run = subprocess.run([*self.command, option], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return run.stdout if run.returncode == 0 and run.stdout else None

    def _accepts(self, flags):
        command = [*self.command, *flags, "-x", "c++", "-", "-c", "-o", os.devnull]
        return subprocess.run(command, input="int i;", capture_output=True, text=True, check=False).returncode == 0

    def link(self, target, units, options):
        """Compile (source, flags) pairs side by side and link them."""
        with tempfile.TemporaryDirectory() as folder:
            objects = [str(Path(folder) / f"{number}.o") for number in range(len(units))]
            running = [
                subprocess.Popen([*self.command, *self.flags, *flags, "-c", str(HERE / source), "-o", made])
                for (source, flags), made in zip(units, objects, strict=True)
            ]
            if any([each.wait() for each in running]):
                raise SystemExit(f"saccade-cpu: {shlex.join(self.command)} failed to compile the kernels")
            target.parent.mkdir(parents=True, exist_ok=True)
            command = [*self.command, *self.flags, *objects, *options, "-o", str(target)]
            if subprocess.run(command, check=False).returncode:
                raise SystemExit(f"saccade-cpu: {shlex.join(self.command)} failed to link the kernels")

    def kernels(self):
        """Return the units of the kernels: one for each level, and the choice among them."""
        names = " ".join(f"X({level})" for level in self.levels)
        units = [("src/kernels.cpp", [*flags, f"-DLEVEL={level}"]) for level, flags in self.levels.items()]
        return [*units, ("src/cpu_dispatch.cpp", [f"-DLEVELS(X)={names}"])]


def build(folder: Path) -> None:
    """Compile the library into a folder."""
    import torch  # needed for a build alone

    root, compiler = Path(torch.__file__).parent, Compiler()
    stable = ["-DTORCH_TARGET_VERSION=0x020b000000000000", f"-I{root / 'include'}"]
    options = ["-shared", f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu"]
    if sys.platform == "darwin":
        options.append("-Wl,-rpath,@loader_path/../torch/lib")
    compiler.link(folder / "saccade_cpu.so", [*compiler.kernels(), ("src/operations.cpp", stable)], options)


def build_check(target: Path, *options: str) -> None:
    """Compile tests/check_kernels.cpp, a program that needs no torch and so runs in an emulator."""
    compiler = Compiler()
    compiler.link(target, [*compiler.kernels(), ("tests/check_kernels.cpp", [f"-I{HERE / 'src'}"])], [*options])


class Build(build_py):
    """Build the Python files, and the library beside them."""

    def run(self):
        super().run()
        build((HERE if self.editable_mode else Path(self.build_lib)) / "saccade_cpu")


class Wheel(bdist_wheel):
    """One wheel for every Python of a platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class Platform(Distribution):
    """A distribution for one platform, though it has no extension module."""

    def has_ext_modules(self):
        return True


if __name__ == "__main__":
    setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Platform)
