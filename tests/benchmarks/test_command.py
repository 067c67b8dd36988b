"""The command line of the benchmarks, and the pages that it writes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.questions import QUESTIONS

from benchmarks import __main__ as command
from benchmarks import chinese, growth, measuring, pages, plotting, reporting

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quick_referee(monkeypatch):
    monkeypatch.setattr(command, "Referee", lambda **options: measuring.Referee(lambda: 1.0, samples=1, **options))


def test_an_unknown_question_is_one_line(capsys):
    assert command.main(["windows", "short"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    known = ", ".join(QUESTIONS)
    assert said.err == f"benchmarks: question must be one of {known}; got windows.\n"


@pytest.mark.parametrize("met, status", [(True, 0), (None, 0), (False, 1)])
def test_the_exit_status_says_whether_all_targets_are_met(met, status, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    row = reporting.Row("a case", "1x", "at least 2x", met)
    question = SimpleNamespace(TITLE="a question", measure=lambda referee: iter([row]))
    monkeypatch.setattr(command, "QUESTIONS", {"one": question})
    assert command.main(["--quick"]) == status
    assert (tmp_path / "out" / "bench" / "results.json").exists()
    said = capsys.readouterr()
    assert "a case" in said.out
    assert "a question" in said.err


@pytest.mark.parametrize(
    "option, sentence",
    [
        (["--mask", "open('x')"], "--mask: a mask is written like"),
        (["--shape", "1,2,x,4"], "--shape must be batch,heads,tokens,width, at least 1 each; got 1,2,x,4"),
        (["--shape", "1,0,2,4"], "--shape must be"),
        (["--kv-heads", "3"], "--kv-heads must divide the 8 heads; got 3"),
        (["--peers", "sdpa,spda"], "--peers must be of ours, no-wheel, sdpa"),
        (["--dtype", "int8"], "int8"),
    ],
)
def test_refused_comparisons_are_one_sentence(option, sentence, capsys):
    assert command.main(["compare", *option]) == 2
    assert sentence in capsys.readouterr().err


def test_a_comparison_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = "compare --mask Window(8,8) --shape 1,2,64,16 --peers sdpa,sdpa+mask,flex --backward --threads 1 --rounds 1"
    assert command.main(given.split()) == 0
    said = capsys.readouterr().out
    assert "of the dense rate" in said
    assert "flex is left out" in said
    written = json.loads((tmp_path / "out" / "bench" / "compare.json").read_text(encoding="utf-8"))
    assert [row["case"] for row in written["rows"]][:2] == ["ours", "against sdpa"]


def results(*features):
    features = features or ("AVX512", "AVX512-BF16")
    referee = measuring.Referee(lambda: 1e9, samples=1)
    pair = measuring.Pair(0.01, 0.05, 5.0, 1e9, True)
    rows = [
        reporting.ratio_row("a | case", pair, peer="SDPA", target=6.0),
        reporting.ratio_row("another", pair._replace(rate=1e8), peer="SDPA", target=2.0, but="no AMX"),
    ]
    made = json.loads(json.dumps(reporting.results({QUESTIONS["window"].TITLE: rows}, referee)))
    made["machine"]["features"] = list(features)
    return made


@pytest.mark.parametrize("language, title", [("en", "TITLE"), ("zh", "TITLE_ZH")])
def test_a_page_is_made_from_results(language, title):
    page = pages.page(f"before\n{pages.START}\nold\n{pages.END}\nafter\n", results(), language)
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert f"### window: {getattr(QUESTIONS['window'], title)}" in page
    assert r"| a \| case | 5.0x: 10.0 ms, SDPA 50.0 ms | at least 6x | **" in page
    assert f"](../images/{'zh/' * (language == 'zh')}ratios.png)" in page
    assert "SDPA 50.0 ms † | at least 2x; not asked: no AMX |  |" in page


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="must have the lines"):
        pages.page("nothing", results(), "en")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_pictures_of_results(language):
    assert pages.drawings(results(), language)["ratios.png"]().startswith(b"\x89PNG")


def test_the_curve_of_all_pairs_may_end_before_the_others():
    referee = measuring.Referee(lambda: 1e9, samples=1)

    def row(name, pattern, sizes):
        taken = measuring.Rounds([[1e-6 * n for n in sizes]], 1e9, True)
        return growth.row_of(name, pattern, plotting.Curve(taken.times[0], [1000 * n for n in sizes]), taken)

    rows = [row(name, pattern, growth.SIZES) for name, pattern in growth.PATTERNS.items()]
    dense = row(growth.DENSE, None, growth.DENSE_SIZES)
    assert dense.measured.endswith(f", up to {growth.DENSE_SIZES[-1]} tokens")
    assert (dense.target, dense.met) == ("", None)
    found = json.loads(json.dumps(reporting.results({growth.TITLE: [dense, *rows]}, referee)))
    for language in ("en", "zh"):
        assert pages.drawings(found, language)["growth.png"]().startswith(b"\x89PNG")


def test_chinese_labels_keep_names():
    kept = json.loads((ROOT / pages.RESULTS).read_text(encoding="utf-8"))["rows"]
    drawn = [row for row in kept if "target_ratio" in row or "time_slope" in row]
    words = set(re.findall("[A-Za-z][A-Za-z_]{2,}", " ".join(chinese.of(drawn).values())))
    names = "float bfloat dropout wheel flex fused tiled sdpa mask GPU SDPA enable_gqa transformers Mistral MiB BigBird"
    names += " bigbird Longformer longformer ALiBi Performer performer pytorch scikit image Causal install local"
    names += " attention Llama saccade cost SSD KDA lightning delta"
    assert words <= set(names.split())


def test_a_run_of_one_question_takes_its_place_among_the_others():
    def rows(*questions):
        return [{"question": QUESTIONS[name].TITLE, "case": case} for name, case in questions]

    kept = results() | {
        "date": "2026-01-01",
        "matmul_peak_flops": 3.0,
        "rows": rows(("window", "old"), ("dropout", "old"), ("short", "old")),
    }
    found = results() | {
        "date": "2026-01-03",
        "matmul_peak_flops": 2.0,
        "rows": rows(("dropout", "new"), ("dropout", "too")),
    }
    joined = pages.joined(kept, found)
    assert joined["rows"] == rows(("window", "old"), ("dropout", "new"), ("dropout", "too"), ("short", "old"))
    assert joined["matmul_peak_flops"] == 3.0
    assert joined["date"] == "2026-01-01/2026-01-03"
    assert pages.joined(joined, found)["date"] == "2026-01-01/2026-01-03"
    elsewhere = found | {"machine": {"cpu": "another"}}
    with pytest.raises(ValueError, match="must be of the machine and versions of the others"):
        pages.joined(kept, elsewhere)
    everything = elsewhere | {"rows": rows(("window", "new"), ("dropout", "new"), ("short", "new"))}
    assert pages.joined(kept, everything) == everything


def test_pages_are_written(tmp_path):
    for language in ("en", "zh"):
        page = tmp_path / "docs" / language / "benchmarks.md"
        page.parent.mkdir(parents=True)
        page.write_text(f"{pages.START}\n{pages.END}\n", encoding="utf-8")
    found = reporting.replace(tmp_path / "results.json", json.dumps(results()).encode())
    assert {path.name for path in pages.write(found, tmp_path)} == {"results.json", "benchmarks.md", "ratios.png"}
    assert json.loads((tmp_path / pages.RESULTS).read_text(encoding="utf-8")) == results()
    lower = results("AVX2")
    for row in lower["rows"]:
        row |= {"measured": row["measured"].replace("10.0 ms", "20.0 ms")}
    reporting.replace(found, json.dumps(lower).encode())
    assert "results-avx2.json" in {path.name for path in pages.write(found, tmp_path)}
    assert pages.saved_results(tmp_path) == [results(), lower]
    page = (tmp_path / "docs/en/benchmarks.md").read_text(encoding="utf-8")
    assert "| case | measured | target | met | AVX2 |" in page
    assert r"| a \| case | 5.0x: 10.0 ms, SDPA 50.0 ms | at least 6x | **no** | 5.0x: 20.0 ms, SDPA 50.0 ms |" in page


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_documents_show_the_results_that_are_kept(language):
    page = (ROOT / "docs" / language / "benchmarks.md").read_text(encoding="utf-8")
    results, *others = pages.saved_results(ROOT)
    assert pages.page(page, results, language, others) == page


def test_every_question_has_its_title_in_both_languages():
    titles = [title for question in QUESTIONS.values() for title in (question.TITLE, question.TITLE_ZH)]
    assert len(set(titles)) == 2 * len(QUESTIONS)
