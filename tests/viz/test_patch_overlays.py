"""Word-to-image attention is drawn on the right patches, in colours of the bar."""

import numpy as np
import pytest
import torch

import saccade as sc
from saccade import viz
from saccade.viz.patch_overlays import _SIDE


def sheet(figure):
    return np.asarray(figure.axes[0].images[0].get_array())


def pictures(figure, count):
    """Return the pictures in a row of a figure with a square image, each ``[side, side, 3]``."""
    shown = sheet(figure)[-_SIDE:]
    return [shown[:, place * (_SIDE + 18) : place * (_SIDE + 18) + _SIDE] for place in range(count)]


def redness(picture, rows, columns):
    """Return red less blue in the middle of each patch, ``[rows, columns]``."""
    height, width, _ = picture.shape
    y, x = ((np.arange(n) + 0.5) * size // n for n, size in ((rows, height), (columns, width)))
    middle = picture[y.astype(int)][:, x.astype(int)]
    return middle[..., 0] - middle[..., 2]


def test_each_patch_has_the_colour_of_its_weight():
    weights = torch.linspace(0, 1, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(0))]
    figure = viz.overlay(torch.full((3, 40, 40), 0.5), weights, title="a $ b")
    _, drawn = pictures(figure, 2)
    bar = np.asarray(figure.axes[1].images[0].get_array())
    assert figure.axes[1].images[0].get_extent()[2:] == [0.0, 1.0]
    for place, weight in enumerate(weights.tolist()):
        row, column = divmod(place, 4)
        own = drawn[int((row + 0.5) * _SIDE / 4), int((column + 0.5) * _SIDE / 4)]
        np.testing.assert_allclose(own, bar[round(weight * (len(bar) - 1)), 0], atol=0.02)
    assert figure.axes[0].get_title(loc="left") == "a $ b"
    figure.canvas.draw()


def test_patches_are_squares_in_rows_from_the_top_left():
    weights = torch.zeros(6)
    weights[4] = 1.0
    figure = viz.overlay(torch.zeros(3, 20, 30), weights, grid=(2, 3))
    shown = sheet(figure)
    drawn = shown[:, _SIDE + 18 :]
    np.testing.assert_array_equal(redness(drawn, 2, 3) > 0.3, [[False, False, False], [False, True, False]])
    assert shown.shape[0] == _SIDE * 2 // 3


def test_the_image_itself_is_beside_it_in_colour():
    image = torch.rand(3, 12, 12)
    image[0, 0, 0], image[0, 0, 1] = 0.0, 1.0
    plain, _ = pictures(viz.overlay(image, torch.rand(4)), 2)
    want = torch.nn.functional.interpolate(image[None], size=(_SIDE, _SIDE), mode="bilinear", antialias=True)[0]
    np.testing.assert_allclose(plain, want.permute(1, 2, 0).numpy(), atol=1e-5)
    grey, _ = pictures(viz.overlay(image[0], torch.rand(4)), 2)
    np.testing.assert_array_equal(grey[..., 0], grey[..., 2])


@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_class_token_and_registers_are_skipped(before):
    row = torch.cat([torch.full((before,), 9.0), torch.eye(5).flatten()])
    _, drawn = pictures(viz.overlay(torch.zeros(10, 10), row), 2)
    np.testing.assert_array_equal(redness(drawn, 5, 5) > 0.3, np.eye(5, dtype=bool))


@pytest.mark.parametrize("kind", ["range", "list", "bool", "array"])
def test_patches_within_a_text_are_named(kind):
    row = torch.full((12,), 5.0)
    row[3:7] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    is_patch = torch.zeros(12, dtype=torch.bool)
    is_patch[3:7] = True
    patches = {"range": range(3, 7), "list": [3, 4, 5, 6], "bool": is_patch, "array": np.arange(3, 7)}[kind]
    _, drawn = pictures(viz.overlay(torch.zeros(8, 8), row, patches=patches), 2)
    np.testing.assert_array_equal(redness(drawn, 2, 2) > 0.3, [[False, True], [False, False]])


def test_a_lazy_matrix_gives_the_rows_of_words():
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 5, 8), 2 * torch.randn(2, 4, 1 + 9, 8)
    matrix = sc.AttentionMatrix(query, key)
    dense = matrix.to_dense()[1]
    image = torch.rand(3, 9, 9)
    words = {"cat": 2, "red mat": range(3, 5)}
    for head, rows in ((None, dense.mean(0)), (3, dense[3])):
        lazy = viz.overlay(image, matrix, queries=words, head=head, batch=1)
        want = viz.overlay(image, {"cat": rows[2], "red mat": rows[3:5].mean(0)})
        np.testing.assert_allclose(sheet(lazy), sheet(want), atol=1e-5)
        assert [text.get_text() for text in lazy.axes[0].texts] == ["cat", "red mat"]
    one = viz.overlay(image, matrix, queries=2)
    np.testing.assert_allclose(sheet(one), sheet(viz.overlay(image, matrix.to_dense()[0].mean(0)[2])), atol=1e-5)


def test_all_words_share_one_scale():
    strong, weak = torch.eye(3).flatten(), torch.eye(3).flatten() / 4
    _, first, second = pictures(viz.overlay(torch.zeros(4, 4), {"a": strong, "b": weak}), 3)
    assert redness(first, 3, 3).max() > redness(second, 3, 3).max() + 0.05
    _, alone = pictures(viz.overlay(torch.zeros(4, 4), weak), 2)
    np.testing.assert_allclose(alone[:50, :50], first[:50, :50], atol=1e-6)


def test_nearly_even_weights_are_drawn_from_the_least_on():
    even = 0.01 + torch.linspace(0, 1e-4, 16)
    figure = viz.overlay(torch.rand(4, 4), even)
    assert figure.axes[1].images[0].get_extent()[2:] == pytest.approx([0.01, 0.0101])
    assert viz.overlay(torch.rand(4, 4), even, limits=(0, 1)).axes[1].images[0].get_extent()[2:] == [0, 1]


def test_many_words_fill_their_rows():
    figure = viz.overlay(torch.zeros(6, 6), {f"word {number}": torch.rand(4) for number in range(7)})
    places = [text.get_position() for text in figure.axes[0].texts]
    assert len({y for _, y in places}) == 2  # with the image, two rows of four
    assert len({x for x, _ in places}) == 4


@pytest.mark.parametrize(
    ("weights", "options", "sentence"),
    [
        (torch.rand(7), {}, r"overlay: grid must be given where 7 patches do not form a square"),
        (torch.rand(50, 2, 2), {}, r"weights must be \[kv_len\], or \[rows, columns\] in the shape of the grid"),
        (torch.rand(6), {"grid": (2, 4)}, r"have as many cells as there are patches, 6; got 2 x 4"),
        (
            torch.rand(6),
            {"grid": (1, 2), "patches": range(6)},
            r"have as many cells as there are patches, 6; got 1 x 2",
        ),
        (torch.rand(6), {"patches": [1, 6]}, r"patches must be from 0 to 5; got 6"),
        (torch.rand(6), {"patches": [True, False]}, r"patches must be one bool for each of 6 keys; got 2"),
        (torch.rand(6), {"patches": range(5)}, r"grid must be given where 5 patches do not form a square"),
        (torch.tensor([1.0, float("nan")]), {"grid": (1, 2)}, r"weights must be finite everywhere"),
        (torch.rand(4), {"queries": 0}, r"queries must be omitted for an array of weights; got 0"),
        (torch.rand(4), {"head": 0}, r"head must be omitted for an array of weights"),
        ({}, {}, r"weights must contain at least one row; got none"),
        (torch.rand(4), {"opacity": 2}, r"opacity must be between 0 and 1; got 2"),
    ],
)
def test_wrong_values_are_refused(weights, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        viz.overlay(torch.rand(4, 4), weights, **options)


def test_words_that_are_not_there_are_refused():
    matrix = sc.AttentionMatrix(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 9, 4))
    image = torch.rand(4, 4)
    with pytest.raises(ValueError, match=r"queries must name the tokens of a word for a lazy matrix(.|\n)*locate"):
        viz.overlay(image, matrix)
    for tokens in (3, -1, range(2, 4), range(0)):
        with pytest.raises(ValueError, match="queries must be tokens from 0 to 2"):
            viz.overlay(image, matrix, queries=tokens)
    with pytest.raises(TypeError, match="queries must be an index or a range of tokens; got 'cat'"):
        viz.overlay(image, matrix, queries="cat")
    with pytest.raises(ValueError, match="head must be from 0 to 1"):
        viz.overlay(image, matrix, queries=0, head=2)
    with pytest.raises(TypeError, match="patches must be indices"):
        viz.overlay(image, torch.rand(4), patches=3)
    with pytest.raises(TypeError, match=r"grid must be \(rows, columns\)"):
        viz.overlay(image, torch.rand(4), grid=4)
    with pytest.raises(TypeError, match="names of words must be strings; got int"):
        viz.overlay(image, {3: torch.rand(4)})
