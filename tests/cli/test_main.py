"""The program as it is installed."""

import builtins
import os
import subprocess
import sys

import pytest

from saccade import cli
from saccade.cli import main

PROGRAM = [sys.executable, "-c", "from saccade.cli import main; main()"]


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_packages_it_says_how_to_get_them(monkeypatch, package):
    for name in [name for name in sys.modules if name.startswith("saccade.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        SystemExit, match=rf"^saccade: the command line needs {package}; pip install 'saccade-attention\[cli\]'$"
    ):
        main()


def test_another_missing_module_is_not_blamed_on_them(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("saccade.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "saccade.cli.look_tables":
            raise ModuleNotFoundError("No module named 'else'", name="else")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match="No module named 'else'"):
        main()


@pytest.mark.slow
def test_in_a_pipe_that_can_only_show_ascii(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [*PROGRAM, "look", "--tokens", "小狗", "saw"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert rb"\u5c0f\u72d7" in done.stdout
    assert b"\x1b" not in done.stdout
    assert done.stderr == b""
    assert (tmp_path / "out" / "look" / "heatmap.png").is_file()


def test_warnings_are_sentences(capsys):
    cli._print_warning(UserWarning("the text is long"), UserWarning, "decoder.py", 12)
    assert capsys.readouterr().err == "saccade: the text is long\n"
