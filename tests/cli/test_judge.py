"""``saccade judge`` as a user runs it."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

from saccade.cli.app import app

KERNELS = """
import saccade as sc
import torch

def right(query, key, value, mask, *, scale=None):
    return sc.attention(query, key, value, mask, scale=scale)

def large_number(query, key, value, mask):
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return (query @ key.mT * query.shape[3] ** -0.5).masked_fill(~mask, -1e4).softmax(-1) @ value

def ungrouped(query, key, value, mask):
    return (query @ key.mT * query.shape[3] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0) @ value

def time_first(q, k, v, *, causal):
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return sc.attention(q, k, v, sc.masks.Causal() if causal else None).permute(2, 0, 1, 3)

CLAIMS = {"form": "layout", "settings": {"order": "lbhd", "masks": "causal"}}
"""
FEW = ("--law", "oracle", "--law", "empty_rows", "--case", "nothing", "--case", "causal", "--dtype", "float32")


@pytest.fixture
def judge(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return lambda name, *arguments: CliRunner().invoke(app, ["judge", f"mine.py::{name}", "--seed", "0", *arguments])


def test_an_input_that_the_kernel_does_not_take_is_left_out_with_a_note(judge):
    result = judge("ungrouped", *FEW)
    assert result.exit_code == 0, result.output
    (note,) = (line for line in result.stdout.splitlines() if "declared for you" in line)
    assert note.startswith("takes no grouped heads (declared for you: RuntimeError: The size of tensor a")
    assert note.endswith("claim it with --claim groups=true")
    assert result.stdout.index(note) < result.stdout.index("verdict")


def test_an_error_that_most_trials_raise_is_told_once_with_a_way_out(judge):
    cases = ("--case", "causal-extend", "--case", "window", "--case", "padding")
    result = judge("ungrouped", *FEW, *cases, "--claim", "groups=true")
    assert result.exit_code == 1
    assert "declared for you" not in result.stdout
    assert "broken trials raised RuntimeError: The size of tensor a" in result.stdout
    assert "declare what it takes with --claim: groups" in result.stdout
    claimed = judge("ungrouped", *FEW, "--claim", "groups=false")
    assert claimed.exit_code == 0, claimed.output
    assert "broken trials" not in claimed.stdout


def test_laws_on_nan_and_inf_have_a_line_of_their_own(judge):
    few = ("--law", "oracle", "--law", "isolation", "--case", "causal", "--dtype", "float32")
    result = judge("ungrouped", *few)
    assert result.exit_code == 1
    assert "Finite inputs: The law that could be tried holds." in result.stdout
    assert "NaN and inf: 1 of 1 laws are broken: isolation." in result.stdout
    assert result.stdout.rstrip().endswith("--claim non_finite=false.")
    left_out = judge("ungrouped", *few, "--claim", "non_finite=false")
    assert left_out.exit_code == 0, left_out.output
    assert "claims nothing about NaN and inf" in left_out.stdout
    assert left_out.stdout.rstrip().endswith("The law that could be tried holds.")


def test_a_right_kernel_ends_with_status_0(judge):
    result = judge("right", *FEW)
    assert result.exit_code == 0, result.output
    assert "All 2 laws that could be tried hold." in result.stdout
    assert "right on cpu, seed 0" in result.stdout


def test_a_broken_law_ends_with_status_1_and_the_smallest_input(judge):
    result = judge("large_number", *FEW)
    assert result.exit_code == 1, result.output
    assert "empty_rows  BROKEN" in result.stdout
    assert "query [1, 1, 1, 1], key [1, 1, 1, 1], value [1, 1, 1, 1], float32, ~Full()" in result.stdout


def test_files_hold_the_verdict_and_a_script_that_runs_without_saccade(judge, tmp_path):
    result = judge("large_number", *FEW, "--html", "out.html", "--junit", "out.xml", "--scripts", "found")
    assert result.exit_code == 1, result.output
    page = (tmp_path / "out.html").read_text("utf-8")
    assert "empty_rows" in page
    assert "def definition(" in page
    root = ET.parse(tmp_path / "out.xml").getroot()
    assert {suite.get("name"): suite.get("failures") for suite in root} == {"oracle": "1", "empty_rows": "1"}
    assert root.find("testsuite/testcase/failure").get("message")
    script = tmp_path / "found" / "empty_rows.py"
    text = script.read_text("utf-8")
    assert "saccade" not in text.replace("Written by saccade judge", "")
    (tmp_path / "mine.py").write_text(KERNELS.replace("import saccade as sc", ""), encoding="utf-8")
    blocked = "import sys; sys.modules['saccade'] = None; exec(compile(open(sys.argv[1]).read(), 'script', 'exec'))"
    ran = subprocess.run([sys.executable, "-c", blocked, str(script)], capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert "call 1: the output at [0, 0, 0, 0] is" in ran.stdout
    assert "expected 0" in ran.stdout


def test_claims_choose_the_form_and_expect_failures(judge, tmp_path):
    result = judge("time_first", "--claims", "mine.py::CLAIMS", *FEW)
    assert result.exit_code == 0, result.output
    claims = '[xfail]\nempty_rows = "known"\n"oracle[nothing*]" = "known"\n"oracle[causal]" = "fixed"\n'
    (tmp_path / "claims.toml").write_text(claims, encoding="utf-8")
    result = judge("large_number", "--claims", "claims.toml", *FEW)
    assert result.exit_code == 0, result.output
    assert "Expected to fail, but kept: oracle[causal] (fixed)" in result.stdout
    assert judge("large_number", "--claims", "claims.toml", *FEW, "--strict").exit_code == 1


def test_json_holds_the_counter_examples(judge):
    told = json.loads(judge("large_number", *FEW, "--json").stdout)
    assert told["schema"] == "saccade.judge/1"
    assert (told["ok"], told["seed"]) == (False, 0)
    assert [example["law"] for example in told["counter_examples"]] == ["oracle", "empty_rows"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["mine.py"], "KERNEL must be file.py::name"),
        (["nowhere.py::attention"], "KERNEL must name a file that exists"),
        (["mine.py::missing"], "KERNEL must be defined in mine.py"),
        (["mine.py::right", "--law", "gravity"], "laws must be among"),
        (["mine.py::right", "--dtype", "int8"], "--dtype must be among"),
        (["mine.py::right", "--device", "abacus"], "--device must be"),
        (["mine.py::right", "--claims", "no.toml"], "--claims must be a file that can be read"),
        (["mine.py::right", "--claim", "colour='red'"], "claims must be among"),
        (["mine.py::right", "--claim", "form='braille'"], "form must be"),
        (["mine.py::right", "--claim", "xfail={oracle=''}"], "xfail must give a reason"),
        (["mine.py::right", "--claim", "x y"], "--claim must be KEY=VALUE"),
    ],
)
def test_wrong_arguments_end_with_status_2(judge, arguments, sentence):
    result = CliRunner().invoke(app, ["judge", *arguments])
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.output.split())


@pytest.mark.slow
@pytest.mark.many  # the page about it, whose commands run in test_judge_page.py, starts it alike
def test_python_m_is_the_same_command(judge, tmp_path):
    command = [sys.executable, "-m", "saccade.testing", "mine.py::right", *FEW]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "All 2 laws that could be tried hold." in done.stdout


def test_scripts_of_an_earlier_run_are_removed_and_other_files_are_kept(judge, tmp_path):
    found = tmp_path / "found"
    assert judge("large_number", *FEW, "--scripts", "found").exit_code == 1
    (found / "my_notes.py").write_text("# Written by me\n", encoding="utf-8")
    assert (found / "oracle.py").is_file()
    assert str(tmp_path) not in (found / "oracle.py").read_text("utf-8")
    assert judge("large_number", "--law", "empty_rows", *FEW[4:], "--scripts", "found").exit_code == 1
    assert sorted(path.name for path in found.iterdir()) == ["empty_rows.py", "my_notes.py"]
