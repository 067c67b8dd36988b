"""The wheel and the source archive, built once, and an environment with nothing of saccade but the wheel."""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]


class Built(NamedTuple):
    """The files that a release uploads."""

    wheel: Path
    sdist: Path


class Installed(NamedTuple):
    """An environment, and an empty folder to run it in."""

    folder: Path
    empty: Path

    def run(self, *command: str | Path, cwd: Path | None = None) -> str:
        """Return the output of a program of the environment; its errors fail the test."""
        program = [self.folder / "bin" / command[0], *command[1:]]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            program, cwd=cwd or self.empty, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build with the tools of this environment; nothing is fetched."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Installed]:
    """Return a function that makes an environment with packages; the rest is from this one, without its .pth files."""

    def made(*archives: Path) -> Installed:
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, symlinks=True)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        (own / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        python = str(folder / "bin" / "python")
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
        install += ["--ignore-installed", "--no-build-isolation", *map(str, archives)]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return Installed(folder, tmp_path_factory.mktemp("empty"))

    return made


@pytest.fixture(scope="session")
def installed(built: Built, environment: Callable[..., Installed]) -> Installed:
    """Return an environment with the wheel."""
    return environment(built.wheel)
