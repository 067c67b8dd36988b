"""The import name of the package belongs to one distribution."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import saccade
from saccade.support.distribution_conflict import check_only_distribution


@pytest.mark.parametrize("names", [[], ["saccade_attention-0.1.0.dist-info", "saccade_cpu-0.1.0.dist-info"]])
def test_our_own_distributions_are_accepted(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    check_only_distribution(tmp_path / "saccade")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_another_distribution_of_the_import_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "saccade-0.1.0.dist-info").mkdir()
    with pytest.raises(
        ImportError, match=r"one distribution; got saccade-attention and saccade 0\.1\.0, in (.|\n)*uninstall"
    ):
        check_only_distribution(tmp_path / "saccade")


@pytest.mark.ci
def test_the_import_is_refused_beside_another_distribution(tmp_path: Path) -> None:
    shutil.copytree(Path(saccade.__file__).parent, tmp_path / "saccade")
    (tmp_path / "saccade-0.1.0.dist-info").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "import saccade"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "ImportError: saccade: the import name must belong to one distribution" in done.stderr
