"""Tests of the files of a release: the wheel is complete, and wheel and source archive run outside of the checkout."""

import base64
import csv
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
VERSION = PROJECT["version"]
ABOUT = f"saccade_attention-{VERSION}.dist-info"
MOST_BYTES = 8 << 20  # of the wheel: two small models and a font make up most of it

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="looks for programs where Linux and macOS put them"),
]


@pytest.fixture(scope="module")
def archive(built):
    with zipfile.ZipFile(built.wheel) as archive:
        yield archive


def test_it_holds_the_package_and_nothing_else(archive, built):
    source = ROOT / "src"
    tracked = subprocess.run(["git", "ls-files", "-z", "src"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = tracked.stdout.split("\0")[:-1] if tracked.returncode == 0 else []
    paths = [ROOT / name for name in names] or [path for path in source.rglob("*") if path.is_file()]
    expected = {path.relative_to(source).as_posix() for path in paths if path.is_file() and path.suffix != ".pyc"}
    held = {name for name in archive.namelist() if not name.startswith(ABOUT)}
    assert held == expected
    assert {"saccade/py.typed", "saccade_pytest.py", "saccade/models/data/small_decoder/model.safetensors"} <= held
    assert built.wheel.stat().st_size < MOST_BYTES
    assert built.wheel.name.endswith("-py3-none-any.whl")


def test_its_record_is_true(archive):
    rows = list(csv.reader(archive.read(f"{ABOUT}/RECORD").decode().splitlines()))
    assert {row[0] for row in rows} == set(archive.namelist())
    for name, told, size in rows:
        if name == f"{ABOUT}/RECORD":
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
        assert (told, size) == (f"sha256={digest}", str(archive.getinfo(name).file_size))


def test_its_metadata_is_that_of_the_project(archive):
    about = Parser().parsestr(archive.read(f"{ABOUT}/METADATA").decode())
    assert (about["Name"], about["Version"]) == ("saccade-attention", VERSION)
    assert about["Requires-Python"] == PROJECT["requires-python"]
    assert about["License-Expression"] == PROJECT["license"]
    assert about.get_all("License-File") == PROJECT["license-files"]
    assert set(about.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    needed = [line for line in about.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(needed) == sorted(PROJECT["dependencies"])
    assert about["Description-Content-Type"] == "text/markdown"
    for path in PROJECT["license-files"]:
        assert archive.read(f"{ABOUT}/licenses/{path}") == (ROOT / path).read_bytes()


def test_versions_agree():
    init = (ROOT / "src/saccade/__init__.py").read_text("utf-8")
    assert f'__version__ = "{VERSION}"' in init
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == VERSION
    assert re.findall(r"^  - ((?:Apache|OFL).+)$", citation, re.MULTILINE) == PROJECT["license"].split(" AND ")
    native = tomllib.loads((ROOT / "native/pyproject.toml").read_text("utf-8"))["project"]
    assert native["requires-python"] == PROJECT["requires-python"]


def test_the_package_runs_outside_of_the_checkout(installed):
    code = (
        "import saccade, torch; x = torch.ones(1, 2, 9, 4); print(saccade.__file__, saccade.attention(x, x, x).shape)"
    )
    said = installed.run("python", "-c", code)
    assert said.startswith(str(installed.folder))
    assert said.endswith("torch.Size([1, 2, 9, 4])\n")


def test_the_command_runs(installed):
    assert "Usage: saccade" in installed.run("saccade", "--help")
    assert installed.run("saccade", "--version") == f"saccade {VERSION}\n"
    assert len(installed.run("saccade", "verify", "--list").splitlines()) > 90
    installed.run("saccade", "look", "--model", "small-decoder", "The cat sat on the mat.")
    assert sorted(path.suffix for path in (installed.empty / "out/look").iterdir()) == [".png", ".png"]


def test_pytest_finds_the_plugin(installed):
    said = installed.run("python", "-m", "pytest", "--help")
    assert "--saccade-audit" in said


def test_tests_of_the_source_archive_are_collected(built, installed, tmp_path):
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    for name in ("Makefile", "constraints.txt", "CONTRIBUTING.md", "CITATION.cff", "native/setup.py", "LICENSE"):
        assert (folder / name).is_file()
    said = installed.run("python", "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", cwd=folder)
    assert int(re.search(r"(\d+)(?:/\d+)? tests collected", said)[1]) > 10_000


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_compiled_kernel_builds_from_its_source_archive(built, environment, tmp_path):
    shutil.copytree(ROOT / "native", tmp_path / "native", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "build"))
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), tmp_path / "native"]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("saccade_cpu-*.tar.gz")
    both = environment(built.wheel, archive)
    code = (
        "import torch, saccade, saccade_cpu; x = torch.randn(1, 2, 300, 16); print(saccade_cpu.__file__)\n"
        "same = [saccade.attention(x, x, x, saccade.masks.Causal(), impl=impl) for impl in ('native', 'reference')]\n"
        "torch.testing.assert_close(*same)"
    )
    assert both.run("python", "-c", code).startswith(str(both.folder))
