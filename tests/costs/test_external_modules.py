"""Modules that others wrote: tensors that are no buffers, and torch's own layers, counted as torch counts them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules import transformer

import saccade as sc
from saccade import masks
from saccade.nn import MultiHeadAttention


class Tables(nn.Module):
    """Adds one of its tables to what it projects; `hold` says how tables are held."""

    def __init__(self, hold):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        hold(self, torch.randn(64, 8))

    def forward(self, x):
        return self.linear(x) + self.read()[: x.shape[1]]


class Plain(Tables):
    def __init__(self):
        super().__init__(lambda module, table: setattr(module, "table", table))

    def read(self):
        return self.table


class Listed(Plain):
    def __init__(self):
        Tables.__init__(self, lambda module, table: setattr(module, "tables", {"all": [(table, "name")]}))

    def read(self):
        return self.tables["all"][0][0]


class Complex(Plain):
    def read(self):
        return torch.view_as_real(torch.view_as_complex(self.table.view(64, 4, 2))).flatten(1)


class Late(Plain):
    """The table is made by the first call, as rotary embeddings do."""

    def __init__(self):
        Tables.__init__(self, lambda module, table: setattr(module, "table", None))

    def read(self):
        if self.table is None:
            self.table = torch.zeros(64, 8)
        return self.table


class Buffered(Plain):
    def __init__(self):
        Tables.__init__(self, lambda module, table: module.register_buffer("table", table))


def vectors(length):
    return torch.zeros(1, length, 8)


@pytest.mark.parametrize("kind", [Plain, Listed, Complex])
def test_a_tensor_that_is_no_buffer_costs_what_a_buffer_does(kind):
    told, wanted = sc.cost(kind(), 10, inputs=vectors), sc.cost(Buffered(), 10, inputs=vectors)
    assert told.forward.flops == wanted.forward.flops == 2 * 10 * 8 * 8
    assert told.forward.peak_bytes == wanted.forward.peak_bytes
    assert told.training.peak_bytes == wanted.training.peak_bytes
    assert told.parameter_bytes == wanted.parameter_bytes == (64 * 8 + 8 * 8 + 8) * 4


def test_tables_that_were_made_by_a_call_or_will_be():
    used = Late()
    used(vectors(5))
    held = used.table
    assert sc.cost(used, 10, inputs=vectors).forward.flops == sc.cost(Late(), 10, inputs=vectors).forward.flops
    assert used.table is held
    assert type(held) is torch.Tensor
    torch.testing.assert_close(used(vectors(5)), copy.deepcopy(used)(vectors(5)))


def test_a_mask_that_holds_a_tensor_keeps_it():
    near = masks.Window(3, 0).to_dense(64)[0, 0]
    layer = MultiHeadAttention(16, 2, mask=masks.Dense(near))
    assert sc.cost(layer, 64).forward.flops == sc.cost(MultiHeadAttention(16, 2), 64).forward.flops
    torch.testing.assert_close(layer.mask.to_dense(64)[0, 0], near)


class Stack(nn.Module):
    """torch's stacks with a mask made in each call, as torch's own examples do."""

    def __init__(self, kind, batch_first=True):
        super().__init__()
        sizes = {"dropout": 0.0, "batch_first": batch_first}
        self.kind, self.e, self.head = kind, nn.Embedding(101, 32), nn.Linear(32, 101)
        if kind == "encoder":
            self.stack = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(32, 4, 64, **sizes), 2, enable_nested_tensor=False
            )
        elif kind == "decoder":
            self.stack = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, **sizes), 2)
        elif kind == "both":
            encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, **sizes), 1, None, False)
            self.stack = nn.Transformer(32, 4, 1, 1, 64, custom_encoder=encoder, **sizes)
        else:
            self.stack = nn.MultiheadAttention(32, 4, **sizes)

    def forward(self, tokens):
        x, mask = self.e(tokens), nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        if self.kind == "encoder":
            return self.head(self.stack(x, mask=mask))
        if self.kind == "decoder":
            return self.head(self.stack(x, x, tgt_mask=mask))
        if self.kind == "both":
            return self.head(self.stack(x, x, src_mask=mask, tgt_mask=mask))
        return self.head(self.stack(x, x, x, attn_mask=mask, need_weights=False)[0])


def ids(length):
    return torch.zeros(1, length, dtype=torch.long)


LINEAR = 2 * 32 * 32
ATTENTION, FEED = 40 * 4 * LINEAR + 4 * 40 * 40 * 32, 40 * 2 * 2 * 32 * 64
PARTS = {"encoder": 2 * (ATTENTION + FEED), "decoder": 2 * (2 * ATTENTION + FEED), "both": 3 * ATTENTION + 2 * FEED}
PARTS["attention"] = ATTENTION


@pytest.mark.ci
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", PARTS)
def test_layers_of_torch_cost_their_products_of_matrices(kind, batch_first):
    def inputs(length):
        return ids(length) if batch_first else ids(length).expand(length, length)

    told = sc.cost(Stack(kind, batch_first), 40, inputs=inputs)
    texts = 1 if batch_first else 40
    assert told.forward.flops == texts * (PARTS[kind] + 40 * 2 * 32 * 101)
    assert 2.9 < told.training.flops / told.forward.flops < 3.2


def test_scaled_dot_product_attention_costs_its_products():
    class Sdpa(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    told = sc.cost(Sdpa(), 128, inputs=lambda length: torch.zeros(2, 4, length, 16, requires_grad=True))
    assert told.forward.flops == 2 * 4 * 2 * 2 * 128 * 128 * 16
    assert told.training.flops == told.forward.flops * 7 // 2
    for step in (*told.forward.steps, *told.training.steps):  # products that a machine is asked the speed of
        assert not step.flops or len(step.shape) == 4


@pytest.mark.parametrize("is_fast", [True, False])
def test_torch_is_left_as_it_was(is_fast):
    before, reads = torch.backends.mha.get_fastpath_enabled(), transformer._detect_is_causal_mask
    mkldnn = torch.backends.mkldnn.enabled
    torch.backends.mha.set_fastpath_enabled(is_fast)
    try:
        sc.cost(Stack("encoder"), 8, inputs=ids)
        with pytest.raises(RuntimeError, match="same reduction dim"):
            sc.cost(nn.Linear(3, 3), 8, inputs=vectors)
    finally:
        after = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(before)
    assert after is is_fast
    assert torch.backends.mkldnn.enabled is mkldnn
    assert transformer._detect_is_causal_mask is reads


def test_fused_operations_of_torch_are_counted():
    def vectors(length):
        return torch.zeros(1, length, 32)

    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True).eval()
    assert sc.cost(layer, 40, inputs=vectors).forward.flops == ATTENTION + FEED
    layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    assert sc.cost(layer, 40, inputs=lambda length: (vectors(length),) * 3).forward.flops == ATTENTION
    layer = nn.LSTM(32, 32, batch_first=True).eval()
    assert sc.cost(layer, 40, inputs=vectors).forward.flops == 40 * 2 * 4 * LINEAR
