"""Tests of S4D: convolution = recurrence = definition; packed, padded, split, in layers."""

import re

import numpy as np
import pytest
import torch
from scipy.signal import cont2discrete

from saccade import masks, mechanisms
from saccade.support.errors import UnsupportedError

CHANNELS, BATCH, LENGTH = 3, 2, 61
CAUSAL = masks.Causal()
LINES = {
    "causal": CAUSAL,
    "packed": masks.Documents([[20, 31, 10], [40, 1, 20]], CAUSAL),
    "padded": CAUSAL & masks.Padding([61, 35]),
    "padded on the left": CAUSAL & masks.Padding([61, 35], side="left", padded_len=61),
}


def rule(state_dim=8):
    torch.manual_seed(0)
    return mechanisms.S4D(CHANNELS, state_dim).double()


def values(length=LENGTH, width=1):
    torch.manual_seed(1)
    return torch.randn(BATCH, CHANNELS, length, width, dtype=torch.float64, requires_grad=True)


def impulse(s4d, length):
    """Return the impulse response of each channel, by scipy's zero-order hold and a loop."""
    found = torch.zeros(CHANNELS, length, dtype=torch.float64)
    for channel in range(CHANNELS):
        rate = torch.complex(-s4d.log_rate[channel].exp(), s4d.frequency[channel]).detach().numpy()
        step = float(s4d.log_step[channel].exp())
        for n, a in enumerate(rate):
            weight = complex(*s4d.weight[channel, n].tolist())
            factor, entry, *_ = cont2discrete(tuple(np.array([[x]]) for x in (a, 1.0, 1.0, 0.0)), step, "zoh")
            state = entry[0, 0]
            for i in range(length):
                found[channel, i] += 2 * (weight * state).real
                state = factor[0, 0] * state
        found[channel, 0] += float(s4d.skip[channel])
    return found


def defined(s4d, mask, length=LENGTH):
    """Return the matrix, entry by entry; hidden tokens take no time."""
    kernel = impulse(s4d.requires_grad_(False), length)
    found = torch.zeros(BATCH, CHANNELS, length, length, dtype=torch.float64)
    q, kv = torch.arange(length)[:, None], torch.arange(length)[None]
    for b in range(BATCH):
        allowed = mask.allows(torch.tensor(b), torch.tensor(0), q, kv).expand(length, length)
        there = allowed.diagonal()
        for i in range(length):
            for j in allowed[i].nonzero()[:, 0].tolist() if there[i] else ():
                found[b, :, i, j] = kernel[:, int(there[j:i].sum())]
    return found


@pytest.mark.parametrize("line", LINES)
def test_the_matrix_is_the_definition(line):
    s4d, u = rule(), values()
    matrix, expected = s4d(u, u, mask=LINES[line]), defined(s4d, LINES[line])
    torch.testing.assert_close(matrix.to_dense(), expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(matrix @ u, expected @ u, atol=1e-9, rtol=0)
    x = torch.randn(BATCH, CHANNELS, LENGTH, 2, dtype=torch.float64)
    torch.testing.assert_close(matrix.mT @ x, expected.mT @ x, atol=1e-9, rtol=0)
    torch.testing.assert_close(matrix[1, 2, 30:40], expected[1, 2, 30:40], atol=1e-9, rtol=0)


@pytest.mark.parametrize("line", LINES)
def test_products_are_those_of_the_matrix_with_gradients(line):
    s4d, u = rule(), values(width=2)
    out, expected = s4d(u, u, mask=LINES[line]) @ u, s4d(u, u, mask=LINES[line]).to_dense() @ u
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    leaves, grad = (u, *s4d.parameters()), torch.randn_like(out)
    for own, their in zip(*(torch.autograd.grad(y, leaves, grad) for y in (out, expected)), strict=True):
        torch.testing.assert_close(own, their, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("line", ["causal", "packed", "padded"])
@pytest.mark.parametrize("split", [(61,), (1,) * 5 + (56,), (20, 1, 40), (0, 33, 2, 26), (45, 16)], ids=str)
def test_a_state_goes_on_where_it_was_left(split, line):
    s4d, u = rule(), values(width=2)
    full, last = s4d(u, u, mask=LINES[line]).advance(u, None)
    torch.testing.assert_close(full, s4d(u, u, mask=LINES[line]) @ u, atol=1e-10, rtol=0)
    memory, parts, start = None, [], 0
    for size in split:
        place = torch.arange(start, start + size) if size else range(0)
        own = u[:, :, start : start + size]
        out, memory = s4d(own, own, mask=LINES[line], q_positions=place, kv_positions=place).advance(own, memory)
        parts.append(out)
        start += size
    torch.testing.assert_close(torch.cat(parts, 2), full, atol=1e-10, rtol=0)
    torch.testing.assert_close(memory.state, last.state, atol=1e-10, rtol=0)


@pytest.mark.parametrize("at", [0, 25, 60])
def test_nan_is_seen_by_those_after_it_in_its_text_alone(at):
    s4d, u = rule(), values().detach()
    clean = s4d(u, u, mask=LINES["packed"]) @ u
    bad = u.clone()
    bad[0, 1, at] = torch.nan
    out, touched = s4d(bad, bad, mask=LINES["packed"]) @ bad, torch.zeros_like(u, dtype=torch.bool)
    touched[0, 1, at : next(end for end in (20, 51, 61) if end > at)] = True
    assert out[touched].isnan().all()
    torch.testing.assert_close(out[~touched], clean[~touched])
    again, _ = s4d(bad, bad, mask=LINES["packed"]).advance(bad, None)
    torch.testing.assert_close(again, out, equal_nan=True)


def test_float32_is_close_over_long_texts():
    s4d, u = rule(16), values(5000).detach()
    wide = s4d(u, u, mask=CAUSAL) @ u
    near = s4d.float()(u.float(), u.float(), mask=CAUSAL) @ u.float()
    torch.testing.assert_close(near.double(), wide, atol=2e-4, rtol=1e-4)


REFUSED = {
    "not causal": (lambda u: rule()(u, u), "Full is not causal"),
    "window": (lambda u: rule()(u, u, mask=masks.Window(3, 0)), "so queries cannot choose"),
    "channels": (lambda u: rule()(u[:, :2], u[:, :2], mask=CAUSAL), "heads must be equal to the 3 channels"),
    "odd": (lambda u: mechanisms.S4D(3, 7), "state_dim must be even"),
    "steps": (lambda u: mechanisms.S4D(3, 8, least_step=0.5), "most_step must be at least least_step 0.5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inputs_without_such_a_matrix_are_refused(name):
    wrong, words = REFUSED[name]

    with pytest.raises((TypeError, ValueError, UnsupportedError), match=re.escape(words)):
        wrong(values().detach())
