"""The runner of the GPU check: a report that is valid at every moment, whatever becomes of a step."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from benchmarks.gpu_check.finding import Finding, append, read
from benchmarks.gpu_check.report import Report, StepReport
from benchmarks.gpu_check.steps import ROOT, STEPS, Context, Step, level_of
from benchmarks.gpu_check.summary import MOST_LINES, summary

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import runner

TELL = """
import json, os, signal, subprocess, sys, time
def tell(name, ok=True):
    with open(PLACE, "a") as file:
        file.write(json.dumps({"name": name, "text": "a text", "ok": ok, "figures": {}, "headline": False}) + "\\n")
"""


def python(script, findings):
    return [sys.executable, "-c", TELL.replace("PLACE", repr(str(findings))) + textwrap.dedent(script)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run scripts as steps: ``run({"name": (seconds, script)})``."""

    def made(scripts, minutes=60.0):
        monkeypatch.setattr(runner, "_POLL", 0.05)
        monkeypatch.setattr(runner, "_SHORTEST", 0.01)
        monkeypatch.setattr(runner, "_command", lambda step, _, findings, __: python(scripts[step.name][1], findings))
        steps = [Step(name, f"the step {name}", seconds) for name, (seconds, _) in scripts.items()]
        planned = sum(step.seconds for step in steps)
        options = runner.Options("cpu", True, min(minutes, planned / 60.0), tmp_path)
        return runner.run(options, steps)

    return made


def report_in(folder):
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def test_whatever_becomes_of_a_step_is_reported_and_the_next_one_runs(run, tmp_path):
    looks = """
    steps = json.load(open(REPORT))["steps"]
    tell(" ".join(step["status"] for step in steps))
    """.replace("REPORT", repr(str(tmp_path / "report.json")))
    report = run(
        {
            "good": (60, "tell('a'); tell('b', None)"),
            "wrong": (60, "tell('c', False)"),
            "raises": (60, "tell('d'); raise ValueError('an odd one')"),
            "killed": (60, "tell('e'); os.kill(os.getpid(), signal.SIGKILL)"),
            "last": (60, looks),
        }
    )
    statuses = {step.name: step.status for step in report.steps}
    assert statuses == {"good": "ok", "wrong": "failed", "raises": "crashed", "killed": "crashed", "last": "ok"}
    assert [each.name for step in report.steps[:4] for each in step.findings] == ["a", "b", "c", "d", "e"]
    assert report.steps[4].findings[0].name == "ok failed crashed crashed running"
    assert "exit status 1" in report.steps[2].note
    assert "ValueError: an odd one" in report.steps[2].note
    assert "SIGKILL" in report.steps[3].note
    assert not report.ok
    assert report_in(tmp_path) == json.loads(json.dumps(report.as_dict()))
    assert "## killed: the step killed" in (tmp_path / "report.md").read_text(encoding="utf-8")


@pytest.mark.ci
def test_a_step_past_its_time_is_killed_with_all_it_started_and_keeps_its_findings(run, tmp_path):
    script = f"""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    tell('before')
    time.sleep(600)
    """
    report = run({"slow": (2.0, script), "next": (60.0, "tell('after')")})
    slow, after = report.steps
    assert (slow.status, [each.name for each in slow.findings]) == ("timed out", ["before"])
    assert "killed after" in slow.note
    assert after.status == "ok"
    pid = int((tmp_path / "pid").read_text(encoding="ascii"))
    for _ in range(100):
        if not running(pid):
            break
        time.sleep(0.05)
    assert not running(pid)


def running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_step_for_which_no_time_is_left_is_said_not_to_have_run(run):
    report = run({"slow": (0.5, "time.sleep(600)"), "next": (0.001, "tell('after')")})
    assert [step.status for step in report.steps] == ["timed out", "not run"]
    assert report.steps[1].note == "no time was left"


def test_what_one_step_leaves_over_the_next_may_use(run):
    report = run({"short": (30, "tell('a')"), "long": (30, "tell('b')")})
    assert 25 < report.steps[0].budget <= 30
    assert 31 < report.steps[1].budget <= 60


def test_a_runner_that_is_killed_leaves_a_valid_report(tmp_path):
    driver = f"""
    import sys
    from pathlib import Path
    from benchmarks.gpu_check import runner
    from benchmarks.gpu_check.steps import Step
    runner._POLL = 0.05
    scripts = {{"first": {python("tell('a')", tmp_path / "steps" / "first.jsonl")!r},
               "second": {python("tell(str(os.getpid())); time.sleep(600)", tmp_path / "steps" / "second.jsonl")!r}}}
    runner._command = lambda step, *rest: scripts[step.name]
    steps = [Step(name, name, 300.0) for name in scripts]
    runner.run(runner.Options("cpu", True, 10.0, Path({str(tmp_path)!r})), steps)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(driver)], cwd=ROOT, stdout=subprocess.PIPE) as process:
        found = []
        for _ in range(1200):
            time.sleep(0.05)
            if (tmp_path / "report.json").exists():
                found = report_in(tmp_path)["steps"]  # valid whenever it is looked at
            if len(found) == 2 and found[1]["findings"]:
                break
        process.kill()
    report = report_in(tmp_path)
    assert [step["status"] for step in report["steps"]] == ["ok", "running"]
    assert not report["done"]
    os.kill(int(report["steps"][1]["findings"][0]["name"]), signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "speeds"], "invalid choice: 'speeds'"),
        (["--minutes", "0"], "must be a number of minutes above 0; got 0"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_what_it_does_not_know_is_refused_before_anything_runs(arguments, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert sentence in capsys.readouterr().err


def test_only_some_steps_in_their_order(monkeypatch, capsys, tmp_path):
    seen = []

    def run(options, steps):
        seen.append((options, [step.name for step in steps]))
        return Report.begun("cpu", quick=True, minutes=1.0, out=tmp_path)

    monkeypatch.setattr(command, "run", run)
    assert command.main(["--only", "speed", "canaries", "--quick", "--device", "cpu", "--minutes", "3"]) == 1
    ((options, names),) = seen
    assert names == ["canaries", "speed"]
    assert (options.device, options.quick, options.minutes) == ("cpu", True, 3.0)
    assert options.out == ROOT / "out" / "gpu"
    assert "so far nothing failed" in capsys.readouterr().out
    command.main([])
    assert seen[1][1] == [step.name for step in STEPS]


def test_the_command_of_a_step(tmp_path):
    options = runner.Options("cpu", True, 1.0, tmp_path, tmp_path / "a.whl")
    given = runner._command(STEPS[0], 20.0, tmp_path / "findings", options)
    assert given[1:4] == ["-m", "benchmarks.gpu_check.child", "environment"]
    assert given[4:] == [
        *("--findings", str(tmp_path / "findings"), "--device", "cpu", "--seconds", "17.0", "--quick"),
        *("--wheel", str(tmp_path / "a.whl")),
    ]
    assert str(ROOT / "src") in runner._environment()["PYTHONPATH"]


def a_report(findings, tmp_path):
    report = Report.begun("cpu", quick=True, minutes=1.0, out=tmp_path)
    report.steps = [StepReport(step.name, step.title, 1.0, "failed", 1.0, findings(step)) for step in STEPS]
    report.done = True
    return report


@pytest.mark.parametrize("count", [0, 1, 7, 300])
def test_the_summary_fits_and_shows_failures_of_every_step(count, tmp_path):
    def findings(step):
        failures = [Finding(f"{step.name} kernel {number}", "wrong: " + "x" * 300, False) for number in range(count)]
        return failures + [Finding(f"case {number}", "3 ms, " * 80, None, headline=True) for number in range(count)]

    report = a_report(findings, tmp_path)
    lines = summary(report.as_dict())
    assert len(lines) <= MOST_LINES == 100
    assert len("\n".join(lines)) < 12_000
    assert lines[-1] == f"NOT OK: {', '.join(step.name for step in STEPS)}"
    for step in STEPS:
        assert sum(line.startswith(f"{step.name}: FAILED") for line in lines) == 1
        assert bool(count) == any(f"FAILED {step.name} kernel 0" in line for line in lines)
    assert (count >= 7) == any("more failures and" in line for line in lines)


def test_the_summary_of_what_passed(tmp_path):
    report = a_report(lambda step: [Finding("a", "b", True)], tmp_path)
    for step in report.steps:
        step.status = "ok"
    assert report.ok
    assert summary(report.as_dict())[-2:] == [
        "8 steps, a rehearsal on a processor, whose figures mean nothing",
        "every step passed",
    ]
    report.device = "cuda"
    assert "on a GPU" in summary(report.as_dict())[-2]


def test_the_page_is_a_table_whatever_a_finding_says(tmp_path):
    report = a_report(lambda step: [Finding("a | b", "two\nlines", False)], tmp_path)
    report.write()
    assert "| **FAILED** | a \\| b | two lines |" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "findings"
    assert read(path) == []
    append(path, Finding("a", "b", True, {"c": 1.5}))
    with path.open("a", encoding="utf-8") as file:
        file.write('{"name": "half')
    assert read(path) == [Finding("a", "b", True, {"c": 1.5})]


def test_a_step_that_prints_nothing(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n \n", encoding="utf-8")
    assert runner._tail(log) == "it printed nothing"


def test_levels_and_time():
    assert [level_of("cuda", quick=False), level_of("cpu", quick=False), level_of("cuda", quick=True)] == [
        *("cuda", "cpu", "quick")
    ]
    assert 0.0 < Context(None, "cpu", time.monotonic() + 5.0).left() <= 5.0
