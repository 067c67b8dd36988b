"""The layout for Hugging Face's kernel hub: names, metadata, and a build that is loaded as the hub's client does."""

import json
import platform
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.engine.kernels.native_levels import needs_native

NATIVE = Path(__file__).parents[3] / "native"
HUB = runpy.run_path(str(NATIVE / "kernel_hub.py"))


@pytest.mark.parametrize(
    ("tags", "variant"),
    [
        ("manylinux_2_28_x86_64", "torch-stable-abi211-cpu-x86_64-linux"),
        ("manylinux_2_27_aarch64.manylinux_2_28_aarch64", "torch-stable-abi211-cpu-aarch64-linux"),
        ("linux_x86_64", "torch-stable-abi211-cpu-x86_64-linux"),
        ("macosx_11_0_arm64", "torch-stable-abi211-cpu-aarch64-darwin"),
    ],
)
def test_a_wheel_is_named_by_its_platform(tags: str, variant: str) -> None:
    assert HUB["variant_of"](Path(f"dist/saccade_cpu-0.1.0-py3-none-{tags}.whl")) == variant


@pytest.mark.parametrize(
    "name",
    [
        "saccade_cpu-0.1.0-py3-none-win_amd64.whl",
        "saccade_attention-0.1.0-py3-none-any.whl",
        "saccade_cpu-0.1.0.tar.gz",
    ],
)
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"kernel_hub: not a wheel of saccade-cpu for Linux or macOS: {name}"):
        HUB["main"]([name, "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


LOAD = """
import importlib.util, json, sys
from pathlib import Path
import torch
folder = Path(sys.argv[1])
name = json.loads((folder / "metadata.json").read_text("utf-8"))["id"]
spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
module = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import saccade as sc
x = torch.randn(1, 2, 100, 16)
mask = torch.ones(100, 100, dtype=torch.bool).tril()
torch.testing.assert_close(
    sc.attention(x, x, x, sc.masks.Causal(), impl="native"),
    torch.nn.functional.scaled_dot_product_attention(x, x, x, mask),
)
assert sys.modules["saccade_cpu"] is module
print(module.abilities() >= 0)
"""


@pytest.mark.ci
@needs_native
def test_a_build_serves_saccade(tmp_path: Path) -> None:
    import saccade_cpu  # noqa: PLC0415  only where it is installed

    system = "macosx_11_0" if sys.platform == "darwin" else "manylinux_2_28"
    wheel = tmp_path / f"saccade_cpu-0.1.0-py3-none-{system}_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(NATIVE / "saccade_cpu/__init__.py", "saccade_cpu/__init__.py")
        archive.write(Path(saccade_cpu.__file__).with_name("saccade_cpu.so"), "saccade_cpu/saccade_cpu.so")
    folder = HUB["write"](wheel, tmp_path / "hub")
    assert sorted(path.name for path in folder.iterdir()) == ["__init__.py", "metadata.json", "saccade_cpu.so"]
    metadata = json.loads((folder / "metadata.json").read_text("utf-8"))
    assert (metadata["name"], metadata["license"], metadata["backend"]) == (
        "saccade-cpu",
        "Apache-2.0",
        {"type": "cpu"},
    )
    run = subprocess.run([sys.executable, "-c", LOAD, folder], capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.returncode) == ("True", 0), run.stderr
