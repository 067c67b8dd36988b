"""The declared rule beside what was measured, as a figure."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb, to_rgba

from saccade import audit, masks, models, viz
from saccade.auditing.report import COLOURS

# Matrices for linear red, green and blue as seen by dichromats: Machado et al. 2009, severity 1; and without colour.
SEEN_BY = {
    "everybody": np.eye(3),
    "protanopes": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopes": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopes": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
    "printers": [[0.2126, 0.7152, 0.0722]] * 3,
}


@pytest.fixture(scope="module")
def report():
    return audit(models.small_decoder(), masks.Causal(), length=12)


def inks(axes):
    (image,) = axes.images
    return image.to_rgba(image.get_array())


def test_every_pair_has_the_colour_of_what_it_is(report):
    declared, measured = (
        torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]]),
        torch.tensor([[1, 1, 0], [1, 1, 0], [0, 1, 0]]),
    )
    made = dataclasses.replace(report, declared=declared.bool(), measured=measured.bool())
    left, right = made.figure().axes
    for axes, words in (
        (left, "allowed hidden allowed allowed allowed hidden hidden allowed allowed"),
        (right, "allowed leak blind allowed allowed hidden hidden allowed blind"),
    ):
        expected = np.array([to_rgba(COLOURS[word]) for word in words.split()]).reshape(3, 3, 4)
        np.testing.assert_allclose(inks(axes), expected, atol=1e-6)
        assert axes.get_ylim() == (2.5, -0.5)  # the first output is at the top
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("token", "output")


def test_the_legend_says_what_the_colours_mean_and_how_many_pairs_are_wrong(report):
    told = report.declared.clone()
    told[5, :4] = False
    told[3, 7:] = True
    figure = dataclasses.replace(report, declared=told).figure()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "allowed",
        "hidden",
        "leak: hidden, but seen (4)",
        "blind: allowed, but not seen (5)",
    ]
    assert [patch.get_facecolor() for patch in legend.get_patches()] == [to_rgba(ink) for ink in COLOURS.values()]


def test_a_title_is_text_and_fits(report, tmp_path):
    assert report.figure().get_suptitle() == "Decoder, rule Causal() in 4 layers"
    assert report.figure("$x_1$").get_suptitle() == "$x_1$"
    long = dataclasses.replace(report, rule="; ".join(f"layer {layer}: Causal()" for layer in range(99)))
    figure = long.figure()
    viz.save(figure, tmp_path / "long.png")
    assert figure._suptitle.get_window_extent().x1 < figure.bbox.x1
    assert figure.get_suptitle().endswith("…")
    heights = [axes.get_window_extent().height for axes in figure.axes]
    assert min(heights) > 400  # the title leaves the panels room


@pytest.mark.parametrize("length", [8, 48, 64])
def test_outputs_and_tokens_are_numbered_alike(report, length):
    pairs = torch.ones(length, length, dtype=torch.bool).tril()
    for axes in dataclasses.replace(report, declared=pairs, measured=pairs).figure().axes:
        assert axes.get_xticks().tolist() == axes.get_yticks().tolist()
        assert len(axes.get_xticks()) >= 4


def test_a_rule_that_was_not_given_is_called_assumed():
    assert audit(models.small_decoder(), length=8).figure().get_suptitle() == (
        "Decoder, rule assumed from the configuration: Causal() in 4 layers"
    )


@pytest.mark.parametrize("who", SEEN_BY)
def test_the_colours_differ_in_contrast(who):
    """All pairs of colours have a contrast (WCAG 2) of at least 1.4, so that no two differ in hue alone."""
    srgb = np.array([to_rgb(ink) for ink in COLOURS.values()])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    light = (linear @ np.array(SEEN_BY[who]).T).clip(0, 1) @ [0.2126, 0.7152, 0.0722] + 0.05
    for one, other in itertools.combinations(light, 2):
        assert max(one, other) / min(one, other) > 1.4


def test_without_pairs_there_is_nothing_to_draw():
    report = audit(lambda x: x.cumsum(1).detach(), masks.Causal(), inputs=torch.randn(1, 5, 3))
    with pytest.raises(ValueError, match=r"Report\.figure: the input must have at most 64 tokens, and outputs with"):
        report.figure()
