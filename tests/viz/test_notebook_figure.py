"""A notebook shows a figure as a picture, though pyplot does not know it."""

import pickle

import numpy as np

from saccade import viz


def test_a_figure_gives_a_notebook_its_picture():
    assert viz.heatmap(np.eye(2))._repr_png_().startswith(b"\x89PNG")


def test_a_figure_is_still_kept_and_copied():
    copied = pickle.loads(pickle.dumps(viz.heatmap(np.eye(2))))
    assert copied._repr_png_().startswith(b"\x89PNG")
    assert repr(copied).startswith("<Figure size")
