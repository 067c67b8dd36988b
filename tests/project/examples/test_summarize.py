"""Tests of summaries: texts are cut into sentences, padding changes nothing, and both models learn."""

from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "summarize.py"
NOUNS = ["game", "editor", "library", "server", "font", "player", "driver", "shell"]


def made(example, count=300):
    """Return texts with one sentence that begins with Overall, anywhere, and summaries of its noun."""
    rng = np.random.default_rng(0)
    texts, summaries = [], []
    for _ in range(count):
        noun, *others = rng.choice(NOUNS, 4, replace=False)
        sentences = [f"Here no {other} is meant." for other in others]
        sentences.insert(int(rng.integers(4)), f"Overall {noun} is said.")
        texts.append(sentences)
        summaries.append(f"Overall {noun}")
    cut = count * 9 // 10
    return example.Corpus(texts[:cut], summaries[:cut], texts[cut:], summaries[cut:])


def vectors(sentences):
    """Return a vector for each sentence that marks the words in it."""
    words = ["Overall", "Here", *NOUNS]
    return torch.tensor([[float(word in sentence.split()) for word in words] for sentence in sentences])


def test_texts_are_cut_into_sentences(example):
    paragraphs = ["It plays chess. See e.g. the manual! Version 2.0 is new.", "The end?"]
    assert example.sentences_of(paragraphs) == [
        "It plays chess.", "See e.g. the manual!", "Version 2.0 is new.", "The end?",
    ]  # fmt: skip


def test_texts_of_different_lengths_do_not_disturb_each_other(example):
    torch.manual_seed(0)
    chooser = example.Chooser(10, example.QUICK).double().eval()
    x = torch.randn(2, 6, 10, dtype=torch.float64)
    together = chooser(x, [6, 3])
    torch.testing.assert_close(chooser(x[1:, :3], [3])[0], together[1, :3])
    assert together[1, 3:].isneginf().all()


@pytest.mark.slow
def test_both_learn_what_sums_up_a_text(example, tmp_path, monkeypatch):
    settings = example.dataclasses.replace(
        example.QUICK, vocab_size=330, embed_dim=32, feed_forward_dim=32, chosen_from=200, choosing_steps=100,
        steps=500, learning_rate=1e-2, dropout_p=0.0,
    )  # fmt: skip
    monkeypatch.setattr(example, "QUICK", settings)
    rows = example.main(["--quick", "--out", str(tmp_path)], corpus=made(example), embed=vectors)
    by_who = {row["who"]: row["mean"] for row in rows}
    assert (
        by_who["a sentence chosen by attention among sentences"]
        > 0.95 * by_who["the best sentence (knows the summary)"]
    )
    assert by_who["written by a Transformer"] > 0.9
    assert by_who["the first sentence"] < 0.5
