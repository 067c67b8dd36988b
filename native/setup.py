"""Compiles one library for every Python: it needs of torch only its stable C interface."""

import os
import subprocess
import tempfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -Wall -Wno-uninitialized -Wno-maybe-uninitialized -Wno-psabi".split()
if os.environ.get("SACCADE_CPU_SANITIZE"):  # for tests: stops at the first step out of bounds, and at what is undefined
    FLAGS += "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined".split()
if os.environ.get("SACCADE_CPU_EMULATE_TILES"):  # for tests where the processor has none
    FLAGS.append("-DEMULATED_TILES")
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mprefer-vector-width=512".split()
BF16 = [*AVX512, "-mavx512bf16"]
AMX = [*BF16, "-mamx-tile", "-mamx-bf16"]
LEVELS = {"plain": [], "avx2": ["-mavx2", "-mfma"], "avx512": AVX512, "avx512_bf16": BF16, "amx": AMX}


def build(folder: Path) -> None:
    """The library, in a folder."""
    import torch  # it is there when this is built, and not before

    root, compiler = Path(torch.__file__).parent, os.environ.get("CXX", "g++")
    stable = ["-DTORCH_TARGET_VERSION=0x020b000000000000", f"-I{root / 'include'}"]
    units = {"operations": ("operations.cpp", stable)}
    units |= {name: ("kernels.cpp", [*flags, f"-DLEVEL={name}"]) for name, flags in LEVELS.items()}
    with tempfile.TemporaryDirectory() as objects:
        made = {name: Path(objects) / f"{name}.o" for name in units}
        running = [
            subprocess.Popen([compiler, *FLAGS, *flags, "-c", str(HERE / "src" / source), "-o", str(made[name])])
            for name, (source, flags) in units.items()
        ]
        if any([each.wait() for each in running]):
            raise SystemExit("saccade-cpu: the compiler refused; it must know C++20, as g++ 11 does")
        libraries = [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu"]
        folder.mkdir(parents=True, exist_ok=True)
        objects_made = map(str, made.values())
        target = folder / "saccade_cpu.so"
        subprocess.run([compiler, *FLAGS, "-shared", *objects_made, *libraries, "-o", str(target)], check=True)


class Build(build_py):
    """Python files, and the library beside them."""

    def run(self):
        super().run()
        build((HERE if self.editable_mode else Path(self.build_lib)) / "saccade_cpu")


class Wheel(bdist_wheel):
    """One wheel for every Python of a platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class Platform(Distribution):
    """Of one platform, though there is no extension module in it."""

    def has_ext_modules(self):
        return True


if __name__ == "__main__":
    setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Platform)
