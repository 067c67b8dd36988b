"""Masks in compiled and exported programs: made of tensors, for any length and any batch, in few graphs."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.sampled import kept, sampled
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export

import saccade as sc
from saccade import masks
from saccade.masks.convert.deferred_masks import Converted, Pairs, TensorMask, Unread
from saccade.nn import MultiHeadAttention
from saccade.support.torch_modes import has_values

LENGTHS = (9, 12, 15, 10)


def _tokens(n: int) -> Tensor:
    tokens = torch.ones(2, n, dtype=torch.long)
    tokens[1, n // 2 :] = 0
    return tokens


def _holes(n: int) -> Tensor:
    tokens = torch.ones(2, n, dtype=torch.long)
    tokens[1, 2:4] = 0
    return tokens


def _ids(n: int) -> Tensor:
    return torch.cat([torch.arange(4), torch.arange(n - 4)])[None].expand(2, -1)


# A mask made within the compiled function, from a tensor of the length.
MADE_INSIDE: dict[str, tuple[Callable[[int], Tensor], Callable[[Tensor], Any]]] = {
    "bool tensor of keys": (lambda n: _tokens(n).bool(), lambda x: x[:, None, None, :]),
    "bool tensor of pairs": (lambda n: torch.rand(2, 1, n, n) < 0.7, lambda x: x),
    "bool tensor of three dimensions": (lambda n: torch.rand(2, n, n) < 0.7, lambda x: x),
    "bool tensor of one column": (lambda n: torch.rand(2, 1, n, 1) < 0.7, lambda x: x),
    "dense": (lambda n: torch.rand(2, 1, n, n) < 0.7, masks.Dense),
    "attention mask": (_tokens, masks.from_attention_mask),
    "attention mask with holes": (_holes, masks.from_attention_mask),
    "attention mask and a window": (_tokens, lambda x: masks.Window(3, 3) & masks.from_attention_mask(x)),
    "all but the padding": (_tokens, lambda x: masks.Not(masks.from_attention_mask(x)) | masks.Global([0])),
    "float mask": (
        lambda n: torch.where(torch.rand(2, 1, n, n) < 0.7, 0.0, -torch.inf),
        masks.from_attention_mask,
    ),
    "key padding mask": (lambda n: _tokens(n) == 0, masks.from_key_padding_mask),
    "cumulative lengths": (lambda n: torch.tensor([0, 4, n]), masks.from_cu_seqlens),
    "position ids": (_ids, lambda x: masks.from_position_ids(x, masks.Window(2, 2))),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", kept(MADE_INSIDE, "bool tensor of pairs", "position ids"))
def test_masks_made_inside_a_compiled_function_fit_every_length(name: str) -> None:
    torch.compiler.reset()
    tensor_of, mask_of = MADE_INSIDE[name]
    layer = MultiHeadAttention(8, 2, mask=masks.Causal())

    def run(x: Tensor, tensor: Tensor) -> Tensor:
        return layer(x, mask=mask_of(tensor))

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for n in LENGTHS:
        x, tensor = torch.randn(2, n, 8, requires_grad=True), tensor_of(n)
        out, expected = compiled(x, tensor), run(x, tensor)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (out, expected)))
    assert counter.frame_count <= 2


# A mask of the batch, made outside of the compiled function: what it holds is data of the program.
OF_BATCH: dict[str, Callable[[int], masks.Mask]] = {
    "padding": lambda n: masks.Padding([n, n // 2]),
    "padding at the left": lambda n: masks.Padding([n, n // 2], "left", n),
    "documents": lambda n: masks.Documents([[4, n - 4], [n]]),
    "documents with a rule": lambda n: masks.Documents([4, n - 4], rule=masks.Window(2, 0)),
    "documents and padding": lambda n: masks.Documents([[4, n - 4], [n]]) & masks.Padding([n, n // 2]),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", sampled(OF_BATCH, 3))
def test_masks_of_a_batch_are_data_of_a_compiled_function(name: str) -> None:
    torch.compiler.reset()
    layer = MultiHeadAttention(8, 2, mask=masks.Causal()).requires_grad_(False)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, mask: layer(x, mask=mask), backend=counter, fullgraph=True)
    for n in LENGTHS:
        x, mask = torch.randn(2, n, 8), OF_BATCH[name](n)
        torch.testing.assert_close(compiled(x, mask), layer(x, mask=mask))
    assert counter.frame_count <= 3


class _Masked(nn.Module):
    def __init__(self, mask_of: Callable[[Tensor], Any]):
        super().__init__()
        self.layer, self.mask_of = MultiHeadAttention(8, 2, mask=masks.Causal()), mask_of

    def forward(self, x: Tensor, tensor: Tensor) -> Tensor:
        out: Tensor = self.layer(x, mask=self.mask_of(tensor))
        return out


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["bool tensor of keys", "attention mask with holes", "key padding mask", "position ids"]
)
def test_exported_masks_fit_every_batch_and_length(name: str) -> None:
    tensor_of, mask_of = MADE_INSIDE[name]
    model = _Masked(mask_of).eval()
    shapes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=512)}
    example = (torch.randn(2, 10, 8), tensor_of(10).clone())
    program = export(model, example, dynamic_shapes=(shapes, shapes))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for n in (7, 23):
        x, tensor = torch.randn(2, n, 8), tensor_of(n).clone()
        torch.testing.assert_close(loaded(x, tensor), model(x, tensor))
        torch.testing.assert_close(loaded(x[1:], tensor[1:]), model(x[1:], tensor[1:]))


@pytest.mark.parametrize("is_masked", [False, True])
def test_exported_batches_may_be_known_only_when_they_run(is_masked: bool) -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = MultiHeadAttention(8, 2)

        def forward(self, x: Tensor, keep: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = self.layer(x[keep], mask=mask[keep] if is_masked else None)
            return out

    model = Chosen().eval()
    x, mask = torch.randn(3, 6, 8), torch.rand(3, 1, 6, 6) < 0.7
    program = export(model, (x, torch.tensor([True, False, False]), mask)).module()
    for keep in ([True, True, False], [False, True, False], [True, True, True]):
        torch.testing.assert_close(program(x, torch.tensor(keep), mask), model(x, torch.tensor(keep), mask))


@pytest.mark.ci
def test_exported_positions_are_data() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = MultiHeadAttention(8, 2, mask=masks.Causal() & masks.Window(2, 0))

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            out: Tensor = self.layer(x, positions=positions)
            return out

    model = Placed().eval()
    shapes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=512)}
    program = export(model, (torch.randn(2, 5, 8), torch.arange(5).repeat(2, 1)), dynamic_shapes=(shapes, shapes))
    x, positions = torch.randn(2, 7, 8), torch.tensor([[-1, 0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8, 9]])
    torch.testing.assert_close(program.module()(x, positions), model(x, positions))


def test_errors_of_masks_in_a_program_are_those_without_a_compiler() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x, mask: sc.attention(x, x, x, mask), backend="eager", fullgraph=True)
    x = torch.randn(2, 2, 6, 4)
    for mask, message in (
        (torch.ones(5, 6, dtype=torch.bool), r"mask must have shape \[6, 6\]"),
        (masks.Dense(torch.ones(5, 5, dtype=torch.bool)), "mask must cover the positions of all keys, 0 to 5"),
        (masks.Documents([3]), "mask must cover the positions of all keys, 0 to 5"),
    ):
        with pytest.raises(ValueError, match=message):
            sc.attention(x, x, x, mask)
        with pytest.raises(ValueError, match=message):
            compiled(x, mask)
    with pytest.raises(ValueError, match="be 1 at tokens and 0 at padding"):
        torch.compile(lambda x, t: sc.attention(x, x, x, masks.from_attention_mask(t)), backend="eager")(
            x, torch.full((2, 6), 2)
        )


QUESTIONS: dict[str, Callable[[sc.Matrix], Any]] = {
    "entropy": lambda matrix: matrix.entropy(),
    "received": lambda matrix: matrix.received(),
    "topk": lambda matrix: matrix.topk(2).weights,
    "pooled": lambda matrix: matrix.pooled(4),
    "a row": lambda matrix: matrix[:, 0, 3],
    "dense": lambda matrix: matrix.to_dense(),
    "transposed product": lambda matrix: matrix.rmatmul(torch.ones(2, 2, matrix.shape[2], 3)),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", kept(QUESTIONS, "entropy", "a row"))
def test_questions_to_a_matrix_interrupt_a_graph(name: str) -> None:
    torch.compiler.reset()

    def run(x: Tensor, tokens: Tensor) -> Any:
        matrix = sc.AttentionMatrix(x, x, masks.Causal() & masks.from_attention_mask(tokens))
        return 2 * QUESTIONS[name](matrix)

    compiled = torch.compile(run, backend="eager")
    for n in (9, 12, 10):
        x = torch.randn(2, 2, n, 4)
        torch.testing.assert_close(compiled(x, _tokens(n)), run(x, _tokens(n)))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="of a matrix runs block by block"):
        torch.compile(run, backend="eager", fullgraph=True)(x, _tokens(n))


def test_an_exported_question_is_refused() -> None:
    class Entropy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sc.AttentionMatrix(x, x).entropy()

    with pytest.raises(sc.UnsupportedError, match=r"torch\.export cannot run these inputs") as refused:
        export(Entropy(), (torch.randn(1, 2, 4, 4),), strict=False)
    assert refused.value.reasons == (
        "entropy() of a matrix runs block by block, which cannot be one operation of a graph",
    )


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name != "a row"])
@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
def test_questions_to_a_matrix_without_values_give_shapes(name: str, mode: Callable[[], Any]) -> None:
    def answer() -> Any:
        x = torch.ones(2, 2, 9, 4)
        matrix = sc.AttentionMatrix(x, x, masks.Causal() & masks.Padding([9, 4]))
        return torch.as_tensor(QUESTIONS[name](matrix))

    expected = answer()
    with mode():
        shape = answer()
    assert not has_values(shape)
    assert (shape.shape, shape.dtype) == (expected.shape, expected.dtype)


UNREAD: dict[str, tuple[Unread, masks.Mask | Tensor]] = {
    "pairs": (TensorMask(torch.ones(5, 5, dtype=torch.bool).tril()), masks.Causal()),
    "tokens": (Converted("from_attention_mask", _tokens(5)), masks.Padding([5, 2])),
    "scores": (
        Converted("from_attention_mask", torch.zeros(1, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf)),
        masks.Causal(),
    ),
    "padding": (Converted("from_key_padding_mask", _tokens(5) == 0), masks.Padding([5, 2])),
    "lengths": (Converted("Padding", masks.Padding([3, 2], "left", 5).table), masks.Padding([3, 2], "left", 5)),
    "ends": (
        Converted("from_cu_seqlens", torch.tensor([0, 2, 4]), masks.Causal()),
        masks.Documents([2, 2], rule=masks.Causal()),
    ),
    "positions": (
        Converted("from_position_ids", torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 0, 1]]), masks.Causal()),
        masks.Documents([[2, 3], [3, 2]], rule=masks.Causal()),
    ),
    "documents": (
        Converted("Documents", masks.Documents([[2, 0, 3], [4]]).table, masks.Window(1, 0)),
        masks.Documents([[2, 0, 3], [4]], rule=masks.Window(1, 0)),
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_masks_are_the_same_before_and_after_they_are_read(name: str) -> None:
    unread, expected = UNREAD[name]
    assert isinstance(expected, masks.Mask)
    dense = expected.to_dense(5, batch=2)
    torch.testing.assert_close(unread.to_dense(5, batch=2), dense)
    read = unread.read((2, 1, 5, 5))
    assert isinstance(read, masks.Mask)
    torch.testing.assert_close(read.to_dense(5, batch=2), dense)
    index = Pairs(
        torch.arange(2)[:, None, None, None],
        torch.zeros(1, dtype=torch.long),
        torch.arange(5)[:, None],
        torch.arange(5),
    )
    torch.testing.assert_close(unread.at_indices(index, (2, 1, 5, 5)).expand(2, 1, 5, 5), dense)
