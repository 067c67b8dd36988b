"""Torch's own attention under our laws: the documents say what is found, and why, and are never stale."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from saccade import testing
from saccade.testing.peers import COMMAND, PEERS, find, written
from saccade.testing.peers.__main__ import main
from saccade.testing.peers.torch_attention import across, within
from saccade.text.generated import generated, with_generated

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / language / "conformance-of-peers.md" for language in ("en", "zh")]
# The last digits may differ from machine to machine.
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?|\d+e[-+]\d+")
VERSION = torch.__version__.partition("+")[0]

found = cache(find)


def of_this_torch(page):
    """The text of a page, for tests about the very torch that it speaks of."""
    text = page.read_text(encoding="utf-8")
    version = re.search(r"\| torch (\S+) \|", generated(text, COMMAND))[1]
    if version != VERSION:
        command = f"python -m saccade.testing.peers {' '.join(str(page.relative_to(ROOT)) for page in PAGES)}"
        pytest.skip(f"the page speaks of torch {version}, this is {VERSION}; to make it anew: {command}")
    return text


def stated(text):
    """(law, peer) for each that the last section of a page gives a reason for."""
    named = re.findall(r"`(\w+)` \(([\d, ]+)\)", text.rpartition("\n## ")[2])
    return {(law, int(number)) for law, numbers in named for number in numbers.split(", ")}


@pytest.mark.slow
def test_the_documents_show_what_is_found_and_give_a_reason_for_each_broken_law():
    for text in map(of_this_torch, PAGES):
        assert NUMBER.sub("#", generated(text, COMMAND)) == NUMBER.sub("#", written(found()))
        assert stated(text) == {(finding.law, finding.peer) for finding in found() if finding.verdict == "broken"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_peer_is_described(page):
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^\d\. `(.+?)`", text, re.MULTILINE) == [peer.call for peer in PEERS]


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
    of_this_torch(PAGES[0])
    x = torch.ones(1, 1, 2, 8)
    nothing = F.scaled_dot_product_attention(x, x * torch.nan, x)
    assert torch.equal(nothing, torch.zeros_like(x))
    assert F.scaled_dot_product_attention(x, x * torch.nan, x, torch.ones(2, 2, dtype=torch.bool)).isnan().all()


@pytest.mark.slow
def test_float32_breaks_the_same_laws():
    of_this_torch(PAGES[0])
    narrow = find(dtype=torch.float32)
    assert [(finding.law, finding.peer, finding.verdict) for finding in narrow] == [
        (finding.law, finding.peer, finding.verdict) for finding in found()
    ]


def test_a_page_without_the_place_for_it_is_refused():
    with pytest.raises(ValueError, match="page must hold the lines"):
        with_generated("# Nothing here", COMMAND, "a table")


def test_the_command_writes_pages_or_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "saccade.testing.peers.__main__.find", lambda: found(PEERS[:1], testing.LAWS[:2], testing.CASES[:2])
    )
    page = tmp_path / "page.md"
    page.write_text(with_generated(PAGES[0].read_text(encoding="utf-8"), COMMAND, "stale"), encoding="utf-8")
    main([str(page)])
    main([])
    assert generated(page.read_text(encoding="utf-8"), COMMAND) == capsys.readouterr().out.rstrip("\n")
