"""Tasks are the same for the same seed, have one answer, and can be told from the text alone."""

import statistics
from collections.abc import Callable

import pytest
import torch

from saccade import tasks

MAKERS: dict[str, Callable[[int], tasks.Recall]] = {
    "passkey": lambda seed: tasks.passkey(20, 64, key_len=4, vocab_size=64, seed=seed),
    "mqar": lambda seed: tasks.mqar(20, 64, 8, vocab_size=64, seed=seed),
    "induction": lambda seed: tasks.induction(20, 64, copied=8, vocab_size=64, seed=seed),
}


OTHERS: dict[str, Callable[[int], tasks.Recall]] = {
    "selective copying": lambda seed: tasks.selective_copying(200, 24, copied=5, vocab_size=12, seed=seed),
    "listops": lambda seed: tasks.listops(200, 40, depth=3, seed=seed),
}
"""Tasks whose answers are worked out from the text."""


@pytest.mark.parametrize("name", [*MAKERS, *OTHERS])
def test_a_text_is_decided_by_its_seed(name: str) -> None:
    before = torch.get_rng_state()
    make = {**MAKERS, **OTHERS}[name]
    one, again, other = make(3), make(3), make(4)
    assert torch.equal(one.tokens, again.tokens)
    assert torch.equal(one.targets, again.targets)
    assert not torch.equal(one.tokens, other.tokens)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", MAKERS)
def test_each_question_has_one_answer_which_stands_in_the_context(name: str) -> None:
    task = MAKERS[name](5)
    assert bool((task.targets >= 0).any(1).all())
    for text, targets in zip(task.tokens.tolist(), task.targets.tolist(), strict=True):
        for place, target in enumerate(targets):
            if target == tasks.IGNORED:
                continue
            assert place >= task.context_len
            before = [text[i + 1] for i in range(task.context_len - 1) if text[i] == text[place]]
            assert before == [target]
            assert text[place + 1] == target


def test_copied_tokens_are_in_order() -> None:
    task = OTHERS["selective copying"](5)
    for text, targets in zip(task.tokens.tolist(), task.targets.tolist(), strict=True):
        assert text[task.context_len :] == [1] * 5
        assert targets[task.context_len :] == [token for token in text[: task.context_len] if token]
        assert set(targets[: task.context_len]) == {tasks.IGNORED}


def test_lists_come_out_as_the_interpreter_says() -> None:
    task = OTHERS["listops"](5)
    functions = {"max": max, "min": min, "low": statistics.median_low, "sum": lambda digits: sum(digits) % 10}
    words = [*range(10), "max([", "min([", "low([", "sum(["]
    depths, found = set(), set()
    for text, targets in zip(task.tokens.tolist(), task.targets.tolist(), strict=True):
        end = text.index(16)
        assert not any(text[end + 1 :])
        written = "".join(
            "])," if token == 15 else str(words[token - 1]) + ("," if token < 11 else "") for token in text[:end]
        )
        assert targets[end] == 1 + eval(written.rstrip(","), dict(functions))
        assert set(targets) == {tasks.IGNORED, targets[end]}
        depths.add(max(written[:i].count("[") - written[:i].count("]") for i in range(len(written))))
        found.add(targets[end])
    assert depths == {1, 2, 3}
    assert found == set(range(1, 11))


def test_answers_can_be_taken_out() -> None:
    for task in (MAKERS["mqar"](0), tasks.passkey(20, 64, key_len=1, vocab_size=64, seed=0)):
        blind = task.without_answers()
        behind = torch.zeros_like(task.tokens, dtype=torch.bool)
        behind[:, 1:] = task.targets[:, :-1] >= 0
        assert not blind.tokens[behind].any()
        assert torch.equal(blind.tokens[~behind], task.tokens[~behind])
        assert torch.equal(blind.targets, task.targets)
    for make in OTHERS.values():
        task = make(0)
        assert torch.equal(task.without_answers().tokens, task.tokens)
    for name in ("passkey", "induction"):
        with pytest.raises(ValueError, match="not contain an answer that is also a question"):
            MAKERS[name](0).without_answers()


def test_accuracy_counts_what_is_asked() -> None:
    task = MAKERS["mqar"](0)
    right = torch.nn.functional.one_hot(task.targets.clamp(min=0), 64).float()
    assert task.accuracy(right) == 1.0
    assert task.accuracy(right[:, task.context_len :]) == 1.0
    asked = (task.targets >= 0).nonzero()
    right[asked[0, 0], asked[0, 1]] = 0
    assert task.accuracy(right) == 1 - 1 / len(asked)
    with pytest.raises(ValueError, match="logits must be"):
        task.accuracy(right[:3])


def test_a_needle_is_as_strong_as_was_said() -> None:
    query, key, value, start = tasks.needle(200, 300, 64, needle_len=3, strength=5.0, seed=1)
    scores = (query @ key.mT)[:, 0, 0] / 8
    at = scores.gather(1, start[:, None] + torch.arange(3))
    plain = scores.sum(1) - at.sum(1)
    assert abs(float(at.mean()) - 5.0) < 0.2
    assert abs(float(plain.mean()) / 297) < 0.05
    assert value.shape == key.shape


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: tasks.mqar(1, 10, 3, vocab_size=40, seed=0),
            "length must be at least 12, for 3 pairs and as many questions",
        ),
        (lambda: tasks.mqar(1, 20, 3, vocab_size=6, seed=0), "vocab_size must have 3 keys, at least 7; got 6"),
        (lambda: tasks.mqar(True, 20, 3, vocab_size=60, seed=0), "examples must be an int of at least 1; got True"),
        (lambda: tasks.induction(1, 9, copied=1, vocab_size=60, seed=0), "copied must be from 2 to half of length 9"),
        (lambda: tasks.induction(1, 9, copied=3, vocab_size=6, seed=0), "vocab_size must have 6 tokens besides 0"),
        (
            lambda: tasks.listops(1, 7, depth=2, seed=0),
            "length must be at least 8, a list of 5 digits and the question",
        ),
        (
            lambda: tasks.selective_copying(1, 9, copied=5, vocab_size=9, seed=0),
            "copied must be at most half of length 9; got 5",
        ),
        (
            lambda: tasks.selective_copying(1, 10, copied=5, vocab_size=2, seed=0),
            "vocab_size must contain a blank, a marker and a token to copy; got 2",
        ),
        (
            lambda: tasks.passkey(1, 5, key_len=3, vocab_size=60, seed=0),
            "length must be large enough for a key of 3 tokens and its marker",
        ),
        (lambda: tasks.passkey(1, 50, key_len=3, vocab_size=11, seed=0), "vocab_size must be at least 12; got 11"),
        (lambda: tasks.passkey(1, 50, key_len=3, vocab_size=30, seed=-1), "seed must be an int of at least 0; got -1"),
        (
            lambda: tasks.needle(1, 5, 4, needle_len=6, strength=1.0, seed=0),
            "needle_len must be at most kv_len 5; got 6",
        ),
        (
            lambda: tasks.needle(1, 5, 4, needle_len=1, strength=float("nan"), seed=0),
            "strength must be a finite number",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()
