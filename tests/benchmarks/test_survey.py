"""The survey of transformers: small models of every kind, lines that show what is broken, and the page of it."""

import json
import math
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import transformers
from benchmarks.generated_part import generated
from benchmarks.survey.__main__ import COMMAND, PACKAGES, main
from benchmarks.survey.architectures import architectures
from benchmarks.survey.result import LENGTHS, ids, measure, model_lines, printed
from benchmarks.survey.subprocess_pool import each_alone
from benchmarks.survey.table import LEAST, mark, written
from benchmarks.survey.versions import COMPARED, compared, versions_table
from tests.sampled import kept

from saccade.auditing.reproduction_script import claim_lines

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {language: DOCS / language / "audit-of-transformers.md" for language in ("en", "zh")}
ALL = {one.key: one for one in architectures()}


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def survey():
    return json.loads((DOCS / "audit-of-transformers.json").read_text("utf-8"))


def test_every_class_is_listed_once():
    assert len(ALL) > 200
    assert len({(one.model, one.kind) for one in ALL.values()}) == len(ALL)
    assert ALL["llama"].model == "LlamaForCausalLM"
    assert ALL["bert"].model == "BertLMHeadModel"
    assert ALL["bert (masked)"].model == "BertForMaskedLM"


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2", "deepseek_v3", "bert (masked)", "gpt_oss"])
def test_models_are_small(name):
    model = ALL[name].make("eager")
    assert sum(own.numel() for own in model.parameters()) < 1e6
    assert model.config.vocab_size == 101
    assert not model.training


BROKEN = {
    "llama": {"packed, with a cache", "packed, with a mask of ones"},
    "mistral": {"packed, with a cache", "packed, with a mask of ones", "packed, with a mask of four dimensions"},
    "falcon_mamba": {"steps: one token first", "steps: two halves", "steps: pieces of 5"},
    "bert (masked)": set(),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", kept(BROKEN, "mistral", "bert (masked)"))
def test_lines_show_what_is_broken_and_nothing_else(name):
    cell = measure(ALL[name], "eager")
    assert cell.broken.keys() == BROKEN[name]
    for claim in cell.broken.values():
        assert claim.printed > 1e-2
        assert claim.size == pytest.approx(claim.printed, rel=2)
    model = ALL[name].make("eager")
    shown = {claim: claim_lines(claim, model, ids(), LENGTHS) for claim in cell.held}
    assert {"one by one = in a batch", "in training, without dropout", "padded at the left"} <= shown.keys()
    for claim, lines in shown.items():
        if lines:
            assert printed([*cell.model, *lines]) < LEAST, claim


@pytest.mark.slow
def test_lines_run_in_a_process_that_knows_nothing_of_this_library():
    model = ALL["llama"].make("sdpa")
    lines = [*model_lines(ALL["llama"], "sdpa", model), *claim_lines("packed, with a cache", model, ids(), LENGTHS)]
    assert len(lines) <= 11
    assert "saccade" not in "\n".join(lines)
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert float(ran.stdout) == pytest.approx(printed(lines), rel=1e-3)
    assert float(ran.stdout) > 1.0


def test_lines_that_raise_show_nothing():
    assert math.isnan(printed(["print(3.0)", "raise ValueError"]))


def test_a_model_without_an_implementation_is_not_run():
    cell = measure(ALL["mamba2"], "sdpa")
    assert cell.model == cell.held == ()
    assert "does not support an attention implementation" in cell.unanswered["runs"]


@pytest.mark.slow
def test_each_piece_of_work_is_alone():
    work = [os.getpid, partial(os._exit, 7), partial(time.sleep, 60), lambda: [1, 2]]
    found = dict(each_alone(work, jobs=2, seconds=3.0))
    assert found[0] != os.getpid()
    assert found[1] == "ended its process (exit status 7)"
    assert found[2] == "took more than 3 s"
    assert found[3] == [1, 2]


def cell(held=(), broken=(), printed=1.0):
    shown = {
        name: {"size": 1.0, "where": "output 1", "lines": ["off(1, 2)"], "printed": printed, "is_held_by_ours": True}
        for name in broken
    }
    return {"model": ["import torch", "seed", "model = small"], "held": held, "unanswered": {}, "broken": shown}


def test_marks():
    assert mark(cell(held=["packed"]), "packed") == "✓"
    assert mark(cell(held=["packed"]), "+cache") == "–"
    assert mark(cell(held=["steps: one by one"], broken=["steps: two halves"]), "steps") == "✗"
    assert mark(cell(broken=["packed"], printed=1e-7), "packed") == "?"
    assert mark(cell(broken=["by layer"], printed=None), "reach") == "✗"
    assert mark("took more than 3 s", "reach") == ""
    assert mark(cell(held=["packed"]), "ours") == "–"
    assert mark(cell(broken=["packed"]), "ours") == "✓"


def test_a_table_tells_implementations_apart_and_shows_lines():
    cells = {
        "one": {"eager": cell(held=["packed"]), "sdpa": cell(broken=["packed"]), "flex": "took more than 3 s"},
        "two": {"eager": cell(held=["packed"])},
        "three": {"eager": "ended its process (exit status -11)"},
    }
    text = written({"versions": {"torch": "2"}, "cells": cells}, "en")
    assert text.startswith("2 models; torch 2.")
    assert "\n| model | packed | ours |\n" in text  # columns without an answer are left out
    assert "\n| one | ✓✗· | ✓ |\n| two | ✓ | – |\n" in text
    assert "- three: `ended its process (exit status -11)`" in text
    assert "model = small\noff(1, 2)\n```\n\nPrinted difference by model: one 1" in text
    assert text.endswith("```text\none: model = small\n```")


@pytest.mark.ci
def test_the_command_measures_and_writes_pages(tmp_path):
    results, page = tmp_path / "results.json", tmp_path / "en" / "page.md"
    main(["bert", "local-attention: causal", "--by", "eager", "--results", str(results), "--jobs", "1"])
    assert set(json.loads(results.read_text("utf-8"))["cells"]) == {"bert", "bert (masked)"}
    assert set(json.loads(results.read_text("utf-8"))["packages"]["cells"]) == {"local-attention: causal"}
    page.parent.mkdir()
    parts = (f"<!-- made by: {command} -->\n\nold\n\n<!-- made until here -->\n" for command in (COMMAND, PACKAGES))
    page.write_text("# A page\n\n" + "\n".join(parts), "utf-8")
    main(["--results", str(results), "--page", str(page)])
    assert "| bert (masked) |" in generated(page.read_text("utf-8"), COMMAND)
    assert "| local-attention: causal |" in generated(page.read_text("utf-8"), PACKAGES)


@pytest.mark.ci
def test_cells_are_added_to_kept_results(tmp_path):
    results = tmp_path / "results.json"
    run = ["--part", "transformers", "--results", str(results), "--jobs", "1"]
    main(["mamba2", "--by", "eager", *run])
    main(["mamba2", "gpt2", "--by", "saccade", "--add", *run])
    cells = json.loads(results.read_text("utf-8"))["cells"]
    assert {name: list(by) for name, by in cells.items()} == {"gpt2": ["saccade"], "mamba2": ["eager", "saccade"]}
    assert "packed" in cells["gpt2"]["saccade"]["held"]
    results.write_text(results.read_text("utf-8").replace(transformers.__version__, "4.0"), "utf-8")
    with pytest.raises(ValueError, match=r"(?s)versions must be those of the results, .*4\.0.*; got .*--add"):
        main(["gpt2", "--by", "saccade", "--add", *run])
    assert list(tmp_path.iterdir()) == [results]  # nothing was measured before the error


def test_results_of_other_parts_are_kept_and_unknown_names_change_nothing(tmp_path):
    results = tmp_path / "results.json"
    kept = json.dumps({"versions": {"torch": "2"}, "cells": {"llama": {}}})
    results.write_text(kept, "utf-8")
    with pytest.raises(ValueError, match=r"name must be kinds of models or packages of the parts .*; got lama"):
        main(["llama", "lama", "--results", str(results)])
    assert results.read_text("utf-8") == kept
    main(["fair-esm: ESM-2", "--results", str(results), "--jobs", "1"])
    written_results = json.loads(results.read_text("utf-8"))
    assert written_results["cells"] == {"llama": {}}
    assert set(written_results["packages"]["cells"]) == {"fair-esm: ESM-2"}


@pytest.mark.parametrize("language", PAGES)
def test_pages_show_the_results_that_are_kept(language, survey):
    page = PAGES[language].read_text("utf-8")
    assert generated(page, COMMAND) == written(survey, language)
    assert generated(page, PACKAGES) == written(survey["packages"], language, packages=True)


MIXERS = {
    "bamba": "model.layers.0.mamba",
    "falcon_h1": "model.layers.0,1.mamba",
    "jamba": "model.layers.0.mamba",
    "nemotron_h": "model.layers.0.mixer",
    "olmo_hybrid": "model.layers.0.linear_attn",
    "qwen3_next": "model.layers.0.linear_attn",
    "recurrent_gemma": "model.layers.0,1.temporal_block",
}


@pytest.mark.parametrize("name", MIXERS)
def test_states_of_packed_texts_are_named_by_their_mixers(name, survey):
    broken = survey["cells"][name]["eager"]["broken"]["states"]
    assert broken["where"].partition("across documents: ")[2] == MIXERS[name]
    assert broken["printed"] > 1e-3
    assert all(f"(`{MIXERS[name]}`)" in page.read_text("utf-8") for page in PAGES.values())


@pytest.mark.parametrize("language", PAGES)
def test_pages_show_the_comparison_that_is_kept(language):
    comparison = json.loads((DOCS / "audit-of-transformers-versions.json").read_text("utf-8"))
    assert generated(PAGES[language].read_text("utf-8"), COMPARED) == versions_table(comparison, language)
    broken = {(name, column) for name, column, _, marks, _ in comparison["changed"] if marks[0] == "✗"}
    assert broken >= {(name, "reach") for name in ("roformer", "rembert", "megatron-bert", "doge")}


def test_versions_that_differ_are_compared():
    right, wrong = cell(held=["reach"]), cell(broken=["reach"])
    wrong["model"] = ["import", "seed", "model = old"]
    surveys = [
        {"versions": {"torch": "2", "transformers": version}, "cells": {"doge": {"sdpa": sdpa, "eager": right}}}
        for version, sdpa in (("5.1", wrong), ("5.2", right))
    ]
    comparison = compared(surveys)
    assert comparison["changed"] == [["doge", "reach", "sdpa", ["✗", "✓"], ["model = old", "off(1, 2)"]]]
    text = versions_table(comparison, "en")
    assert "transformers 5.1, 5.2; torch 2. 1 cells changed." in text
    assert "| doge | reach | sdpa | ✗ | ✓ | [#48748](" in text
    assert compared([surveys[1], surveys[1]])["changed"] == []


# Kinds of models that the pages name as broken, by column, under "Why".
NAMED = {
    "packed": [
        *("gpt_oss", "opt", "falcon", "afmoe", "bert", "roberta"),
        *("jamba", "bamba", "zamba2", "qwen3_next", "minimax"),
    ],
    "states": ["bamba", "jamba", "zamba2", "qwen3_next", "minimax", "recurrent_gemma", "lfm3", "nemotron_h"],
    "+4-D": ["mistral", "gemma2", "gemma3_text", "gpt_oss", "olmo3", "modernbert (masked)"],
    "reach": ["moshi", "prophetnet", "big_bird"],
    "train": ["big_bird (masked)"],
    "steps": ["mamba", "falcon_mamba", "jamba", "zamba", "bamba", "moshi"],
    "state": ["minimax"],
    "right": [f"{name} (masked)" for name in ("convbert", "nystromformer", "funnel", "yoso", "reformer")],
    "left": ["bart", "mbart", "rwkv"],
}


@pytest.mark.parametrize("column", NAMED)
def test_explained_rows_are_in_the_table(column, survey):
    for name in NAMED[column]:
        assert mark(survey["cells"][name]["eager"], column) == "✗", name
    assert all(re.search(rf"\*\*{re.escape(column)}\*\*", page.read_text("utf-8")) for page in PAGES.values())


def test_doge_is_causal_by_two_implementations_of_three(survey):
    by = survey["cells"]["doge"]
    assert [mark(by[name], "reach") for name in ("eager", "sdpa", "flex_attention")] == ["✓", "✓", "✗"]
    assert all("Doge" in page.read_text("utf-8") for page in PAGES.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "opt", "bamba", "modernbert (masked)", "gpt_neo", "minimax"])
def test_the_kept_results_are_those_of_this_machine(name, survey):
    if survey["versions"]["transformers"] != transformers.__version__:
        pytest.skip(f"the page speaks of transformers {survey['versions']['transformers']}; to make it anew: {COMMAND}")
    cell = measure(ALL[name], "eager")
    assert sorted(cell.broken) == sorted(survey["cells"][name]["eager"]["broken"])
