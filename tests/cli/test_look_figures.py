"""`saccade look`: figures without special tokens, and with titles of their own."""

import re

import pytest
import torch

from saccade import viz


def drawn(monkeypatch, *arguments):
    """The figures that a command draws, by the names of their functions, with their options."""
    found = {}

    def watched(name, function):
        def draw(weights, **options):
            found[name] = weights, options
            return function(weights, **options)

        return draw

    for name in ("heatmap", "mosaic", "bipartite"):
        monkeypatch.setattr(viz, name, watched(name, getattr(viz, name)))
    return found


def test_special_tokens_are_hidden_in_the_figures_and_the_table(run, monkeypatch, tmp_path):
    shown = drawn(monkeypatch)
    sentence = ["look", "The cat saw a dog.", "--layer", "0", "--head", "10", "--out", str(tmp_path)]
    with_them = run(*sentence).output
    weights, options = shown["heatmap"]
    assert options["x_labels"] == ["[CLS]", "The", "cat", "saw", "a", "dog", ".", "[SEP]"]
    without = run(*sentence, "--hide-special").output
    few, options = shown["heatmap"]
    assert options["x_labels"] == options["y_labels"] == ["The", "cat", "saw", "a", "dog", "."]
    torch.testing.assert_close(few, weights[1:-1, 1:-1])
    assert shown["mosaic"][0].shape[2:] == (6, 6)
    table = without.split("looks at", 1)[1].split("part ", 1)[0]
    assert "[CLS]" not in table
    assert "[CLS]" in with_them.split("looks at", 1)[1]
    for line in ("[CLS] and [SEP] get", "sink"):  # the numbers of the model are those of all tokens
        assert [one for one in without.splitlines() if line in one] == [
            one for one in with_them.splitlines() if line in one
        ]


def test_a_title_stands_above_every_figure(run, monkeypatch, tmp_path):
    shown = drawn(monkeypatch)
    run("look", "The cat saw a dog.", "--title", "Who sees whom", "--out", str(tmp_path))
    assert {options["title"] for _, options in shown.values()} == {"Who sees whom"}
    assert re.search(r"layer \d, head \d", shown["heatmap"][1]["subtitle"])
    run("look", "The cat saw a dog.", "--title", "A page", "--html", str(tmp_path / "page.html"))
    assert "<title>A page</title>" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--stats", "csv", "--hide-special"], "--hide-special must be left out if --stats is given"),
        (["--stats", "csv", "--title", "x"], "--title must be left out if --stats is given"),
        (["--html", "x.html", "--hide-special"], "--hide-special must be left out if --html is given"),
    ],
)
def test_options_of_figures_are_refused_where_none_is_drawn(run, options, told):
    result = run("look", "A cat.", *options)
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())
