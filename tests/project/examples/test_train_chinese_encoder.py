"""Characters are hidden and guessed: questions, counts and the tokenizer are what they say, and it learns."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "train_chinese_encoder.py"


@pytest.fixture
def sources(example, monkeypatch):
    """Four sources of a language of 12 characters, in which each is followed by one of two."""

    def made(seed):
        rng = np.random.default_rng(seed)
        paragraphs = []
        for _ in range(60):
            text = [int(rng.integers(12))]
            for _ in range(140):
                text.append((text[-1] * 5 + 1 + int(rng.integers(2))) % 12)
            paragraphs.append("".join("天地人山水火日月风雨花鸟"[own] for own in text) + "。")
        return example.Source("Chinese", f"made {seed}", "none", ["\n\n".join(paragraphs)])

    for seed, name in enumerate(("stories", "romance", "plays", "songs")):
        monkeypatch.setattr(example, name, lambda seed=seed: made(seed))


def test_each_character_is_a_token(example):
    tokenizer = example.tokenizer_of(["看见看见猫。", "猫 Ab"], 2)
    found = tokenizer.encode("看 见狗猫")
    assert found.tokens == ["[CLS]", "看", "见", "[UNK]", "猫", "[SEP]"]
    assert found.word_ids == [None, 0, 1, 2, 3, None]
    assert tokenizer.get_vocab_size() == 5 + 3


def test_questions_hide_every_eighth_character(example):
    real, where = example.questions(torch.arange(5, 5 + 62 * 9))
    assert real.shape == (9, 64)
    assert real[:, 0].eq(example.CLS).all()
    assert real[:, -1].eq(example.SEP).all()
    assert torch.equal(real[:, 1:-1].flatten(), torch.arange(5, 5 + 62 * 9))
    for row, own in enumerate(where):
        assert own.nonzero()[:, 0].tolist() == [i for i in range(1, 63) if i % 8 == row % 8]


def test_neighbours_say_what_counts_say(example):
    rng = torch.Generator().manual_seed(0)
    learned = [torch.randint(5, 9, (300,), generator=rng), torch.randint(5, 9, (200,), generator=rng)]
    real, where = example.questions(torch.randint(5, 9, (62 * 2,), generator=rng))
    pairs = [(int(a), int(b)) for own in learned for a, b in itertools.pairwise(own)]
    singles = torch.cat(learned).tolist()
    alone = [(singles.count(c) + 0.5) / (len(singles) + 0.5 * 9) for c in range(9)]

    def follows(c, before):
        share = 50 / (50 + singles.count(before))
        return (1 - share) * pairs.count((before, c)) / max(1, singles.count(before)) + share * alone[c]

    right, nats = 0, 0.0
    for row, column in where.nonzero().tolist():
        before, behind = int(real[row, column - 1]), int(real[row, column + 1])
        scores = [follows(c, before) * follows(behind, c) for c in range(9)]
        right += int(np.argmax(scores) == int(real[row, column]))
        nats -= np.log(scores[int(real[row, column])] / sum(scores))
    count = int(where.sum())
    assert example.by_neighbours(learned, real, where, 9) == pytest.approx((right / count, nats / count), rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("sources")
def test_it_learns_what_may_follow(example, tmp_path, monkeypatch):
    monkeypatch.setattr(
        example,
        "QUICK",
        example.dataclasses.replace(example.QUICK, embed_dim=32, tokens=1024, steps=500, warm_up=30),
    )
    card = example.main(["--quick", "--out", str(tmp_path), "--sentence", "天地人"])
    ours, _, often = (row["mean"] for row in card["held_out"]["rows"])
    assert ours > 3 * often
    assert (tmp_path / "looks.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "model" / "tokenizer.json").exists()
