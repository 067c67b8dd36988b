"""Inputs without a page are refused with one sentence before any weight is computed and any file is touched."""

import re
from collections import OrderedDict

import numpy as np
import pytest
import torch
from tests.viz.page.layer_kinds import attention

import saccade as sc
from saccade.matrix import Matrix
from saccade.viz import live_report, report, report_widget


class Watched(Matrix):
    """A matrix that counts how often its blocks are computed."""

    def __init__(self, inner):
        self.inner, self.asked = inner, 0

    shape = property(lambda self: self.inner.shape)
    dtype = property(lambda self: self.inner.dtype)
    device = property(lambda self: self.inner.device)
    kv_heads = property(lambda self: self.inner.kv_heads)

    def blocks(self, batch=None, head=None, rows=None):
        self.asked += 1
        return self.inner.blocks(batch, head, rows)


def words(count):
    return [f"w{i}" for i in range(count)]


SHAPE = (2, 4, 5, 7)  # of the matrix that is asked
WORDS = words(7)
NO_STRINGS = "tokens must be a list of strings; got {}."
BAD = {
    "few tokens": ({"tokens": words(6)}, "tokens must be one for each of the 7 keys of layer attention; got 6."),
    "many tokens": ({"tokens": words(8)}, "tokens must be one for each of the 7 keys of layer attention; got 8."),
    "few keys": (
        {"tokens": (words(5), words(6))},
        "tokens must be one for each of the 7 keys of layer attention; got 6.",
    ),
    "few queries": (
        {"tokens": (words(4), words(7))},
        "tokens must be one for each of the 5 queries of layer attention; got 4.",
    ),
    "swapped pair": (
        {"tokens": (words(7), words(5))},
        "tokens must be one for each of the 7 keys of layer attention; got 5.",
    ),
    "a bare string": ({"tokens": "seventy"}, NO_STRINGS.format("str")),
    "an array": ({"tokens": np.array(WORDS)}, NO_STRINGS.format("ndarray")),
    "a tensor": ({"tokens": torch.arange(7)}, NO_STRINGS.format("Tensor")),
    "ids": ({"tokens": list(range(7))}, "tokens must be strings; got int."),
    "bytes": ({"tokens": [b"w"] * 7}, "tokens must be strings; got bytes."),
    "one that is none": ({"tokens": [*words(6), None]}, "tokens must be strings; got NoneType."),
    "a pair with a number": ({"tokens": (words(5), 7)}, NO_STRINGS.format("int")),
    "no name that fits": (
        {"tokens": {"decoder*": WORDS}},
        "tokens must have a name that matches layer attention; got decoder*.",
    ),
    "no names at all": ({"tokens": {}}, "tokens must have a name that matches layer attention; got none."),
    "by name, few": (
        {"tokens": {"*": words(4)}},
        "tokens must be one for each of the 7 keys of layer attention; got 4.",
    ),
    "by another name, a string": ({"tokens": {"*": WORDS, "x": "seven"}}, NO_STRINGS.format("str")),
    "head": ({"heads": [(0, 4)]}, "heads must be (layer, head) of 1 layers, of [4] heads; got (0, 4)."),
    "negative head": ({"heads": [(0, -1)]}, "heads must be (layer, head) of 1 layers, of [4] heads; got (0, -1)."),
    "layer": ({"heads": [(0, 0), (1, 0)]}, "heads must be (layer, head) of 1 layers, of [4] heads; got (1, 0)."),
    "a number for heads": ({"heads": 3}, "heads must be pairs (layer, head); got int."),
    "numbers for pairs": ({"heads": [0, 1]}, "heads must be pairs (layer, head); got 0."),
    "triples": ({"heads": [(0, 1, 2)]}, "heads must be pairs (layer, head); got (0, 1, 2)."),
    "halves": ({"heads": [(0, 1.5)]}, "heads must be pairs (layer, head); got (0, 1.5)."),
    "text for pairs": ({"heads": ["ab"]}, "heads must be pairs (layer, head); got 'ab'."),
    "batch": ({"batch": 2}, "batch must be from 0 to 1 in layer attention; got 2."),
    "negative batch": ({"batch": -1}, "batch must be an int of at least 0; got -1."),
    "half a batch": ({"batch": 0.5}, "batch must be an int of at least 0; got 0.5."),
    "language": ({"language": "de"}, "language must be one of 'en', 'zh'; got 'de'."),
    "size": ({"size": 0}, "size must be an int of at least 1; got 0."),
    "size in words": ({"size": "8MB"}, "size must be an int of at least 1; got '8MB'."),
    "title": ({"title": 3}, "title must be a string; got int."),
}
OF_TWO = {
    "names in one": ({"names": "ab"}, "names must be two strings; got 'ab'."),
    "three names": ({"names": ("a", "b", "c")}, "names must be two strings; got ('a', 'b', 'c')."),
    "no names": ({"names": (1, 2)}, "names must be two strings; got (1, 2)."),
    "names that are none": ({"names": None}, "names must be two strings; got None."),
    "tokens of nobody": (
        {"other_tokens": WORDS},
        "other_tokens must be omitted without a second recording; got list.",
    ),
}


def matrix():
    return Watched(attention(5, 7))


def check(make, sentence, where):
    with pytest.raises((ValueError, TypeError), match=re.escape(f"{where}: {sentence}")):
        make()


@pytest.mark.parametrize("options, sentence", [*BAD.values(), *OF_TWO.values()], ids=[*BAD, *OF_TWO])
def test_options_that_make_no_page(tmp_path, options, sentence):
    watched, path = matrix(), tmp_path / "page.html"
    path.write_text("what was there")
    check(lambda: report(watched, path, **options), sentence, "report")
    check(lambda: report_widget(watched, **options), sentence, "report_widget")
    assert watched.asked == 0
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "options, sentence", [(own, said) for own, said in BAD.values() if "layer" not in said.split("got")[0]]
)
def test_a_page_that_is_kept_up_to_date_refuses_what_it_can_at_once(tmp_path, options, sentence):
    check(lambda: live_report({}, tmp_path / "page.html", **options), sentence, "live_report")


@pytest.mark.parametrize("every", [0.0, -1.0, float("nan"), float("inf"), "often", True])
def test_times_between_pages(tmp_path, every):
    with pytest.raises(
        (ValueError, TypeError), match=r"live_report: every must be a finite number of at least 0.1; got"
    ):
        live_report({}, tmp_path / "page.html", every=every)


def test_an_argument_that_is_no_recording_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"live_report: recording must be a recording; got list"):
        live_report([attention(3, 3)], tmp_path / "page.html")


@pytest.mark.parametrize("height", [99, 0, 700.5, "tall"])
def test_heights(height):
    with pytest.raises((ValueError, TypeError), match=r"report_widget: height must be an int of at least 100; got"):
        report_widget(attention(3, 3), height=height)


RULE = "be a matrix, weights [batch, heads, q_len, kv_len], a list or a dict of them, or a recording"
WEIGHTS = "weights must be real numbers [batch, heads, q_len, kv_len]; got"
GIVEN = {
    "nothing": (None, f"given must {RULE}; got NoneType."),
    "a string": ("attention", f"given must {RULE}; got str."),
    "a number": (3, f"given must {RULE}; got int."),
    "a generator": ((one for one in [attention(3, 3)]), f"given must {RULE}; got generator."),
    "a set": ({1, 2}, f"given must {RULE}; got set."),
    "no layers": ([], "given must contain at least one layer; got none."),
    "an empty dict": ({}, "given must contain at least one layer; got none."),
    "nested lists": ([[[[1.0]]]], f"given must {RULE}; got list in layer 0."),
    "one that is none": ([attention(3, 3), None], f"given must {RULE}; got NoneType in layer 1."),
    "a model": ({"model": torch.nn.Linear(2, 2)}, f"given must {RULE}; got Linear in layer model."),
    "the class": (sc.AttentionMatrix, f"given must {RULE}; got the class"),
    "scores": (
        attention(3, 3).scores,
        f"given must {RULE}; got ScoreMatrix, which contains scores, in layer attention.",
    ),
    "two axes": (torch.ones(3, 3), f"{WEIGHTS} shape [3, 3], torch.float32 in layer attention."),
    "five axes": ([np.ones((1, 1, 1, 1, 1))], f"{WEIGHTS} shape [1, 1, 1, 1, 1], float64 in layer 0."),
    "complex": (torch.ones(1, 1, 2, 2) * 1j, f"{WEIGHTS} shape [1, 1, 2, 2], torch.complex64 in layer attention."),
    "complex numpy": (np.ones((1, 1, 2, 2)) * 1j, f"{WEIGHTS} shape [1, 1, 2, 2], complex128 in layer attention."),
    "bools": (torch.ones(1, 1, 2, 2) > 0, f"{WEIGHTS} shape [1, 1, 2, 2], torch.bool in layer attention."),
    "objects": (np.full((1, 1, 1, 1), "a", object), f"{WEIGHTS} shape [1, 1, 1, 1], object in layer attention."),
    "texts": (np.full((1, 1, 1, 1), "a"), f"{WEIGHTS} shape [1, 1, 1, 1], <U1 in layer attention."),
    "no keys": (torch.ones(1, 1, 2, 0), "weights must have no empty axis; got shape [1, 1, 2, 0] in layer attention."),
    "no heads": ([np.ones((1, 0, 2, 2))], "weights must have no empty axis; got shape [1, 0, 2, 2] in layer 0."),
    "no queries": (attention(0, 5), "weights must have no empty axis; got shape [2, 4, 0, 5] in layer attention."),
}


@pytest.mark.parametrize("given, sentence", GIVEN.values(), ids=GIVEN)
def test_an_argument_that_is_no_attention_is_refused(tmp_path, given, sentence):
    check(lambda: report(given, tmp_path / "page.html"), sentence, "report")
    if given is not None:
        check(lambda: report(attention(3, 3), tmp_path / "page.html", other=given), sentence, "report")
    assert list(tmp_path.iterdir()) == []


def test_layers_are_all_checked_before_the_first_is_asked(tmp_path):
    layers = OrderedDict(first=matrix(), second=Watched(attention(5, 8)))
    with pytest.raises(ValueError, match=r"tokens must be one for each of the 8 keys of layer second; got 7"):
        report(layers, tmp_path / "page.html", tokens=WORDS)
    with pytest.raises(ValueError, match=r"of layer attention; got 8"):
        report(matrix(), tmp_path / "page.html", other=matrix(), tokens=WORDS, other_tokens=words(8))
    assert [layer.asked for layer in layers.values()] == [0, 0]


@pytest.mark.parametrize("where", ["folder", "missing/page.html", "file/page.html", ""])
def test_paths_that_name_no_file(tmp_path, where):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    watched, path = matrix(), tmp_path / where
    for name, make in (("report", lambda: report(watched, path)), ("live_report", lambda: live_report({}, path))):
        check(make, f"path must name a file in an existing folder; got {path}", name)
    assert watched.asked == 0


def test_a_path_that_is_none(tmp_path):
    for name, make in (("report", lambda: report(matrix(), 3)), ("live_report", lambda: live_report({}, None))):
        check(make, "path must be a path; got", name)


def test_an_error_on_the_way_leaves_what_was_there(tmp_path):
    class Broken(Watched):
        def blocks(self, batch=None, head=None, rows=None):
            raise RuntimeError("the model is gone")

    path = tmp_path / "page.html"
    path.write_text("what was there")
    with pytest.raises(RuntimeError, match="the model is gone"):
        report([attention(5, 7), Broken(attention(5, 7))], path)
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_replaced_at_once(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("what was there")
    with open(path) as reader:
        assert report(attention(5, 7), str(path)) == path
        assert reader.read() == "what was there"  # who reads goes on to read the old file
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert list(tmp_path.iterdir()) == [path]
