"""Kernels of every form are judged right when they are, and wrong when they are wrong in a way of that form."""

import dataclasses

import pytest
import torch
from tests.sampled import sampled
from tests.testing.right_kernels_of_forms import RIGHT, attend, flash, from_pages, packed, step_by_step

from saccade.support.errors import UnsupportedError
from saccade.testing import LAWS, adapters

CASES = ["none", "causal", "causal-extend", "widths-differ", "window-past", "padding", "documents", "biased"]
FEW = {"cases": CASES, "dtypes": [torch.float32], "seed": 0}
QUICK = ("oracle", "scale", "bias", "declined", "offered", "batch", "decode", "zero_lengths")


@pytest.mark.ci
@pytest.mark.parametrize("name", sampled(RIGHT, 3))
def test_a_right_kernel_of_each_form_is_right(name):
    form = RIGHT[name]
    laws = [law for law in LAWS if law.name in QUICK and law.name not in form.left_out]
    report = form.check(laws=laws, **FEW)
    assert report.ok, report
    told = [result for result in report.kept if result.law == "oracle"]
    assert len(told) >= 2, report


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_of_each_form_keeps_all_laws(name):
    report = RIGHT[name].check(**FEW | {"cases": [*CASES, *RIGHT[name].cases]})
    assert report.ok, report


def _wrong(form, kernel):
    return dataclasses.replace(form, kernel=kernel)


WRONG = {
    "flash": lambda q, k, v, causal, window_size, **more: flash(q, k, v, causal=causal, window_size=(-1, -1), **more),
    "causal-flag": lambda q, k, v, causal: flash(
        q, *(x[:, : q.shape[1] if causal else None] for x in (k, v)), causal=causal
    ),
    "varlen": lambda q, k, v, cu_q, cu_k, *sizes, **more: packed(q, k, v, cu_q[[0, -1]], cu_k[[0, -1]], 99, 99, **more),
    "paged": lambda q, k, v, *, block_table, **more: from_pages(
        q, k, v, block_table=block_table.sort(1).values, **more
    ),
    "gla": lambda q, k, v, g, **more: step_by_step("gla")(q, k, v, g=g.mean(-1), **more),
    "delta": step_by_step("linear"),
    "gated_delta": lambda q, k, v, initial_state, **more: step_by_step("gated_delta")(q, k, v, **more),
    "kda": lambda q, k, v, g, **more: step_by_step("kda")(q, k, v, g=g.mean(-1), **more),
    "rwkv7": lambda q, k, v, a, b, **more: step_by_step("rwkv7")(q, k, v, a=b, b=a, **more),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_of_the_form_breaks_the_definition(name):
    report = _wrong(RIGHT[name], WRONG[name]).check(laws=["oracle"], **FEW)
    assert {result.law for result in report.broken} == {"oracle"}, report


def test_block_sparse_kernels_that_read_the_wrong_blocks_break_the_definition():
    def shifted(q, k, v, *, kv_num_blocks, kv_indices):
        return RIGHT["blocks"].kernel(q, k, v, kv_num_blocks=kv_num_blocks, kv_indices=kv_indices.flip(3))

    form = _wrong(RIGHT["blocks"], shifted)
    report = form.check(laws=["oracle"], cases=list(form.cases), dtypes=[torch.float32], seed=0)
    assert len(report.broken) == 4, report


class _Launched:
    """A kernel that is launched on a grid, like a function of Triton: each program writes some rows of one head."""

    def __init__(self, shift=0):
        self.shift = shift

    def __getitem__(self, grid):
        def launch(
            q, k, v, mask, out, heads, kv_heads, q_len, kv_len, scale, *, HEAD_DIM, VALUE_DIM, BLOCK_Q, BLOCK_KV
        ):
            assert (mask.dtype, BLOCK_KV, q.shape[3], v.shape[3]) == (torch.int8, 8, HEAD_DIM, VALUE_DIM)
            assert (k.shape[2], out.isnan().all()) == (kv_len, True)
            queries, masks, outs = (x.view(-1, q_len, x.shape[3]) for x in (q, mask, out))
            keys, values = (x.view(-1, kv_len, x.shape[3]) for x in (k, v))
            for block in range(grid[0]):
                rows = slice(block * BLOCK_Q + self.shift, block * BLOCK_Q + BLOCK_Q)
                for head in range(grid[1]):
                    of = head // heads * kv_heads + head % heads // (heads // kv_heads)
                    three = (queries[head, rows], keys[of], values[of])
                    whole = attend(*(x[None, None] for x in three), masks[None, None, head, rows] == 1, scale=scale)
                    outs[head, rows] = whole[0, 0]

        return launch


def _launched(**options):
    return adapters.triton_function(_Launched(**options), block_q=4, constants={"BLOCK_KV": 8})


def test_a_kernel_launched_on_a_grid_is_right_without_triton_too():
    form = _launched()
    report = form.check(laws=[law for law in LAWS if law.name in QUICK], **FEW)
    assert report.ok, report
    assert {result.case for result in report.kept if result.law == "oracle"} >= {"causal", "padding", "window-past"}
    assert {result.law for result in _launched(shift=1).check(laws=["oracle"], **FEW).broken} == {"oracle"}


@pytest.mark.parametrize("law", ["isolation", "empty_rows"])
def test_laws_check_the_output_of_a_kernel_without_gradients(law):
    report = _launched().check(laws=[law], cases=["window-past", "nothing", "padding"], dtypes=[torch.float32], seed=0)
    assert report.ok, report
    assert report.kept


def test_a_kernel_launched_on_a_grid_refuses_what_it_cannot_take():
    query = torch.randn(1, 2, 4, 6, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"no gradients(.|\n)*powers of two"):
        _launched()(query, query, query, torch.ones(1, 2, 4, 4, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match="no empty inputs"):
        _launched()(query[:0], query[:0], query[:0], torch.ones(0, 2, 4, 4, dtype=torch.bool))


@torch.library.custom_op("saccade_tests::right", mutates_args=())
def _right_op(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return RIGHT["bhld"].kernel(query, key, value, mask)


def test_an_operation_without_a_fake_implementation_fails_the_checks_of_torch_library():
    report = adapters.operator("saccade_tests::right").check(laws=["oracle"], **FEW)
    assert report.ok, report
    form = adapters.operator("saccade_tests::right")
    report = form.check(laws=list(form.laws), **FEW)
    assert report.broken[0].law == "opcheck"


def test_heads_of_a_state_space_model_differ_in_their_rates_so_no_law_reverses_them():
    assert "heads" in RIGHT["ssd"].left_out
    assert "heads" not in RIGHT["gla"].left_out


def test_inputs_that_a_form_cannot_express_are_refused_with_the_reason():
    query = torch.randn(1, 2, 4, 8)
    mask = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    mask[0, 0, 2, 1] = False
    with pytest.raises(UnsupportedError, match="takes only causal masks and windows"):
        RIGHT["flash"](query, query, query, mask)
    with pytest.raises(UnsupportedError, match="takes no softcap"):
        RIGHT["flash"](query, query, query, mask | True, softcap=1.0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: adapters.layout(flash, "bhd"), "order must be"),
        (lambda: adapters.layout(3), "kernel must be callable"),
        (lambda: adapters.recurrent(flash, "rwkv"), "rule must be"),
        (lambda: adapters.operator("nowhere::nothing"), "name of a registered operator"),
        (lambda: adapters.c_function("nowhere.so", "attention"), "shared library"),
    ],
)
def test_wrong_settings_are_refused(make, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        make()
