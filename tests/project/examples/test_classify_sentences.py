"""The example judges texts it has not seen, with attention better than without where order says what is meant."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "classify_sentences.py"


def made(count=600):
    """Texts of which the words say nothing, but which of two comes first: 好 before 坏 is for, after it is against."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        words = list(rng.choice(list("天地人山水火"), 8))
        first, second = sorted(rng.choice(8, 2, replace=False))
        is_for = bool(rng.integers(2))
        words[first], words[second] = ("好", "坏") if is_for else ("坏", "好")
        found.append(("".join(words), is_for))
    return found


def test_texts_are_cut_and_split(example):
    texts = example.cut([("好 书。", True), ("   ", False), ("坏书" * 9, False)], "zh", 5)
    assert sorted(map("".join, texts.words)) == ["坏书坏书坏", "好书。"]
    assert example.english_words("It isn't bad!") == ["it", "isn't", "bad", "!"]
    train, test = example.cut(made(100), "zh", 64).split(10)
    assert (len(train.words), len(test.words)) == (90, 10)
    assert len(train.is_for) == 90


def test_padding_changes_nothing(example):
    train, _ = example.cut(made(50), "zh", 64).split(10)
    known = example.Vocabulary(train, "zh", 1)
    for attends in (True, False):
        torch.manual_seed(0)
        module = example.Classifier(known, example.QUICK, attends=attends).double().eval()
        together = module(*known.batch(["好坏", "山水火人天", "坏"]))
        alone = torch.cat([module(*known.batch([words])) for words in ("好坏", "山水火人天", "坏")])
        torch.testing.assert_close(together, alone)


@pytest.mark.slow
def test_it_learns_what_a_mean_cannot_say(example, tmp_path, monkeypatch):
    settings = example.dataclasses.replace(example.QUICK, steps=250, embed_dim=32, learning_rate=5e-3, dropout_p=0.0)
    monkeypatch.setattr(example, "QUICK", settings)
    rows = example.main(["--quick", "--language", "zh", "--out", str(tmp_path)], texts=lambda language: made())
    by_who = {row["who"].partition(": ")[2]: row["mean"] for row in rows}
    attention, mean, line, often = by_who.values()
    assert attention > 0.95
    assert mean < 0.75
    assert attention >= line > often
    assert (tmp_path / "looks-zh.png").read_bytes().startswith(b"\x89PNG")
    assert list(itertools.chain(tmp_path.glob(".*"))) == []
