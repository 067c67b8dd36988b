"""Other libraries' attention under our laws: the documents say what is found, and why, and are never stale."""

import re
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks.generated_part import generated, with_generated
from benchmarks.peers.__main__ import main
from benchmarks.peers.local_attention import LOCAL_ATTENTION
from benchmarks.peers.table import LIBRARIES, PEERS, command, find, written
from benchmarks.peers.torch_attention import TORCH, across, within

from saccade import testing

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "docs" / language / "conformance-of-peers.md" for language in ("en", "zh")]
# The last digits may differ from machine to machine.
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?|\d+e[-+]\d+|Jacobian mismatch.*")
QUICK = [library for library in LIBRARIES if library.name not in ("torch", "flex")]

found = cache(find)


def of_this_version(page, library):
    """The table of a library on a page, for tests about the very version that it speaks of."""
    table = generated(page.read_text(encoding="utf-8"), command(library))
    says = re.search(r"\| \S+ (\S+) \|", table)[1]
    try:
        version = library.version
    except PackageNotFoundError:
        pytest.skip("needs pip install 'saccade-attention[bench]'")
    if version != says:
        anew = f"python -m benchmarks.peers {' '.join(str(page.relative_to(ROOT)) for page in PAGES)}"
        pytest.skip(f"the page speaks of {library.package} {says}, this is {version}; to make it anew: {anew}")
    return table


def stated(text):
    """(law, peer) for each that a page gives a reason for."""
    named = re.findall(r"`(\w+)` \(([\d, ]+)\)", text)
    return {(law, int(number)) for law, numbers in named for number in numbers.split(", ")}


def shown_as_broken(table):
    """(law, peer) for each that a table marks as broken."""
    head, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"
    ]
    return {
        (law, int(number))
        for names, *marks in rows
        for law in re.findall(r"`(\w+)`", names)
        for number, mark in zip(head[1:], marks, strict=True)
        if mark == "✗"
    }


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_the_documents_show_what_is_found(library):
    for page in PAGES:
        table = of_this_version(page, library)
        assert NUMBER.sub("#", table) == NUMBER.sub("#", written(library, found(library.peers)))


@pytest.mark.ci
@pytest.mark.parametrize("library", QUICK, ids=lambda library: library.name)
def test_a_sample_of_what_the_documents_show_is_found(library):
    laws = [law for law in testing.LAWS if law.name in ("oracle", "ones")]
    table = of_this_version(PAGES[0], library)
    broken = {(one.law, one.peer) for one in find(library.peers, laws) if one.verdict == "broken"}
    assert broken == {(law, peer) for law, peer in shown_as_broken(table) if law in ("oracle", "ones")}


def test_local_attention_is_attention_where_every_row_sees_something():
    of_this_version(PAGES[0], LOCAL_ATTENTION)
    (peer, _), oracle = LOCAL_ATTENTION.peers, testing.LAWS[0]
    for case in peer.cases():
        if case.name in ("causal", "blocks-of-4-12", "window-of-4-12"):
            assert [one.verdict for one in find([peer], [oracle], [case])] == ["kept"], case


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_gives_a_reason_for_each_broken_law(page):
    text = page.read_text(encoding="utf-8")
    tables = [generated(text, command(library)) for library in LIBRARIES]
    assert stated(text) == {broken for table in tables for broken in shown_as_broken(table)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_peer_is_described(page):
    text = page.read_text(encoding="utf-8")
    described = re.findall(r"^(\d+)\. `(.+?)`", text, re.MULTILINE)
    assert described == [(str(number), peer.call) for number, peer in enumerate(PEERS, 1)]


@pytest.mark.parametrize("need_weights", [True, False])
def test_training_and_evaluation_differ_in_self_attention_only(need_weights):
    for case in testing.CASES[:30]:
        query, key, value, *_ = case.inputs(torch.float32)
        if case.head_dim != case.value_dim:
            continue
        copies = case.num_heads // case.num_kv_heads
        tensors = (query, key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1), case.allowed)
        trained, evaluated = (across(*tensors, need_weights=need_weights, training=mode) for mode in (True, False))
        torch.testing.assert_close(trained, evaluated, rtol=0.0, atol=0.0, equal_nan=True)


def test_both_adapters_of_the_module_compute_attention():
    case = next(case for case in testing.CASES if case.name == "window")
    problem = case.problem().ungrouped()
    tensors = (problem.query, problem.key, problem.value, problem.allowed)
    want, _ = problem.truth()
    for adapter in (across, within):
        for mode in (True, False):
            got = adapter(*tensors, need_weights=mode, training=not mode)
            torch.testing.assert_close(got, want, rtol=0.0, atol=testing.tolerance(torch.float64, "output"))


def test_torch_loses_a_nan_where_no_mask_is_given():
    of_this_version(PAGES[0], TORCH)
    x = torch.ones(1, 1, 2, 8)
    nothing = F.scaled_dot_product_attention(x, x * torch.nan, x)
    assert torch.equal(nothing, torch.zeros_like(x))
    assert F.scaled_dot_product_attention(x, x * torch.nan, x, torch.ones(2, 2, dtype=torch.bool)).isnan().all()


@pytest.mark.slow
def test_float32_breaks_the_same_laws():
    of_this_version(PAGES[0], TORCH)
    narrow = find(TORCH.peers, dtype=torch.float32)
    assert [(finding.law, finding.peer, finding.verdict) for finding in narrow] == [
        (finding.law, finding.peer, finding.verdict) for finding in found(TORCH.peers)
    ]


def test_a_page_without_the_place_for_it_is_refused():
    with pytest.raises(ValueError, match="page must hold the lines"):
        with_generated("# Nothing here", command(TORCH), "a table")


def test_the_command_writes_pages_or_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "benchmarks.peers.__main__.find", lambda peers: found(peers[:1], testing.LAWS[:2], testing.CASES[:2])
    )
    page = tmp_path / "page.md"
    page.write_text(with_generated(PAGES[0].read_text(encoding="utf-8"), command(TORCH), "stale"), encoding="utf-8")
    main(["--only", "torch", str(page)])
    main(["--only", "torch"])
    assert generated(page.read_text(encoding="utf-8"), command(TORCH)) == capsys.readouterr().out.rstrip("\n")
