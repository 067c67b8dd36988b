"""The compiled kernel as other compilers and other processors build it; ARM runs in an emulator."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from saccade.testing import CASES

pytest.importorskip("setuptools.command.bdist_wheel", reason="builds saccade-cpu, which needs setuptools>=77")

ROOT = Path(__file__).parents[3] / "native"
CHECK = (
    "import sys; from pathlib import Path; from setup import build_check; build_check(Path(sys.argv[1]), *sys.argv[2:])"
)
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def _clang() -> str | None:
    """Return clang++, or the newest of Debian's clang++-N."""
    newest = sorted((int(path.name[8:]) for path in Path("/usr/bin").glob("clang++-[0-9]*")), reverse=True)
    return next((name for name in ("clang++", *(f"clang++-{n}" for n in newest)) if shutil.which(name)), None)


def _cross_compiler(name: str) -> str | None:
    """Return a compiler for 64-bit ARM. Clang takes the headers of g++."""
    gcc = "aarch64-linux-gnu-g++"
    if shutil.which(gcc) is None:
        return None
    return gcc if name == "g++" else _clang() and f"{_clang()} --target=aarch64-linux-gnu"


def _setup(code: str, *arguments: str, compiler: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"CXX": compiler}
    command = [sys.executable, "-B", "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def _built(folder: Path, compiler: str, *options: str) -> Path:
    run = _setup(CHECK, str(folder / "check"), *options, compiler=compiler)
    assert run.returncode == 0, run.stderr[-3000:]
    return folder / "check"


def _levels(*command: str | Path) -> list[str]:
    """Run the program, which compares each level with loops in double precision, and return "level, dtype" of each."""
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return [line.partition(":")[0] for line in run.stdout.splitlines()]


def _masks_of_kit(folder: Path) -> tuple[Path, int]:
    """Write the masks of the kit's small cases as the program reads them, each once, and return how many there are."""
    masks = {}
    for case in CASES:
        if case.q_len and case.kv_len:
            sizes = case.batch, case.num_heads, case.num_kv_heads, case.q_len, case.kv_len
            masks[np.array(sizes, dtype="<i8").tobytes() + case.allowed.numpy().tobytes()] = None
    (folder / "masks").write_bytes(b"".join(masks))
    return folder / "masks", len(masks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["g++", "clang++"])
def test_arm_levels_are_exact(name: str, tmp_path: Path) -> None:
    compiler = _cross_compiler(name)
    if compiler is None or EMULATOR is None:
        pytest.skip(f"needs {name} for aarch64 and its emulator: apt install g++-aarch64-linux-gnu clang qemu-user")
    check, (masks, count) = _built(tmp_path, compiler, "-static"), _masks_of_kit(tmp_path)
    levels = ["neon, float32", "neon_bf16, float32", "neon_bf16, bfloat16"]
    assert count > 60
    assert _levels(EMULATOR, check, tmp_path / "results", masks) == levels
    assert _levels(EMULATOR, "-cpu", "cortex-a57", check) == ["neon, float32"]  # which has no bfloat16


@pytest.mark.slow
def test_gcc_and_clang_give_equal_results(tmp_path: Path) -> None:
    clang = _clang()
    if shutil.which("g++") is None or clang is None:
        pytest.skip("needs g++ and clang++")
    results, levels = [], []
    for compiler in ("g++", clang):
        folder = tmp_path / Path(compiler).name
        levels.append(_levels(_built(folder, compiler), folder / "results"))
        results.append(np.fromfile(folder / "results"))
    assert levels[0] == levels[1]
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=1e-6)  # entries of up to 16


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("nm") is None, reason="needs g++ and nm")
def test_no_level_shares_code_with_another(tmp_path: Path) -> None:
    """The linker keeps one copy of a weak symbol, which may be the one with instructions that a processor lacks."""
    code = """
import subprocess, sys
from setup import Compiler
compiler = Compiler()
for number, (source, flags) in enumerate(compiler.kernels()):
    target = f"{sys.argv[1]}/{number}.o"
    subprocess.run([*compiler.command, *compiler.flags, *flags, "-c", source, "-o", target], check=True)
"""
    run = _setup(code, str(tmp_path), compiler="g++")
    assert run.returncode == 0, run.stderr
    objects = sorted(tmp_path.glob("*.o"))
    shared = [
        {line.split()[-1] for line in subprocess.check_output(["nm", path], text=True).splitlines() if " W " in line}
        for path in objects
    ]
    assert len(objects) > 2
    assert not [(one & other) for n, one in enumerate(shared) for other in shared[:n] if one & other]


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("false", "no working C++ compiler false; install g++ or clang++, or name one as CXX"),
        ("no-such-compiler", "no working C++ compiler no-such-compiler"),
        ("cl.exe", "Windows is not supported; the kernels need g++ or clang++ on Linux or macOS"),
        ("clang-cl", "Windows is not supported"),
    ],
)
def test_a_compiler_that_cannot_build_is_refused_in_one_line(compiler: str, reason: str) -> None:
    run = _setup("from setup import Compiler; Compiler()", compiler=compiler)
    assert run.returncode == 1
    [line] = run.stderr.splitlines()
    assert line.startswith(f"saccade-cpu: {'Windows is not supported' if sys.platform == 'win32' else reason}")
