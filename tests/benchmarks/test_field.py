"""The table of the field: what it judges, and that the pages show the committed results."""

import dataclasses
import json

import pytest
import torch
from benchmarks.field.__main__ import COMMAND, PAGES, RESULTS, main
from benchmarks.field.entries import ENTRIES, Entry
from benchmarks.field.fla_naive import FLA_NAIVE
from benchmarks.field.ggml import GGML
from benchmarks.field.judged import SIZES, is_tried, judged
from benchmarks.field.table import GROUPS, written
from benchmarks.generated_part import generated
from benchmarks.peers.peer import Peer, named

from saccade.testing.cases import CASES
from saccade.testing.conformance import try_law
from saccade.testing.laws import LAWS, SIZE_LAWS
from saccade.testing.size_cases import SIZE_CASES

FOUND = json.loads(RESULTS.read_text("utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])
def test_the_pages_show_the_committed_results(page):
    assert generated(page.read_text("utf-8"), COMMAND) == written(FOUND, page.parent.name)


def test_every_entry_of_the_cpu_has_a_result_and_no_other_has():
    keys = [(entry.key, device) for entry in ENTRIES for device in entry.devices]
    have = [(one["key"], one["device"]) for one in FOUND["entries"]]
    assert have == [key for key in keys if key in have]
    assert {key for key in keys if key[1] == "cpu"} <= set(have)


def test_every_law_is_in_one_column():
    names = [name for group in GROUPS.values() for name in group]
    assert names == [law.name for law in LAWS] + list(SIZES)


def _zeros(query, key, value, mask):
    return query.new_zeros(*query.shape[:3], value.shape[3])


@pytest.mark.ci
def test_a_wrong_function_is_judged_wrong_at_both_sizes(monkeypatch):
    monkeypatch.setattr("benchmarks.field.judged.LAWS", [law for law in LAWS if law.name == "oracle"])
    monkeypatch.setattr("benchmarks.field.judged.SIZE_LAWS", [law for law in SIZE_LAWS if law.name == "sizes"])
    peer = Peer("zeros(q, k, v, mask)", _zeros, gqa=True, dtype=torch.float32, cases=lambda: named("causal", "nothing"))
    laws = judged(Entry("torch", peer))["laws"]
    assert {name: law["verdict"] for name, law in laws.items()} == {"oracle": "broken", "sizes": "broken"}
    assert (laws["oracle"]["kept"], laws["oracle"]["broken"]) == (1, 1)
    assert laws["oracle"]["first"].startswith("causal: the output")


ORACLE = next(law for law in LAWS if law.name == "oracle")


@pytest.mark.parametrize("peer", [*FLA_NAIVE.peers, *GGML.peers], ids=str)
def test_references_and_ggml_agree_with_the_definition(peer):
    pytest.importorskip("xllamacpp" if peer in GGML.peers else "einops")
    case = next(case for case in CASES if case.name == "causal")
    if not peer.gqa:
        case = dataclasses.replace(case, num_kv_heads=case.num_heads)
    tried = try_law(peer.subject(), ORACLE, peer.case_for(ORACLE, case), peer.dtype)
    assert tried.verdict == "kept", tried


def test_recurrences_are_not_tried_on_long_sequences():
    entry = next(entry for entry in ENTRIES if entry.longest)
    long = [case.name for case in SIZE_CASES if is_tried(entry, case) and case.kv_len > entry.longest]
    assert not long
    assert any(is_tried(entry, case) for case in SIZE_CASES)


def test_pages_are_written_from_the_results_alone(tmp_path):
    page = tmp_path / "en" / "field.md"
    page.parent.mkdir()
    page.write_text(f"<!-- made by: {COMMAND} -->\n\nold\n\n<!-- made until here -->\n", encoding="utf-8")
    results = tmp_path / "field.json"
    results.write_text(RESULTS.read_text("utf-8"), encoding="utf-8")
    assert main(["--only-pages", "--results", str(results), "--page", str(page)]) == 0
    assert generated(page.read_text("utf-8"), COMMAND) == written(FOUND, "en")
