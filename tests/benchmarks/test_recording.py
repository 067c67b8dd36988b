"""Tests of the checks that the recording benchmark makes before it times, at a tiny size."""

import pytest
import torch

from benchmarks import recording


def test_recording():
    recording.check(recording.case(48, 64, 2))


def test_a_model_that_says_something_else_is_noticed(monkeypatch):
    its = recording.case(16, 64, 2)
    monkeypatch.setattr(recording.Case, "plain", lambda self: torch.zeros(1, 16, 64))
    with pytest.raises(AssertionError, match="recording statistics changes what the model says"):
        recording.check(its)
