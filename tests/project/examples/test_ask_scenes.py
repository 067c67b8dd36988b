"""Every question has the answer that one sees, by another way of looking; and questions learn to look."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "ask_scenes.py"
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def _answer(words, things):
    """Answer from the scene as a table of (row, column, digit, ink)."""
    there = [(i // 2, i % 2, own % 10, "dark" if own >= 10 else "light") for i, own in enumerate(things) if own != 20]
    text = " ".join(words)
    if text.startswith("what stands at"):
        found = [
            NAMES[own[2]] for own in there if words[4] == f"{('top', 'bottom')[own[0]]} {('left', 'right')[own[1]]}"
        ]
        return found[0] if found else "nothing"
    if text.startswith("what stands"):
        ((row, column),) = [own[:2] for own in there if NAMES[own[2]] == words[-2]]
        wanted = {
            "left of": (row, column - 1),
            "right of": (row, column + 1),
            "above": (row - 1, column),
            "below": (row + 1, column),
        }[words[2]]
        found = [NAMES[own[2]] for own in there if own[:2] == wanted]
        return found[0] if found else "nothing"
    if text.startswith("how many are"):
        return NAMES[sum(own[3] == words[3] for own in there)]
    if text.startswith("how many times"):
        return NAMES[sum(NAMES[own[2]] == words[3] for own in there)]
    if text.startswith("is the"):
        ((ink,),) = [own[3:] for own in there if NAMES[own[2]] == words[2]]
        return ink
    labels = sorted(own[2] for own in there)
    return NAMES[labels[-1] if "largest" in words else labels[0]]


def test_every_question_has_the_answer_that_one_sees(example):
    rng = np.random.default_rng(0)
    things = torch.from_numpy(example.scenes.draw_things(400, rng, held_out=False))
    kinds = []
    for own, questions in zip(things.tolist(), example.ask_all(things, 6, rng), strict=True):
        assert len(questions) == 6
        for question in questions:
            assert example.ANSWERS[question.answer] == _answer(question.words, own)
            kinds.append(question.kind)
    assert min(kinds.count(kind) for kind in range(6)) > 300
    words = example.Words.of(questions)
    assert words.tokens.shape == (6, example.LONGEST)
    for row, length, own in zip(words.tokens.tolist(), words.lengths, questions, strict=True):
        assert [example.WORDS[token] for token in row[:length]] == own.words


def test_questions_about_repeated_digits_are_avoided(example):
    rng = np.random.default_rng(0)
    assert all(example.ask([7, 17, 20, 20], kind, rng) is None for kind in (1, 4))
    assert {example.ask([7, 17, 20, 3], 4, rng).words[2] for _ in range(20)} == {"three"}


def test_padding_of_a_question_changes_nothing(example):
    torch.manual_seed(0)
    module = example.Asker(example.QUICK).eval()
    rng = np.random.default_rng(0)
    short, long = example.ask([7, 3, 20, 20], 2, rng), example.ask([7, 3, 20, 20], 4, rng)
    image = torch.rand(1, 1, 24, 24)
    with torch.no_grad():
        both = module(image, example.Words.of([short, long]))
        words = example.Words.of([short])
        other = example.Words(words.tokens.masked_fill(words.tokens == 0, 5), words.lengths)
        torch.testing.assert_close(module(image, other), both[:1], atol=1e-6, rtol=0.0)
        # Each question is asked of its own picture.
        images = torch.rand(2, 1, 24, 24)
        every = module(images, example.Words.of([short, long, short, long]))
        torch.testing.assert_close(every[2:], module(images[1:], example.Words.of([short, long])), atol=1e-6, rtol=0.0)


def test_words_alone_know_what_is_answered_most_often(example):
    settings = example.dataclasses.replace(example.QUICK, test_scenes=100)
    rng = np.random.default_rng(3)
    drawn = torch.from_numpy(example.scenes.draw_things(200, rng, held_out=True))
    questions = [own for asked in example.ask_all(drawn, 5, rng) for own in asked]
    said = example.most_frequent(settings, questions)
    by_words = {}
    for own, answer in zip(questions, said, strict=True):
        assert by_words.setdefault(tuple(own.words), answer) == answer
    row = example.summarise("words", {"-": said}, questions)
    assert row["mean"] == np.mean([a == own.answer for a, own in zip(said, questions, strict=True)])
    assert 0.3 < row["mean"] < 0.65
    assert 0.35 < row["kind 4"] < 0.65


@pytest.mark.slow
def test_it_runs(example, tmp_path, capsys):
    rows = example.main(["--quick", "--out", str(tmp_path)])
    told = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert told["rows"] == rows
    assert (tmp_path / "looks.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in capsys.readouterr().out


@pytest.mark.slow
def test_a_question_learns_to_look(example, tmp_path):
    train, test = example.scenes.load()
    settings = example.Settings(steps=300, save_every=300)
    run = example.run_of("look", 0, settings, train, tmp_path)
    run.train()
    rng = np.random.default_rng(0)
    drawn = example.scenes.drawn(test, 200, rng, held_out=True)
    asked = example.ask_all(drawn.things, 6, rng)
    questions = [own for each in asked for own in each]
    wanted = np.array([own.answer for own in questions])
    blind = (np.array(example.most_frequent(settings, questions)) == wanted).mean()
    assert (np.array(example.answered(run.module, drawn.images, asked)) == wanted).mean() > blind + 0.05
