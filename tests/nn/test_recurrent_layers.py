"""Layers that read a state: what they say, token by token, and that they stand where self-attention does."""

import math
import re

import pytest
import torch
from torch.nn import functional as F

import saccade as sc
from saccade import masks, mechanisms, nn
from saccade.caches import RecurrentCache, load_cache, save_cache
from saccade.support.errors import UnsupportedError

WIDTH, HEADS = 8, 2
MECHANISMS = {
    "delta": (mechanisms.Delta, None),
    "gated delta": (mechanisms.Delta, "token"),
    "kimi": (mechanisms.Delta, "channel"),
    "linear": (mechanisms.GatedLinear, None),
    "gla": (mechanisms.GatedLinear, "channel"),
    "retnet": (lambda: mechanisms.GatedLinear.retnet(HEADS), None),
    "mesa": (lambda: mechanisms.Mesa(0.7), "token"),
    "gated delta 2": (mechanisms.GatedDelta2, "channel"),
    "mamba-3": (mechanisms.Mamba3, None),
    "ssd": (lambda: mechanisms.SSD(HEADS), None),
}
LAYERS = {
    name: (lambda made=made, decay=decay: nn.Recurrence(WIDTH, HEADS, made(), decay=decay))
    for name, (made, decay) in MECHANISMS.items()
}
LAYERS["state space"] = lambda: nn.StateSpace(WIDTH, 8)


def layer(name):
    torch.manual_seed(0)
    return LAYERS[name]().double()


def texts(*lengths):
    return [torch.randn(length, WIDTH, dtype=torch.float64) for length in lengths]


def finished(own, outs, gate):
    """The norm, the gate and the projection of what the heads read, token by token."""
    out = torch.stack(outs)
    out = out / (out.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()
    return own.output_projection((out * F.silu(gate)).flatten(1))


def mamba3_by_hand(own, text):
    """One text ``[len, width]``, with the complex state of Mamba-3."""
    query, key, value, gate = (x.unflatten(1, (HEADS, -1)) for x in own.inputs(text).chunk(4, 1))
    eps = torch.finfo(torch.float64).eps
    query, key = (x / (x.square().mean(-1, keepdim=True) + eps).sqrt() for x in (query, key))
    query, key = (
        torch.view_as_complex((x + bias[:, 0]).unflatten(2, (-1, 2)))
        for x, bias in zip((query, key), own.biases, strict=True)
    )
    state = written = torch.zeros(HEADS, key.shape[2], value.shape[2], dtype=key.dtype)
    outs = []
    for t in range(len(text)):
        step, share = F.softplus(own.step(text[t]))[:, None, None], own.blend(text[t]).sigmoid()[:, None, None]
        turns = torch.complex(-F.softplus(own.fade(text[t]))[:, None], -math.pi * own.turn(text[t]).tanh())
        state = (turns[..., None] * step).exp() * (state + (1 - share) * step * written)
        written = key[t][..., None] * value[t][:, None]
        state = state + share * step * written
        outs.append((query[t].conj()[:, None] @ state).real[:, 0] + own.skip[:, None] * value[t])
    return finished(own, outs, gate)


def by_hand(own, text):
    """One text ``[len, width]``, a state that is written and read token by token."""
    if isinstance(own.mechanism, mechanisms.Mamba3):
        return mamba3_by_hand(own, text)
    heads = [x.unflatten(1, (HEADS, -1)) for x in own.inputs(text).chunk(4, 1)]
    query, key, value = F.silu(heads[0]), F.silu(heads[1]), heads[2]
    is_mesa, has_channels = (
        isinstance(own.mechanism, mechanisms.Mesa),
        isinstance(own.mechanism, mechanisms.GatedDelta2),
    )
    is_delta, is_ssd = own.write is not None and not is_mesa, own.step is not None
    if is_delta or is_mesa:
        query, key = query / query.norm(dim=-1, keepdim=True), key / key.norm(dim=-1, keepdim=True)
    scale, outs = 1.0 if is_ssd or is_mesa else 1 / math.sqrt(WIDTH // HEADS), []
    state = torch.zeros(HEADS, WIDTH // HEADS, WIDTH // HEADS, dtype=torch.float64)
    of_keys = state
    for t in range(len(text)):
        write = own.write(text[t]).sigmoid().view(HEADS, -1) if is_delta or is_mesa else 1.0
        kept = torch.ones(HEADS, 1, dtype=torch.float64)
        if is_ssd:
            write = F.softplus(own.step(text[t]))[:, None]
            kept = (-own.mechanism.log_rate.exp()[:, None] * write).exp()
        elif own.fade is not None:
            kept = (-own.log_rate.exp()[:, None] * F.softplus(own.fade(text[t])).view(HEADS, -1)).exp()
        elif isinstance(own.mechanism, mechanisms.GatedLinear) and own.mechanism.decay is not None:
            kept = own.mechanism.decay.exp()[:, None]
        state = state * kept[..., None]
        recalls = key[t] * own.erase(text[t]).sigmoid().view(HEADS, -1) if has_channels else key[t]
        told = (recalls[:, None] @ state)[:, 0] if is_delta else 0.0
        told = write * value[t] - (told if has_channels else write * told)
        state = state + key[t][..., None] * told[:, None]
        of_keys = of_keys * kept[..., None] + (key[t][..., None] * (write * key[t])[:, None] if is_mesa else 0.0)
        asked = (
            torch.linalg.solve(of_keys + 0.7 * torch.eye(len(key[t][0]), dtype=torch.float64), query[t])
            if is_mesa
            else query[t]
        )
        read = scale * (asked[:, None] @ state)[:, 0]
        outs.append(read + own.skip[:, None] * value[t] if is_ssd else read)
    return finished(own, outs, heads[3])


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_recurrence_is_what_it_says(name):
    own, (text,) = layer(name), texts(40)
    mine, expected = own(text[None])[0], by_hand(own, text)
    torch.testing.assert_close(mine, expected, atol=1e-10, rtol=0)
    weights = torch.randn_like(mine)
    names = [n for n, x in own.named_parameters() if x.requires_grad]
    grads, wanted = (torch.autograd.grad((x * weights).sum(), list(own.parameters())) for x in (mine, expected))
    for parameter, grad, other in zip(names, grads, wanted, strict=True):
        torch.testing.assert_close(
            grad, other, atol=1e-9, rtol=0, msg=lambda told, parameter=parameter: f"{parameter}: {told}"
        )


@pytest.mark.parametrize("name", MECHANISMS)
def test_its_matrix_times_the_values_is_what_is_normed(name):
    own, (text,) = layer(name), texts(21)
    value = own.inputs(text).chunk(4, 1)[2].unflatten(1, (HEADS, -1)).transpose(0, 1)
    value = value if own.erase is None else value * own.write(text).sigmoid().unflatten(1, (HEADS, -1)).transpose(0, 1)
    out = (own.matrix(text[None]) @ value[None])[0]
    out = out if own.skip is None else out + own.skip[:, None, None] * value
    gate = F.silu(own.inputs(text).chunk(4, 1)[3]).unflatten(1, (HEADS, -1)).transpose(0, 1)
    merged = F.rms_norm(out, out.shape[-1:]) * gate
    torch.testing.assert_close(own.output_projection(merged.transpose(0, 1).flatten(1)), own(text[None])[0])


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_a_stack_goes_on_where_it_was_left(name, tmp_path):
    layers = [nn.DecoderLayer(layer(name), nn.FeedForward(WIDTH, 16)) for _ in range(2)]
    stack = nn.DecoderStack(layers).double()
    x = torch.randn(2, 50, WIDTH, dtype=torch.float64)
    full, cache = stack(x), stack.new_cache()
    parts = [stack(x[:, a:b], cache=cache) for a, b in ((0, 35), (35, 36), (36, 50))]
    torch.testing.assert_close(torch.cat(parts, 1), full)
    size = cache.nbytes
    stack(x, cache=cache)
    assert cache.nbytes == size
    assert isinstance(layer(name).new_cache(), RecurrentCache)
    begun = stack.new_cache()
    stack(x[:, :20], cache=begun)
    begun.reorder([1, 0])
    save_cache(begun, tmp_path / "cache")
    torch.testing.assert_close(stack(x[[1, 0], 20:], cache=load_cache(tmp_path / "cache")), full[[1, 0], 20:])


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_packed_and_padded_texts_are_alone(name):
    own, alone = layer(name), texts(5, 1, 9)
    packed = sc.pack(alone)
    for text, mine in zip(alone, packed.unpack(own(packed.tokens, mask=packed.mask())), strict=True):
        torch.testing.assert_close(mine, own(text[None])[0])
    padded = torch.stack([alone[2], torch.cat([alone[0], torch.full((4, WIDTH), 7.0, dtype=torch.float64)])])
    out = own(padded, mask=masks.Padding([9, 5]))
    torch.testing.assert_close(out[1, :5], own(alone[0][None])[0])
    ragged = own(torch.stack([alone[0], alone[2][:5]]), positions=torch.tensor([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]]))
    torch.testing.assert_close(ragged[1, 2:], own(alone[2][None, 2:5])[0])


@pytest.mark.parametrize("name", LAYERS)
def test_an_encoder_layer_takes_it(name):
    encoder = nn.EncoderLayer(layer(name), nn.FeedForward(WIDTH, 16)).double()
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    assert encoder(x).shape == x.shape
    assert encoder.matrix(x).shape[2:] == (6, 6)


REFUSED = {
    "bias": (lambda x: layer("ssd")(x, bias=torch.zeros(1)), "no scores to add it to"),
    "width": (lambda x: layer("state space")(x[..., :3]), "query must have shape [batch, len, 8]"),
    "heads": (lambda x: nn.Recurrence(8, 3), "num_heads must divide embed_dim 8; got 3"),
    "mechanism": (
        lambda x: nn.Recurrence(8, 2, mechanisms.Linear()),
        "be a Delta, GatedDelta2, DeltaProduct, RWKV7, GatedLinear, Mesa, SSD or Mamba3",
    ),
    "decay": (lambda x: nn.Recurrence(8, 2, decay="head"), "decay must be one of 'token', 'channel'"),
    "decay of retention": (
        lambda x: nn.Recurrence(8, 2, mechanisms.GatedLinear(torch.tensor([-0.1, -0.2])), decay="token"),
        "which has its own",
    ),
    "decay of SSD": (lambda x: nn.Recurrence(8, 2, mechanisms.SSD(2), decay="token"), "which has its own"),
    "decay of Mamba3": (lambda x: nn.Recurrence(8, 2, mechanisms.Mamba3(), decay="token"), "which has its own"),
    "window": (lambda x: layer("delta")(x, mask=masks.sliding_window(3)), "so queries cannot choose"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_a_state_cannot_support_are_refused(name):
    wrong, words = REFUSED[name]

    with pytest.raises((TypeError, ValueError, UnsupportedError), match=re.escape(words)):
        wrong(torch.randn(1, 5, WIDTH, dtype=torch.float64))
