"""Consequences of the check on first use: one warning, another kernel from then on, and a reason in `explain`."""

import warnings

import pytest
import torch
from tests.engine.first_use_check import wrong_kernels
from torch.utils.checkpoint import checkpoint

import saccade as sc
from saccade import masks
from saccade.engine import dispatch as engine
from saccade.engine import first_use_check
from saccade.engine.kernels.kernel import Verdict
from saccade.engine.kernels.tiled import Tiled


class Counted(wrong_kernels.Right):
    """A right kernel that counts its products."""

    def __init__(self):
        self.runs = 0

    def forward(self, given, value, dropped):
        self.runs += 1
        return super().forward(given, value, dropped)


@pytest.fixture(autouse=True)
def records(monkeypatch):
    """Start with no recorded results."""
    monkeypatch.setattr("saccade.engine.first_use_check.registry._RECORDS", {})


def asked_first(monkeypatch, kernel):
    monkeypatch.setattr(engine, "KERNELS", (kernel, *engine.KERNELS))
    return kernel


def inputs(n=130, **options):
    query, key, value = torch.randn(3, 1, 2, n, 16, **options)
    return query, key, value


@pytest.mark.usefixtures("without_native")
def test_a_wrong_kernel_warns_once_and_another_one_runs(monkeypatch):
    asked_first(monkeypatch, wrong_kernels.OneKeyTooFew())
    query, key, value = inputs()
    expected = sc.attention(query, key, value, masks.Causal(), impl="tiled")
    with pytest.warns(
        UserWarning, match="changed: its first product for float32 with Causal.. on cpu differed"
    ) as told:
        got = sc.attention(query, key, value, masks.Causal())
    torch.testing.assert_close(got, expected)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(sc.attention(query, key, value, masks.Causal()), expected)
    explanation = sc.AttentionMatrix(query, key, masks.Causal()).explain()
    assert explanation.kernel == "fused"
    (reason,) = explanation.skipped["changed"]
    assert reason in str(told[0].message)
    assert f"not changed: {reason}" in str(explanation)


def test_by_its_name_it_is_refused(monkeypatch):
    asked_first(monkeypatch, wrong_kernels.OneKeyTooFew())
    tensors = inputs()
    with pytest.warns(UserWarning, match="differed"), pytest.raises(sc.UnsupportedError, match="differed from the def"):
        sc.attention(*tensors, masks.Causal(), impl="changed")
    with pytest.raises(sc.UnsupportedError, match="differed from the definition: "):
        sc.attention(*tensors, masks.Causal(), impl="changed")


def test_a_kernel_of_ones_own_is_looked_at_too():
    tensors = inputs()
    told = "raised RuntimeError: no kernel image"
    with pytest.warns(UserWarning, match=told), pytest.raises(sc.UnsupportedError, match=told):
        sc.attention(*tensors, impl=wrong_kernels.Raises())
    right = wrong_kernels.Right()
    torch.testing.assert_close(sc.attention(*tensors, impl=right), sc.attention(*tensors))
    assert sc.AttentionMatrix(*tensors[:2], impl=right).explain().seen.startswith("16 rows on cpu were right")


def test_each_kind_is_looked_at_once(monkeypatch):
    kernel = asked_first(monkeypatch, Counted())
    for _ in range(3):
        sc.attention(*inputs(), masks.Causal())
    assert kernel.runs == 3 + 1
    sc.attention(*inputs(), masks.Causal() & masks.Window(5, 0))
    sc.attention(*inputs(), masks.Causal() & masks.Window(9, 0))  # the same classes
    assert kernel.runs == 6 + 1
    sc.attention(*inputs(dtype=torch.bfloat16), masks.Causal())
    sc.attention(*inputs(256), masks.Causal())  # whole blocks
    sc.AttentionMatrix(*(few := inputs(20))[:2], masks.Causal()) @ few[2]  # less than one
    assert kernel.runs == 10 + 3


def test_gradients_are_looked_at_when_they_are_first_wanted(monkeypatch):
    asked_first(monkeypatch, wrong_kernels.Unmoved())
    query, key, value = inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sc.attention(query, key, value, masks.Causal())
        assert "right within 0.0001 of their size" in sc.AttentionMatrix(query, key, masks.Causal()).explain().seen
    key.requires_grad_()
    with pytest.warns(UserWarning, match="gradient of key of key"):
        sc.attention(query, key, value, masks.Causal()).square().sum().backward()
    assert key.grad.abs().sum() > 0


def test_it_says_what_has_been_seen(monkeypatch):
    asked_first(monkeypatch, wrong_kernels.Right())
    query, key, value = inputs()
    A = sc.AttentionMatrix(query, key, masks.Causal())
    assert "checked  not yet: its first product on this device will be compared with the definition" in str(A.explain())
    A @ value
    assert "checked  16 rows on cpu were right within 0.0001 of their size (output " in str(A.explain())
    assert "seen" not in str(sc.AttentionMatrix(query, key, masks.Causal(), impl="tiled").explain())


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("SACCADE_FIRST_USE", "off")
    kernel = asked_first(monkeypatch, Counted())
    query, key, value = inputs()
    sc.attention(query, key, value)
    assert kernel.runs == 1
    assert sc.AttentionMatrix(query, key).explain().seen == "nothing: SACCADE_FIRST_USE=off"
    monkeypatch.setenv("SACCADE_FIRST_USE", "sometimes")
    with pytest.raises(ValueError, match="SACCADE_FIRST_USE must be on or off in the environment; got 'sometimes'"):
        sc.attention(query, key, value)


def test_a_kernel_that_raises_later_is_not_chosen_again(monkeypatch):
    """A kernel that passed at one size and fails to compile at another is not chosen again."""
    kernel = asked_first(monkeypatch, wrong_kernels.Right())
    query, key, value = inputs()
    sc.attention(query, key, value)

    def forward(given, value, dropped):
        raise torch._dynamo.exc.BackendCompilerFailed(forward, RuntimeError("out of shared memory"), None)

    monkeypatch.setattr(kernel, "forward", forward)
    with pytest.warns(
        UserWarning, match="right: a product for float32 with Full.. on cpu raised BackendCompilerFailed"
    ):
        out = sc.attention(query, key, value)
    torch.testing.assert_close(out, sc.attention(query, key, value, impl="reference"))
    monkeypatch.setattr("saccade.engine.first_use_check.registry._RECORDS", {})
    monkeypatch.setenv("SACCADE_FIRST_USE", "off")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="out of shared memory"):
        sc.attention(query, key, value)


def test_the_check_has_no_side_effects(monkeypatch):
    """The check changes neither the random state nor the saved tensors that checkpointing counts."""
    kernel = asked_first(monkeypatch, Counted())
    query, key, value = (x.requires_grad_() for x in inputs())
    state = torch.get_rng_state()
    sc.attention(query, key, value, masks.Causal())
    assert torch.equal(state, torch.get_rng_state())
    assert kernel.runs == 2
    monkeypatch.setattr("saccade.engine.first_use_check.registry._RECORDS", {})
    out = checkpoint(sc.attention, query, key, value, masks.Causal(), use_reentrant=False)
    out.sum().backward()  # it counts what is kept, before and again
    assert value.grad is not None


def test_a_check_waits_for_clean_inputs(monkeypatch):
    """Inputs with NaN are not checked, since the definition gives NaN; the next product is."""
    kernel = asked_first(monkeypatch, Counted())
    query, key, value = inputs()
    spoilt = value.clone()
    spoilt[0, 0, -1, 0] = torch.nan
    assert sc.attention(query, key, spoilt, masks.Causal())[0, 0, :-1].isfinite().all()
    before = kernel.runs
    sc.attention(query, key, value, masks.Causal())
    assert kernel.runs == before + 2


def test_a_kernel_that_hides_nothing_leaves_nan_to_another(monkeypatch):
    class Plain(wrong_kernels.Right):
        supports_masked_rows = False

        def forward(self, given, value, dropped):
            assert given.bias is None
            return super().forward(given, value, dropped)

    asked_first(monkeypatch, Plain())
    query, key, value = inputs()
    key[0, 1, 100, 3], value[0, 0, 90, 0] = torch.inf, torch.nan
    key.requires_grad_()
    got = sc.attention(query, key, value, masks.Causal())
    torch.testing.assert_close(got, sc.attention(query, key, value, masks.Causal(), impl="tiled"), equal_nan=True)


@pytest.mark.usefixtures("without_native")
def test_a_kernel_without_lse_is_not_asked_for_one(monkeypatch):
    class Silent(wrong_kernels.Right):
        supports_masked_rows = False

        def verdict(self, given, request):
            return Verdict(("it gives none",) if request.needs_lse else ())

        def forward(self, given, value, dropped):
            return super().forward(given, value, dropped)[0], None

    asked_first(monkeypatch, Silent())
    query, key, value = inputs()
    A = sc.AttentionMatrix(query, key, masks.Causal())
    assert A.explain().kernel == "right"
    out = A @ value
    torch.testing.assert_close(A.lse, sc.attention_with_lse(query, key, value, masks.Causal())[1])
    torch.testing.assert_close(out, sc.attention(query, key, value, masks.Causal(), impl="tiled"))
    with_sink = sc.AttentionMatrix(query, key, sink_logit=torch.zeros(2)).explain()
    assert with_sink.kernel == "fused"
    assert with_sink.skipped["right"] == ("it gives none",)


def test_kernels_by_hand_are_run_as_they_will_be(monkeypatch):
    asked_first(monkeypatch, wrong_kernels.NoDelta())
    query, key, value = (x.requires_grad_() for x in inputs())
    with pytest.warns(UserWarning, match="by hand: its first product"):
        out = sc.attention(query, key, value)
    (grad,) = torch.autograd.grad(out.sum(), query)
    (want,) = torch.autograd.grad(sc.attention(query, key, value, impl="reference").sum(), query)
    torch.testing.assert_close(grad, want)
    assert first_use_check.reasons(Tiled(), sc.AttentionMatrix(query, key).inputs) == ()
