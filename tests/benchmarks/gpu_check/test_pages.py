"""Documents take their figures of GPUs from one file; without it they say that nothing has been measured."""

import json
import re
import shutil

import pytest
from benchmarks.gpu_check.finding import Finding
from benchmarks.gpu_check.report import Report, StepReport
from benchmarks.gpu_check.steps import ROOT

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import pages

CARD = Finding("card", "an H100", True, {"card": "an H100"}, headline=True)


@pytest.fixture
def report(tmp_path):
    """A report as a GPU would leave it."""
    made = Report.begun("cuda", quick=False, minutes=9.0, out=tmp_path / "out")
    made.about["date"] = "2027-01-02T03:04:05+00:00"
    versions = [Finding(name, "", True, {"version": "1.2"}) for name in ("torch", "transformers")]
    speed = Finding(
        "causal 8,192, forward", "sdpa 1 ms, 500 TFLOP/s; 1.00x FLASH", True, {"seconds": 1e-3}, headline=True
    )
    wrong = Finding("flex: softcap | 64", "off by <much>", False)
    made.steps = [
        StepReport("environment", "", 1.0, "ok", 1.0, [CARD, *versions]),
        StepReport("numbers", "", 1.0, "failed", 1.0, [wrong, Finding("varlen: causal", "fine", True)]),
        StepReport("speed", "", 1.0, "timed out", 1.0, [speed, Finding("kernels", "a, b")]),
    ]
    made.done = True
    made.write()
    return made


@pytest.fixture
def checkout(tmp_path):
    """The documents, in a folder of their own."""
    for name in pages._PLACES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_report_becomes_results_and_pages(report, checkout, monkeypatch, capsys):
    monkeypatch.setattr(command, "ROOT", checkout)
    assert command.main(["--publish", str(report.out / "report.json")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    kept = json.loads((checkout / pages.RESULTS).read_text(encoding="utf-8"))
    assert (kept["date"], kept["machine"]["card"], kept["versions"]["torch"]) == ("2027-01-02", "an H100", "1.2")
    assert [(step["passed"], step["failed"]) for step in kept["steps"]] == [(3, 0), (1, 1), (1, 0)]
    english = (checkout / "docs/en/gpu.md").read_text(encoding="utf-8")
    assert "2027-01-02, an H100, torch 1.2, transformers 1.2" in english
    assert "5 checks passed, 1 failed." in english
    assert "Not finished: speed (timed out)." in english
    assert r"- flex: softcap \| 64: off by &lt;much>" in english
    assert "| causal 8,192, forward | sdpa 1 ms, 500 TFLOP/s; 1.00x FLASH |" in english
    assert "Not yet measured" not in english
    assert "没有做完的步骤：speed (timed out)。" in (checkout / "docs/zh/gpu.md").read_text(encoding="utf-8")
    readme = (checkout / "README.md").read_text(encoding="utf-8")
    assert "checked on an H100 with torch 1.2: 5 checks passed, 1 failed" in readme
    again = pages.written(None, checkout)
    assert {path.relative_to(checkout).as_posix() for path in again} == set(pages._PLACES)
    for path, text in again.items():
        name = path.relative_to(checkout).as_posix()
        without_results = not (ROOT / pages.RESULTS).exists()
        assert not without_results or text == (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("device", "quick"), [("cpu", False), ("cuda", True)])
def test_a_rehearsal_is_not_published(device, quick, report, checkout, monkeypatch, capsys):
    monkeypatch.setattr(command, "ROOT", checkout)
    report.device, report.about["quick"] = device, quick
    report.write()
    assert command.main(["--publish", str(report.out / "report.json")]) == 2
    assert "the report must be of a GPU at full size" in capsys.readouterr().err
    assert not (checkout / pages.RESULTS).exists()


def test_a_page_without_its_place_is_refused(checkout):
    (checkout / "README.md").write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match=r"README.md must have <!-- gpu --> and <!-- /gpu -->"):
        pages.written(None, checkout)


def test_the_documents_say_what_the_results_say():
    kept = ROOT / pages.RESULTS
    results = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None
    for path, text in pages.written(results, ROOT).items():
        assert path.read_text(encoding="utf-8") == text, path
    words = [
        re.search("<!-- gpu -->(.*)<!-- /gpu -->", (ROOT / name).read_text(encoding="utf-8")) for name in pages._PLACES
    ]
    if results is None:
        assert [found.group(1) for found in words if found] == ["not yet measured", "尚未测量"]
