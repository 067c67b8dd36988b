"""A survey that was ended goes on where it stopped, and never mixes versions."""

import pytest
from benchmarks.survey.progress import Progress

NOW = {"torch": "2", "transformers": "5"}


def test_cells_are_read_again_without_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "survey.unfinished"
    first = Progress(path, NOW)
    first.add("llama", "eager", {"held": ["reach"]})
    first.add("llama", "sdpa", "took more than 3 s")
    with path.open("a") as file:
        file.write('["bert", "eag')
    second = Progress(path, NOW)
    assert second.done == {("llama", "eager"): {"held": ["reach"]}, ("llama", "sdpa"): "took more than 3 s"}
    second.add("bert", "eager", {})
    assert Progress(path, NOW).done == {**second.done, ("bert", "eager"): {}}


def test_cells_of_other_versions_are_refused(tmp_path):
    Progress(tmp_path / "a", NOW)
    with pytest.raises(ValueError, match="versions must be those of the unfinished survey"):
        Progress(tmp_path / "a", {**NOW, "torch": "3"})
