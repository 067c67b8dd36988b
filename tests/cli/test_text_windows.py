"""Texts that are longer than the model reads, in windows."""

import csv
import importlib
import io
import json
import random
import re

import matplotlib.image
import numpy as np
import pytest
import torch

from saccade.cli import look_figures
from saccade.cli.model_reading import subject_of
from saccade.cli.text_windows import windows_of
from saccade.models import minilm, small_decoder
from saccade.statistics import Head
from saccade.text import Word
from saccade.text import words as words_of

TEXT = " ".join(f"The {animal} that eats {number} unbelievable cats sleeps.\n" for number, animal in enumerate(
    ["electroencephalographer", "dog", "lizard", "slow worm"] * 60
))  # fmt: skip


def made_up(sizes, front, back):
    """Words of so many tokens each, with special ones around, and tokens that are all different."""
    found = [Word(f"<{number}>", number, number + 1, special=True) for number in range(front)]
    for number, size in enumerate(sizes):
        found.append(Word(f"w{number}", found[-1].stop if found else 0, (found[-1].stop if found else 0) + size))
    end = found[-1].stop
    found += [Word(f"</{number}>", end + number, end + number + 1, special=True) for number in range(back)]
    return list(range(1000, 1000 + end + back)), found


@pytest.mark.parametrize("front, back", [(0, 0), (1, 1), (2, 0), (0, 1)])
@pytest.mark.parametrize("most", [4, 7, 30])
def test_windows_hold_the_text_once_and_are_as_long_as_words_let_them(front, back, most):
    room = most - front - back
    sizes = random.Random(most).choices(range(1, room + 1), k=50)
    tokens, found = made_up(sizes, front, back)
    windows = windows_of(tokens, found, most)
    own = tokens[front : len(tokens) - back]
    assert [token for window in windows for token in window.tokens[window.own]] == own
    named = [word.text for window in windows for word in window.words if not word.special]
    assert named == [f"w{number}" for number in range(50)]
    for window, after in zip(windows, [*windows[1:], None], strict=True):
        assert len(window.tokens) <= most
        assert window.tokens[:front] == tokens[:front]
        assert window.tokens[len(window.tokens) - back :] == tokens[len(tokens) - back :]
        assert own[window.start : window.stop] == window.tokens[window.own]
        for word in window.words:
            before = next(one for one in found if one.text == word.text)
            assert window.tokens[word.start : word.stop] == tokens[before.start : before.stop]
        assert [word.start for word in window.words] == [0, *(word.stop for word in window.words)][:-1]
        if after is not None:
            following = next(word for word in after.words if not word.special)
            assert len(window.tokens) + following.stop - following.start > most


def test_a_word_too_long_for_a_window_is_cut():
    tokens, found = made_up([2, 11, 1], 1, 1)
    windows = windows_of(tokens, found, 6)
    assert [[word.text for word in window.words[1:-1]] for window in windows] == [["w0"], ["w1"], ["w1"], ["w1", "w2"]]
    assert [token for window in windows for token in window.tokens[window.own]] == tokens[1:-1]


def test_a_model_without_room_is_refused():
    with pytest.raises(
        ValueError, match="tokens read at a time must be more than the 2 special tokens around every text; got 2"
    ):
        windows_of(*made_up([3], 1, 1), 2)


def own_weights(model, shown, text):
    """Between the words of a window of MiniLM, computed without the command."""
    encoding = model.tokenizer.encode(text)
    found = [word for word in words_of(encoding, text) if not word.special]
    start = stop = 0
    for _ in range(shown + 1):
        start, stop = stop, max(word.stop - 1 for word in found if word.stop - 1 <= stop + 510)
    tokens = [101, *encoding.ids[1 + start : 1 + stop], 102]
    with torch.no_grad():
        return start, stop, model.matrices(torch.tensor([tokens]))


# Seconds each.
@pytest.mark.slow
@pytest.mark.parametrize("shown", [0, 1, 3])
def test_the_window_that_is_asked_for_is_shown(run, encoder, tmp_path, shown):
    (tmp_path / "long.txt").write_text(TEXT, encoding="utf-8")
    options = () if shown == 0 else ("--window", str(shown))
    result = run("look", "--file", "long.txt", "--layer", "2", "--head", "5", *options)
    assert result.exit_code == 0, result.output
    start, stop, _ = own_weights(encoder, shown, TEXT)
    count = len(encoder.tokenizer.encode(TEXT).ids) - 2
    said = " ".join(result.output.split())
    windows = int(re.search(r"window \d of (\d+)", said).group(1))
    assert said.startswith(
        f"the text has {count:,} tokens, all-MiniLM-L6-v2 reads 512 at a time; window {shown} of {windows} is shown "
        f"(tokens {start:,} to {stop - 1:,}), --window 0 to {windows - 1} chooses layer 2, head 5 of"
    )
    assert said.count("at a time") == 1
    assert f"whole.png (layer 2, head 5 in all {windows} windows)" in said
    assert min(matplotlib.image.imread("out/look/whole.png").shape[:2]) > 1200


@pytest.mark.ci
def test_statistics_are_those_of_the_window(run, encoder):
    result = run("look", TEXT, "--window", "2", "--stats", "json")
    told = json.loads(result.stdout)
    start, stop, matrices = own_weights(encoder, 2, TEXT)
    assert (told["window"], told["keys"]) == (2, stop - start + 2)
    assert result.stderr.startswith("the text has ")
    assert f"window 2 of 5 is shown (tokens {start:,} to {stop - 1:,})" in result.stderr
    head = next(one for one in told["heads"] if (one["layer"], one["head"]) == (3, 7))
    with torch.no_grad():
        expected = torch.special.entr(matrices[3].to_dense()[0, 7]).sum(-1).mean().item()
    assert head["values"]["entropy"] == pytest.approx(expected, rel=1e-4)
    lines = list(csv.DictReader(io.StringIO(run("look", TEXT, "--window", "2", "--stats", "csv").stdout)))
    assert {line["window"] for line in lines} == {"2"}
    whole = run("look", "cat", "--stats", "json")
    assert (json.loads(whole.stdout)["window"], whole.stderr) == (0, "")


@pytest.mark.ci
@pytest.mark.parametrize("model", [minilm, small_decoder], ids=["encoder", "language model"])
def test_the_map_of_the_whole_has_each_weight_where_its_tokens_stand(model):
    model, steps = model(), []
    text = TEXT[: 5700 if model.config.max_len == 512 else 1800]
    subject = subject_of(model, "model", [text], None, is_pretokenized=False, window=1)
    best = Head(1, 2, 0.0)
    figure = look_figures.draw_full_text(model, subject, best, lambda: steps.append(1))
    count = subject.windows[-1].stop
    assert len(steps) == len(subject.windows) > 2
    assert count <= look_figures._SIDE
    expected = np.full((count, count), np.nan, np.float32)
    for window in subject.windows:
        with torch.no_grad():
            dense = model.matrices(torch.tensor([window.tokens]))[1].to_dense()[0, 2, window.own, window.own]
        if model.config.max_len != 512:
            dense = dense.masked_fill(torch.ones_like(dense, dtype=torch.bool).triu(1), torch.nan)
        expected[window.start : window.stop, window.start : window.stop] = dense.numpy()
    image = figure.axes[0].images[0]
    np.testing.assert_array_equal(np.asarray(image.get_array().filled(np.nan)), expected)
    assert image.get_extent() == [-0.5, count - 0.5, count - 0.5, -0.5]
    (frame,) = figure.axes[0].patches
    start, stop = subject.windows[1].start, subject.windows[1].stop
    assert (frame.get_xy(), frame.get_width()) == ((start - 0.5, start - 0.5), stop - start)
    numbers = [text.get_text().strip() for text in figure.axes[0].texts]
    assert numbers == [str(number) for number in range(len(subject.windows))]


def test_many_tokens_share_pixels_and_the_largest_is_drawn(monkeypatch):
    monkeypatch.setattr(look_figures, "_SIDE", 100)
    model = small_decoder()
    subject = subject_of(model, "model", [TEXT[:1800]], None, is_pretokenized=False, window=0)
    figure = look_figures.draw_full_text(model, subject, Head(0, 0, 0.0), lambda: None)
    cells = figure.axes[0].images[0].get_array()
    assert cells.shape == (100, 100)
    count = subject.windows[-1].stop
    window = subject.windows[1]
    with torch.no_grad():
        dense = model.matrices(torch.tensor([window.tokens]))[0].to_dense()[0, 0, window.own, window.own]
    rows = [i for i in range(window.stop - window.start) if (window.start + i) * 100 // count == 50]
    columns = [i for i in range(window.stop - window.start) if (window.start + i) * 100 // count == 48]
    assert len(rows) > 3
    assert cells[50, 48] == pytest.approx(dense[rows][:, columns].max().item())


def test_windows_too_many_to_be_seen_are_not_drawn(run, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.import_module("saccade.cli.look"), "MOST_WINDOWS", 2)
    result = run("look", " ".join(["cat"] * 30), "--at-once", "8")
    assert result.exit_code == 0, result.output
    assert "note: 5 windows are too many for one picture; at most 2 are drawn" in " ".join(result.output.split())
    assert not (tmp_path / "out" / "look" / "whole.png").exists()


@pytest.mark.ci
def test_less_may_be_read_at_a_time(run, monkeypatch):
    result = run("look", "The cat, which was very hungry, ate the fish.", "--at-once", "8", "--window", "1")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert said.startswith(
        "the text has 12 tokens, all-MiniLM-L6-v2 reads 8 at a time; window 1 of 2 is shown (tokens 6"
    )
    result = run("look", "cat", "--at-once", "2")
    assert result.exit_code == 2
    assert "tokens read at a time must be more than the 2 special tokens around every text; got 2" in result.stderr
    monkeypatch.setattr(importlib.import_module("saccade.cli.look"), "_MOST_WEIGHTS", 72 * 100)
    result = run("look", "The cat, which was very hungry, ate the fish.")
    assert result.exit_code == 2
    assert result.stderr == (
        "saccade look: TEXT must be shorter to be drawn; got 14 tokens in each of 72 heads.\n"
        "Hint: --at-once 10 cuts it into windows; --html and --stats take any length\n"
    )
    assert run("look", "The cat, which was very hungry, ate the fish.", "--at-once", "10").exit_code == 0


@pytest.mark.ci
def test_given_words_are_cut_too(run):
    result = run("look", "--tokens", *(["New York"] * 300), "--window", "1")
    assert result.exit_code == 0, result.output
    assert "the text has 600 tokens, all-MiniLM-L6-v2 reads 512 at a time; window 1 of 2" in result.output.replace(
        "\n", " "
    )
    assert len(re.findall(r"^ *\d+ +New York", result.output, re.MULTILINE)) == 300 - 255
