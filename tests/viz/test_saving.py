"""A file is whole or not there."""

import os

import numpy as np
import PIL.Image
import pytest

from saccade import viz


@pytest.fixture
def figure():
    return viz.heatmap(np.eye(2))


@pytest.mark.parametrize("name, start", [("map.png", b"\x89PNG"), ("map.svg", b"<?xml"), ("map", b"\x89PNG")])
def test_the_ending_names_the_format(figure, tmp_path, name, start):
    assert viz.save(figure, tmp_path / name) == tmp_path / name
    assert (tmp_path / name).read_bytes().startswith(start)
    assert os.listdir(tmp_path) == [name]


def test_a_failure_leaves_the_old_file_and_nothing_else(figure, tmp_path, monkeypatch):
    path = tmp_path / "map.png"
    path.write_bytes(b"old")

    def half(target, **_):
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(figure, "savefig", half)
    with pytest.raises(OSError, match="disk full"):
        viz.save(figure, path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["map.png"]


def test_an_unknown_format_is_refused(figure, tmp_path):
    with pytest.raises(ValueError, match=r"save: path must end in one of .*png, .*; got .*\.doc"):
        viz.save(figure, tmp_path / "map.doc")
    assert os.listdir(tmp_path) == []


def test_the_width_of_a_slide_enlarges_everything(figure, tmp_path):
    paths = viz.save(figure, tmp_path / "plain.png"), viz.save(figure, tmp_path / "slide.png", width=1920)
    with PIL.Image.open(paths[0]) as image, PIL.Image.open(paths[1]) as slide:
        assert slide.width == 1920
        assert slide.height == pytest.approx(1920 * image.height / image.width, abs=3)


@pytest.mark.parametrize(
    "name, width, message",
    [
        ("map.svg", 1920, r"save: width must be left out unless path ends in \.png; got 1920"),
        ("map.png", 3, r"save: width must be an int of at least 16; got 3"),
        ("map.png", 2**16, r"save: width must be .* got 65536"),
    ],
)
def test_a_wrong_width_is_refused(figure, tmp_path, name, width, message):
    with pytest.raises(ValueError, match=message):
        viz.save(figure, tmp_path / name, width=width)
    assert os.listdir(tmp_path) == []


def test_the_file_is_readable_as_other_files_are(figure, tmp_path):
    (tmp_path / "other").write_text("")
    viz.save(figure, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_mode == (tmp_path / "other").stat().st_mode
