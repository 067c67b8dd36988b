"""A command that is interrupted in the middle ends with status 130, and leaves nothing behind."""

import os
import signal
import subprocess
import sys

import pytest

from saccade.cli import main
from saccade.cli.exit_status import STATUSES

# Interrupts itself, as Ctrl-C or `kill` would, while a picture is written: then it is half done, and no clock decides.
PROGRAM = """
import os, signal
from matplotlib.figure import Figure
from saccade.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # which whoever started the tests may have switched off
written, save = [], Figure.savefig

def savefig(self, path, **options):
    save(self, path, **options)
    written.append(path)
    if len(written) == {number}:
        os.kill(os.getpid(), signal.{by})

Figure.savefig = savefig
main()
"""
TEXT = "a text that is longer than what is read at once"  # so that there is a picture of all windows too
DRAWING = {
    "look": (["look", TEXT, "--at-once", "8", "--layer", "0", "--head", "0", "--out", "new/folder"], [1, 2, 3]),
    "compare": (["compare", "a small text", "--out", "new.png"], [1]),
    "verify": (["verify", "--pictures", "new/folder"], [1, 2]),
}
# Seconds each, since a process imports everything anew: the last picture of a command stands for those before it, and
# one command for the others that are ended, hindered, or read through a pipe in the same way.
INTERRUPTED = [
    pytest.param(name, number, marks=[] if (name, number) == ("look", numbers[-1]) else [pytest.mark.slow])
    for name, (_, numbers) in DRAWING.items()
    for number in numbers
]
ENDED = ["verify", *(pytest.param(name, marks=pytest.mark.slow) for name in ("look", "compare"))]
PROMPTS = ["此选项", pytest.param("The import statement", marks=pytest.mark.slow)]
PRINTING = [
    ["generate", "cat"],
    ["--version"],
    *(pytest.param(one, marks=pytest.mark.slow) for one in (["look", "cat"], ["verify", "--markdown"])),
]


def _ended(folder, number, arguments, by="SIGINT"):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(number=number, by=by), *arguments],
        cwd=folder,
        capture_output=True,
        timeout=300,
        check=False,
    )


def _files(folder):
    return {path.relative_to(folder).as_posix(): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.slow
@pytest.mark.parametrize("name, number", INTERRUPTED)
def test_no_file_and_no_folder_is_left(tmp_path, name, number):
    done = _ended(tmp_path, number, DRAWING[name][0])
    assert done.returncode == 130, done.stderr
    assert b"wrote" not in done.stdout
    assert done.stderr == b""
    assert _files(tmp_path) == {}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="ends a process at once there")
@pytest.mark.parametrize("name", ENDED)
def test_being_ended_is_an_interruption(tmp_path, name):
    done = _ended(tmp_path, 1, DRAWING[name][0], by="SIGTERM")
    assert done.returncode == 130, done.stderr
    assert done.stderr == b""
    assert _files(tmp_path) == {}


@pytest.mark.skipif(sys.platform == "win32", reason="ends a process at once there")
@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_signal_handlers_are_restored(monkeypatch, handler):
    before, seen = signal.signal(signal.SIGTERM, handler), []
    monkeypatch.setattr("saccade.cli._run", lambda: seen.append(signal.getsignal(signal.SIGTERM)))
    try:
        main()
        after = signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert after == handler
    assert seen == [signal.SIG_IGN if handler is signal.SIG_IGN else signal.default_int_handler]


@pytest.mark.slow
def test_existing_files_stay_unchanged(tmp_path):
    folder = tmp_path / "new" / "folder"
    folder.mkdir(parents=True)
    (folder / "heatmap.png").write_bytes(b"of a run before")
    before = _files(tmp_path)
    done = _ended(tmp_path, 2, DRAWING["look"][0])
    assert done.returncode == 130, done.stderr
    assert _files(tmp_path) == before


@pytest.mark.slow
def test_a_complete_run_leaves_only_its_figures(tmp_path):
    done = _ended(tmp_path, 0, DRAWING["look"][0])
    assert done.returncode == 0, done.stderr
    files = sorted(name for name, content in _files(tmp_path).items() if content)
    assert files == [f"new/folder/{name}.png" for name in ("heatmap", "mosaic", "whole")]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_text_comes_through_a_pipe_as_it_is_made_until_it_is_interrupted(tmp_path, prompt):
    command = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); from saccade.cli import main; main()"
    arguments = ["generate", prompt, "--max-new-tokens", str(10**7), "--temperature", "1", "--seed", "1"]
    speaking = subprocess.Popen(
        [sys.executable, "-c", command, *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    try:
        first = speaking.stdout.read(len(prompt.encode()) + 60)  # comes though millions of tokens are still to come
        speaking.send_signal(signal.SIGINT)
        rest, errors = speaking.communicate(timeout=300)
    finally:
        speaking.kill()
    assert (speaking.returncode, errors) == (130, b"")
    text = (first + rest).decode("utf-8")  # no character is cut
    assert text.startswith(prompt)
    assert text.endswith("\n")
    assert _files(tmp_path) == {}


def test_an_interruption_while_packages_are_imported_is_no_traceback(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("saccade.cli._run", interrupted)
    with pytest.raises(SystemExit, match=r"^130$"):
        main()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")
@pytest.mark.parametrize("arguments", PRINTING)
def test_a_full_disk_behind_the_standard_output_is_one_sentence(tmp_path, arguments):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from saccade.cli import main; main()", *arguments],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=300,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.decode().strip().splitlines() == [
        "saccade: the standard output must be writable; got No space left on device"
    ]
    assert _files(tmp_path) == {}


@pytest.mark.parametrize("arguments", [[], ["look"], ["compare"], ["generate"], ["verify"]])
def test_help_says_what_exit_statuses_mean(run, arguments):
    result = run(*arguments, "--help")
    assert result.exit_code == 0
    assert " ".join(STATUSES.split()) in " ".join(result.output.split())
    assert all(phrase in STATUSES for phrase in ("0 on success", "1 for", "2 for", "130 for"))
