"""Lay out wheels of saccade-cpu as a repository of Hugging Face's kernel hub: python native/kernel_hub.py WHEEL...

Writes ``build/<variant>/`` with the package and its metadata.json for each wheel. `kernels.get_kernel` selects one by
torch's stable ABI, the processor and the operating system. kernel-builder is not used: its build.toml has one list of
flags for all processors, and the levels of saccade-cpu differ between them.
"""

import argparse
import hashlib
import json
import re
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

PROJECT = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text("utf-8"))["project"]
PLATFORM = re.compile(r"(manylinux|linux|macosx)\w*?_(x86_64|aarch64|arm64)$")
FILES = ("__init__.py", "saccade_cpu.so")


def variant_of(wheel: Path) -> str:
    """Return the hub's name of the build in a wheel, such as ``torch-stable-abi211-cpu-x86_64-linux``."""
    # A repaired wheel may have several platform tags, which differ in the version of the C library alone.
    found = PLATFORM.match(wheel.stem.rpartition("-")[2].partition(".")[0])
    if wheel.suffix != ".whl" or not wheel.name.startswith("saccade_cpu-") or found is None:
        raise SystemExit(f"kernel_hub: not a wheel of saccade-cpu for Linux or macOS: {wheel.name}")
    (oldest,) = (need.removeprefix("torch>=") for need in PROJECT["dependencies"] if need.startswith("torch>="))
    system = "darwin" if found[1] == "macosx" else "linux"
    return f"torch-stable-abi{oldest.replace('.', '')}-cpu-{found[2].replace('arm64', 'aarch64')}-{system}"


def write(wheel: Path, repository: Path) -> Path:
    """Write the build that a wheel holds into the repository, and return its folder."""
    folder = repository / "build" / variant_of(wheel)
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            (folder / name).write_bytes(archive.read(f"saccade_cpu/{name}"))
    digest = hashlib.sha256((folder / "saccade_cpu.so").read_bytes()).hexdigest()
    metadata = {
        "id": f"_saccade_cpu_{digest[:12]}",  # the name of the module; it differs between builds
        "name": PROJECT["name"],
        "version": 1,
        "license": PROJECT["license"],
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the builds of all wheels that are named."""
    parser = argparse.ArgumentParser(prog="kernel_hub.py", description="Lay out wheels as a kernel hub repository.")
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument("--out", type=Path, default=Path("kernel-hub"), help="folder of the repository")
    options = parser.parse_args(arguments)
    for wheel in options.wheels:
        print(write(wheel, options.out))


if __name__ == "__main__":
    main()
