"""A page that is kept up to date: written while a model runs, complete at the end, and honest about what failed."""

import importlib
import threading
import time

import pytest
import torch
from tests.viz.page.page_reader import Page

import saccade as sc
from saccade import masks
from saccade.caches import KVCache
from saccade.recording import record
from saccade.viz import live_report, report
from saccade.viz.page.page_data import read_side

SOON = 0.1  # the least time between two pages
PATIENCE = 30.0


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """Pages come as often as they are asked for, however long one takes."""
    monkeypatch.setattr("saccade.viz.page.live._SHARE", 0.9)


def layer():
    return sc.nn.MultiHeadAttention(16, 2, mask=masks.Causal()).eval()


def until(is_there):
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE
    while not is_there():
        if time.monotonic() > end:
            pytest.fail("nothing came in time")
        time.sleep(0.01)


def page_when(path, is_so):
    """The first page of which something is so."""
    found = []

    def look():
        if path.exists():
            found.append(Page(path))
        return bool(found) and is_so(found[-1])

    until(look)
    return found[-1]


def words(count):
    return [f"w{i}" for i in range(count)]


@torch.no_grad()
def test_pages_come_while_the_model_runs_and_the_last_stays(tmp_path):
    model, path, cache = layer(), tmp_path / "live.html", KVCache()
    with record(model, keep="qk") as recording, live_report(recording, path, every=SOON, title="Running"):
        assert not path.exists()
        model(torch.randn(1, 3, 16), cache=cache)
        first = page_when(path, lambda page: True)
        for _ in range(2):
            model(torch.randn(1, 1, 16), cache=cache)
        later = page_when(path, lambda page: page.layer()["keys"] == 5)
    last = Page(path)
    assert [page.index["live"] for page in (first, later, last)] == [SOON, SOON, 0]
    assert [page.layer()["keys"] for page in (first, later, last)] == [3, 5, 5]
    assert last.index["title"] == "Running"
    assert last.tokens()[1] == list("01234")
    assert list(tmp_path.iterdir()) == [path]


@torch.no_grad()
def test_the_last_page_is_written_without_waiting(tmp_path):
    model, path, before = layer(), tmp_path / "live.html", set(threading.enumerate())
    with record(model) as recording, live_report(recording, path, heads=[(0, 1)], tokens=["a", "b"], language="zh"):
        model(torch.randn(1, 2, 16))
    page = Page(path)
    assert page.index["live"] == 0
    assert page.index["language"] == "zh"
    assert page.tokens()[1] == ["a", "b"]
    assert list(page.layer()["close"]) == ["1"]
    assert set(threading.enumerate()) <= before, "the thread that writes has ended"


def test_an_empty_recording_has_no_page(tmp_path):
    with live_report({}, tmp_path / "live.html", every=SOON):
        time.sleep(2.5 * SOON)
    assert list(tmp_path.iterdir()) == []


@torch.no_grad()
def test_tokens_that_do_not_fit_yet_are_numbers(tmp_path):
    model, path, cache = layer(), tmp_path / "live.html", KVCache()
    with record(model, keep="qk") as recording, live_report(recording, path, every=SOON, tokens=words(4)):
        model(torch.randn(1, 3, 16), cache=cache)
        assert page_when(path, lambda page: True).tokens()[1] == list("012")
        model(torch.randn(1, 1, 16), cache=cache)
        assert page_when(path, lambda page: page.layer()["keys"] == 4).tokens()[1] == words(4)
    assert Page(path).tokens()[1] == words(4)


@torch.no_grad()
def test_tokens_may_grow_with_the_text(tmp_path):
    model, path, cache, text = layer(), tmp_path / "live.html", KVCache(), words(3)
    with record(model, keep="qk") as recording, live_report(recording, path, every=SOON, tokens=lambda: [*text]):
        model(torch.randn(1, 3, 16), cache=cache)
        assert page_when(path, lambda page: True).tokens()[1] == words(3)
        model(torch.randn(1, 1, 16), cache=cache)
        text.append("end")
    assert Page(path).tokens()[1] == [*words(3), "end"]


def run(path, meanwhile=lambda: None, **options):
    """A call of a layer, of which a page is kept; then something else."""
    model = layer()
    with torch.no_grad(), record(model) as recording, live_report(recording, path, **options):
        model(torch.randn(1, 3, 16))
        meanwhile()


def test_tokens_that_never_fit_are_reported_at_the_end(tmp_path):
    path = tmp_path / "live.html"
    with pytest.raises(ValueError, match=r"live_report: tokens must be one for each of the 3 keys of layer .*; got 2"):
        run(path, tokens=words(2))
    page = Page(path)
    assert page.index["live"] == 0
    assert page.tokens()[1] == list("012")


@pytest.mark.parametrize("given, sentence", [(3, "be a list of strings; got int"), ([1, 2, 3], "be strings; got int")])
def test_functions_without_tokens_are_reported_at_the_end(tmp_path, given, sentence):
    with pytest.raises(TypeError, match=f"live_report: tokens must {sentence}"):
        run(tmp_path / "live.html", tokens=lambda: given)


def test_an_error_while_a_page_is_written_ends_the_writing_and_is_raised_at_the_end(tmp_path):
    writers = []

    def tokens():
        writers.append(threading.current_thread())
        raise LookupError(f"call {len(writers)}")

    with pytest.raises(LookupError, match="call 1"):
        run(
            tmp_path / "live.html",
            lambda: until(lambda: writers and not writers[0].is_alive()),
            every=SOON,
            tokens=tokens,
        )
    assert len(writers) == 2  # the thread's, and the last page's
    assert writers[0] is not writers[1]


@pytest.mark.parametrize("options", [{"heads": [(0, 2)]}, {"batch": 1}])
def test_errors_of_the_recording_are_reported_at_the_end(tmp_path, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"live_report: {name} must be"):
        run(tmp_path / "live.html", **options)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_model_is_what_is_raised(tmp_path):
    def fail():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory") as caught:
        run(tmp_path / "live.html", fail, tokens=words(2))
    assert "tokens must be one for each of the 3 keys" in caught.value.__notes__[0]
    assert Page(tmp_path / "live.html").index["live"] == 0  # what was recorded until then


@pytest.mark.ci
@torch.no_grad()
@pytest.mark.parametrize("keep", ["qk", "statistics", ("topk", "statistics")])
def test_pages_are_whole_while_calls_go_on(tmp_path, keep):
    """A call between two looks at a recording breaks no page."""
    model, path, cache, seen = layer(), tmp_path / "live.html", KVCache(), {}

    def step(count):
        model(torch.randn(1, count, 16), cache=cache)
        if path.exists():
            page = Page(path)
            seen[page.layer()["keys"]] = [page.close(0, head).received.shape[0] for head in range(2)]
        return len(seen) > 2

    with record(model, keep=keep) as recording, live_report(recording, path, every=SOON):
        step(20)
        until(lambda: step(1))
    assert Page(path).layer()["keys"] == recording[0].shape[3] > 20
    assert all(received == [keys, keys] for keys, received in seen.items())


@torch.no_grad()
def test_a_call_in_the_middle_of_a_page_is_none_of_its_own(tmp_path, monkeypatch):
    model, cache = layer(), KVCache()

    def read_late(*args):
        model(torch.randn(1, 1, 16), cache=cache)
        return read_side(*args)

    with record(model, keep=("statistics", "topk")) as recording:
        model(torch.randn(1, 4, 16), cache=cache)
        monkeypatch.setattr(importlib.import_module("saccade.viz.page.html_report"), "read_side", read_late)
        page = Page(report(recording, tmp_path / "page.html", tokens=words(4)))
    assert recording[0].shape[3] == 5
    assert (page.layer()["queries"], page.layer()["keys"]) == (4, 4)
    assert page.close(0, 1).received.shape == (4,)
