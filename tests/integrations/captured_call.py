"""Helpers that capture the matrices of one call and check that the output is unchanged."""

import torch

from saccade.integrations.capture_all import capture_all


def heard(model, *args, grad=False, **kwargs):
    """Return the output and the captured matrices, dense."""
    found = []
    with torch.set_grad_enabled(grad):
        expected = model(*args, **kwargs)
        with capture_all(model, lambda name, make: found.append((name, make().to_dense()))):
            out = model(*args, **kwargs)
    assert_equal(out, expected)
    return out, found


def assert_equal(out, expected):
    if isinstance(out, tuple):
        for own, other in zip(out, expected, strict=True):
            assert_equal(own, other)
    elif out is not None:
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)
