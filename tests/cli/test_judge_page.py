"""The commands of the page "Judge your kernel" run, on the three kernels that the page writes."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "en" / "judge.md").read_text(encoding="utf-8")
BLOCKS = {
    language: re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for language in ("python", "py", "sh")
}
COMMANDS = [line for block in BLOCKS["sh"] for line in block.splitlines() if "saccade judge" in line]


def _run(command, folder):
    arguments = re.sub(r"^.*?saccade judge", f"{sys.executable} -m saccade.testing", command.partition("   #")[0])
    interpreted = {"TRITON_INTERPRET": "1"} if "TRITON_INTERPRET" in command else {}
    environment = os.environ | interpreted
    return subprocess.run(
        arguments, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_there_are_commands():
    assert len(COMMANDS) == 4


def _write_first_kernel(folder):
    (block,) = (each for each in BLOCKS["python"] if 'Path("my_kernels.py").write_text' in each)
    exec(compile(block.replace("my_kernels.py", str(folder / "my_kernels.py")), "page", "exec"), {})


@pytest.mark.slow
@pytest.mark.many
def test_the_quick_command_answers_with_two_laws(tmp_path):
    _write_first_kernel(tmp_path)
    done = _run(COMMANDS[0], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("All 2 laws that could be tried hold.\n")


@pytest.mark.ci
def test_the_command_for_all_laws_finds_the_fault_and_writes_its_files(tmp_path):
    _write_first_kernel(tmp_path)
    quick = COMMANDS[1].replace("--minutes 1", "--law empty_rows --case nothing")
    done = _run(quick, tmp_path)
    assert done.returncode == 1, done.stderr
    assert "empty_rows  BROKEN" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} >= {"out.html", "out.xml", "found"}


@pytest.mark.parametrize("kernel", ["as on the page", "off by one"])
def test_the_test_file_passes_and_finds_an_off_by_one(pytester, kernel):
    (block,) = (each for each in BLOCKS["python"] if "def test_" in each)
    pytester.makepyfile(block if kernel == "as on the page" else block.replace("triu(1)", "triu(2)"))
    expected = {"passed": 2} if kernel == "as on the page" else {"passed": 1, "failed": 1}
    pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(**expected)


@pytest.mark.ci
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_kernel_runs_in_the_interpreter(tmp_path):
    (tmp_path / "triton_attention.py").write_text(BLOCKS["py"][0], encoding="utf-8")
    (command,) = (each for each in COMMANDS if "triton" in each)
    done = _run(f"{command} --seed 0", tmp_path)
    assert done.returncode == 1, done.stderr
    assert re.search(r"^oracle +kept", done.stdout, re.MULTILINE)
    assert "with NaN in key 0, a row that sees it is finite" in done.stdout
