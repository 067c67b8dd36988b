"""The loss of the next token equals that of all logits at once, and takes no token of another text as a target."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.masks import BlockDiffusion, Causal, Documents, Padding, PrefixPerDocument, Window
from saccade.models import Decoder, DecoderConfig

VOCAB, LENGTH = 37, 12
SIZES = {"vocab_size": VOCAB, "max_len": 32, "embed_dim": 16, "num_heads": 4, "num_layers": 2, "feed_forward_dim": 24}
CONFIGS = {
    "tied": {"tied": True},
    "head of its own": {"tied": False},
    "softcap and scale": {"logit_softcap": 3.0, "logit_scale": 0.5},
    "learned positions": {"position_encoding": "learned", "norm": "layer"},
}


def decoder(name="tied", dtype=torch.float64):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**SIZES, **CONFIGS[name]))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


def some_tokens(batch=3, length=LENGTH):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)


def of_texts(model, texts):
    """Return the mean loss of texts, each computed alone."""
    totals = [F.cross_entropy(model(text[None])[0, :-1], text[1:], reduction="sum") for text in texts if len(text) > 1]
    return sum(totals) / sum(len(text) - 1 for text in texts if len(text) > 1)


def check_equal(model, loss, expected):
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(model, loss), gradients(model, expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [None, 1, 5, 36, 1000])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_cross_entropy_of_all_logits(name, chunk_size):
    model, tokens = decoder(name), some_tokens()
    expected = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    check_equal(model, model.loss(tokens, chunk_size=chunk_size), expected)


@pytest.mark.parametrize("name", ["tied", "learned positions"])
@pytest.mark.parametrize("lengths", [[[5, 7], [1, 11], [12]], [[2, 3, 4], [1, 1, 1, 9], [0, 6]]])
def test_documents_are_texts_of_their_own(lengths, name):
    model, tokens = decoder(name), some_tokens()
    texts = [text for row, own in zip(tokens, lengths, strict=True) for text in row[: sum(own)].split(own)]
    for mask in (Documents(lengths), Documents(lengths) & Window(30, 0), Documents(lengths, rule=Causal())):
        check_equal(model, model.loss(tokens, mask=mask, chunk_size=5), of_texts(model, texts))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_target_and_has_none(side):
    model, tokens, lengths = decoder(), some_tokens(), [12, 7, 1]
    is_left = side == "left"
    texts = [row[LENGTH - n :] if is_left else row[:n] for row, n in zip(tokens, lengths, strict=True)]
    mask = Padding(lengths, side, LENGTH if is_left else None)
    places = [[*[-1] * (LENGTH - n), *range(n)] if is_left else [*range(n), *[-1] * (LENGTH - n)] for n in lengths]
    for given in ({"mask": mask}, {"positions": torch.tensor(places)}):
        check_equal(model, model.loss(tokens, chunk_size=5, **given), of_texts(model, texts))


def test_a_document_ends_where_padding_begins():
    model, tokens = decoder(), some_tokens(1)
    mask = Documents([4, 8]) & Padding([9])
    check_equal(model, model.loss(tokens, mask=mask), of_texts(model, [tokens[0, :4], tokens[0, 4:9]]))


def test_only_given_targets_count():
    model, tokens = decoder(), some_tokens()
    targets = torch.full_like(tokens, -100)
    targets[0, 3], targets[2, 10:] = 5, torch.tensor([0, VOCAB - 1])
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    check_equal(model, model.loss(tokens, targets=targets, chunk_size=4), expected)
    # A mask in a form that does not say where texts end
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    torch.testing.assert_close(model.loss(tokens, targets=targets, mask=allowed), expected)


def test_without_targets_it_is_nan():
    model, tokens = decoder(), some_tokens(2, 1)
    assert model.loss(tokens).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_summed_in_float32(dtype):
    model, tokens = decoder(dtype=dtype), some_tokens()
    with torch.no_grad():
        expected = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss = model.loss(tokens, chunk_size=1000)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


class Largest(TorchDispatchMode):
    """Records the largest number of elements of an operator's result."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        parts = out if isinstance(out, list | tuple) else (out,)
        self.numel = max([self.numel, *(part.numel() for part in parts if isinstance(part, torch.Tensor))])
        return out


@pytest.mark.usefixtures("without_native")  # whose buffers are larger than these logits
def test_no_tensor_holds_all_logits():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**{**SIZES, "vocab_size": 2000, "max_len": 256}))
    tokens = torch.randint(2000, (2, 256))
    with Largest() as largest:
        model.loss(tokens, chunk_size=16).backward()
    assert largest.numel == 2000 * 16  # the logits of a chunk, and the weights
    with Largest() as largest:
        model(tokens)
    assert largest.numel == 2000 * 2 * 256


def test_torch_func_differentiates_it():
    model, tokens = decoder(), some_tokens()
    state = dict(model.named_parameters())

    def loss(state):
        return torch.func.functional_call(_Loss(model), {f"model.{k}": v for k, v in state.items()}, (tokens,))

    found = torch.func.grad(loss)(state)
    expected = gradients(model, model.loss(tokens))
    torch.testing.assert_close(tuple(found.values()), expected, rtol=1e-10, atol=1e-12)


class _Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model.loss(tokens, chunk_size=7)


@pytest.mark.ci
def test_it_compiles_in_chunks():
    model, tokens = decoder(), some_tokens()
    compiled = torch.compile(_Loss(model), fullgraph=True, backend="aot_eager")
    check_equal(model, compiled(tokens), model.loss(tokens))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"chunk_size": 0}, ValueError, "chunk_size must be an int of at least 1; got 0"),
        ({"targets": some_tokens()[:, :-1]}, ValueError, r"targets must have shape \[3, 12\], like tokens"),
        ({"targets": some_tokens().float()}, TypeError, "targets must be an int64 tensor; got float32"),
        ({"targets": some_tokens() - 1}, ValueError, "targets must be from 0 to 36, or -100"),
        ({"targets": some_tokens() + 1}, ValueError, "targets must be from 0 to 36, or -100"),
        ({"mask": torch.ones(12, 12).bool()}, TypeError, "mask must be a Mask that separates texts"),
        ({"mask": PrefixPerDocument([5, 7], [2, 3])}, ValueError, "mask must separate texts"),
        ({"mask": BlockDiffusion(2, 6)}, ValueError, "mask must separate texts"),
    ],
)
def test_what_it_refuses(given, error, message):
    with pytest.raises(error, match=message):
        decoder().loss(some_tokens(), **given)
