"""Tasks are the same for the same seed, have one answer, and can be told from the text alone."""

from collections.abc import Callable

import pytest
import torch

from saccade import tasks

MAKERS: dict[str, Callable[[int], tasks.Recall]] = {
    "passkey": lambda seed: tasks.passkey(20, 64, key_len=4, vocab_size=64, seed=seed),
    "mqar": lambda seed: tasks.mqar(20, 64, 8, vocab_size=64, seed=seed),
    "induction": lambda seed: tasks.induction(20, 64, copied=8, vocab_size=64, seed=seed),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_text_is_decided_by_its_seed(name: str) -> None:
    before = torch.get_rng_state()
    one, again, other = MAKERS[name](3), MAKERS[name](3), MAKERS[name](4)
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
        (lambda: tasks.mqar(1, 10, 3, vocab_size=40, seed=0), "length must hold 3 pairs and as many questions, 12"),
        (lambda: tasks.mqar(1, 20, 3, vocab_size=6, seed=0), "vocab_size must have 3 keys, at least 7; got 6"),
        (lambda: tasks.mqar(True, 20, 3, vocab_size=60, seed=0), "examples must be an int of at least 1; got True"),
        (lambda: tasks.induction(1, 9, copied=1, vocab_size=60, seed=0), "copied must be from 2 to half of length 9"),
        (lambda: tasks.induction(1, 9, copied=3, vocab_size=6, seed=0), "vocab_size must have 6 tokens besides 0"),
        (lambda: tasks.passkey(1, 5, key_len=3, vocab_size=60, seed=0), "length must hold a key of 3 and its sign"),
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
def test_what_does_not_fit_is_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()
