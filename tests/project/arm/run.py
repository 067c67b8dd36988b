"""Run Python, torch and the compiled kernel for 64-bit ARM in an emulator.

Arguments are those of Python, such as ``-m pytest tests/laws -k native``; without any, the laws of the compiled
kernel run. The first run fills ``out/arm`` with Debian's Python for arm64, and with torch and its libraries from PyPI
(2.5 GB to download; 8 GB on disk meanwhile, 5 GB afterwards). Each run compiles the kernel again. Remove
``out/arm/site`` after a change of constraints.txt. Needs Debian 12, ``apt install g++-aarch64-linux-gnu
qemu-user-static``, and for the first run the rights of root: it adds arm64 to dpkg's architectures, where it stays.

Emulated code is ten to a hundred times slower, so that this is a proof, not a test for every day.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "out" / "arm"
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
PACKAGES = """
python3.11-minimal python3.11 libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g
libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libexpat1 libuuid1 libncursesw6 libtinfo6 libreadline8 libdb5.3
libnsl2 libtirpc3 libcrypt1
"""
WHEELS = """
attrs filelock fsspec hypothesis iniconfig Jinja2 MarkupSafe mpmath networkx numpy packaging pluggy Pygments pytest
safetensors sortedcontainers sympy tokenizers typing_extensions
"""
# PyPI's torch for ARM is a CUDA build. It does not start without these libraries, though no GPU is used.
CUDA = """
nvidia-cublas<14 nvidia-cuda-cupti<14,>=13 nvidia-cuda-nvrtc<14 nvidia-cuda-runtime<14 nvidia-cudnn-cu13<10
nvidia-cufft<13 nvidia-cufile<2 nvidia-curand<11 nvidia-cusolver<13 nvidia-cusparse<13 nvidia-cusparselt-cu13<1
nvidia-nccl-cu13>2 nvidia-nvjitlink<14 nvidia-nvshmem-cu13<4 nvidia-nvtx<14
"""
PLATFORMS = [*(f"manylinux_2_{minor}_aarch64" for minor in (28, 27, 26, 25, 24, 18, 17)), "manylinux2014_aarch64"]
CPU = """processor\t: {}
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
QUICK = "native and not slow and not gpu and not ci"
LAWS = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/laws", "-m", QUICK]


def main() -> None:
    """Prepare the folder, then run Python in it and exit with its status."""
    if EMULATOR is None or shutil.which("aarch64-linux-gnu-g++") is None or shutil.which("apt-get") is None:
        sys.exit("a program is missing: apt install g++-aarch64-linux-gnu qemu-user-static (Debian 12)")
    for name, step in (("system", unpack_system), ("site", unpack_wheels)):
        folder = FOLDER / name
        if not (folder / "done").exists():
            if folder.exists():
                shutil.rmtree(folder)  # an interrupted run left it
            folder.mkdir(parents=True)
            step(folder)
            (folder / "done").touch()
    build_kernel(FOLDER / "kernel")
    sys.exit(emulated(sys.argv[1:] or LAWS))


def unpack_system(folder: Path) -> None:
    """Unpack Debian's Python for arm64, and describe a processor, which torch reads when it starts."""
    run("dpkg", "--add-architecture", "arm64")
    run("apt-get", "update", "-qq")
    run("apt-get", "download", "-qq", *(f"{name}:arm64" for name in PACKAGES.split()), cwd=folder)
    for package in folder.glob("*.deb"):
        run("dpkg", "-x", package.name, ".", cwd=folder)
    (folder / "proc").mkdir()
    (folder / "proc" / "cpuinfo").write_text(CPU.format(0) + CPU.format(1))
    for number in (0, 1):
        registers = folder / f"sys/devices/system/cpu/cpu{number}/regs/identification"
        registers.mkdir(parents=True)
        (registers / "midr_el1").write_text("0x00000000413fd0c1\n")


def unpack_wheels(folder: Path) -> None:
    """Download the wheels in the versions of constraints.txt (for CUDA the newest below a bound), and unpack them."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    for wanted in ("torch", *WHEELS.split(), *CUDA.split()):
        version = f"=={pinned[wanted]}" if wanted in pinned else ""
        platforms = [f"--platform={name}" for name in PLATFORMS]
        options = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", *platforms]
        run(sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", folder / "wheels", wanted + version)
    for wheel in (folder / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    shutil.rmtree(folder / "wheels")


def build_kernel(folder: Path) -> None:
    """Compile the kernel for ARM, and link it with torch for ARM."""
    code = """
import sys, types
from pathlib import Path
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.__file__ = sys.argv[1]
from setup import build
build(Path(sys.argv[2]))
"""
    env = os.environ | {"CXX": "aarch64-linux-gnu-g++"}
    torch, package = FOLDER / "site" / "torch" / "__init__.py", folder / "saccade_cpu"
    run(sys.executable, "-c", code, torch, package, cwd=ROOT / "native", env=env)
    shutil.copy(ROOT / "native" / "saccade_cpu" / "__init__.py", package)


def emulated(arguments: list[str]) -> int:
    """Run Python for ARM with these arguments and return its status."""
    libraries = {str(path.parent) for path in (FOLDER / "site" / "nvidia").rglob("*.so*")}
    paths = [ROOT / "src", FOLDER / "kernel", FOLDER / "site"]
    env = os.environ | {"QEMU_LD_PREFIX": str(FOLDER / "system"), "PYTHONPATH": os.pathsep.join(map(str, paths))}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}  # empty: byte code is kept, as compiling is slow
    emulator = [str(EMULATOR), "-E", f"LD_LIBRARY_PATH={os.pathsep.join(sorted(libraries))}"]
    program = FOLDER / "system" / "usr" / "bin" / "python3.11"
    return subprocess.run([*emulator, program, *arguments], cwd=ROOT, env=env, check=False).returncode


def run(*command: str | Path, **options: object) -> None:
    """Run a command; its failure ends the program."""
    if subprocess.run([str(part) for part in command], check=False, **options).returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}")


if __name__ == "__main__":
    main()
