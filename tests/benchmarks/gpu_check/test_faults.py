"""A fault in a kernel is reported by the name of the kernel, whatever the fault is."""

import pytest
import torch
from benchmarks.gpu_check.device import Processor
from benchmarks.gpu_check.report import Report, StepReport
from benchmarks.gpu_check.steps import Context
from benchmarks.gpu_check.summary import summary

import saccade as sc
from benchmarks.gpu_check import definition, numbers, rehearsal
from saccade import masks
from saccade.engine import dispatch
from saccade.engine.kernels.kernel import Verdict

CONTEXT = Context(Processor(), "quick", 1e12)
LENGTHS = (64, 129)


@pytest.fixture
def _on_cpu():
    with rehearsal.pretend():
        yield


def wrong_row(grad):
    grad = grad.clone()
    grad[:, 1, 37] *= 1.5
    return grad


def nan_of_cudnn(grad):
    return torch.full_like(grad, torch.nan) if grad.shape[2] % 128 == 64 else grad


FAULTS = {
    "one row of a gradient": (None, wrong_row),
    "all zeros": (lambda out: 0.0 * out, None),
    "NaN at L % 128 == 64": (None, nan_of_cudnn),
}


def seeded(monkeypatch, name, fault):
    """Change what a kernel gives: its output, or the gradient of its query."""
    of_out, of_grad = FAULTS[fault]
    (kernel,) = [kernel for kernel in dispatch.KERNELS if kernel.name == name]
    forward = type(kernel).forward

    def faulty(self, given, value, dropped):
        if of_grad is not None and not kernel.has_backward and given.query.requires_grad:
            given.query.register_hook(of_grad)
        out, lse = forward(self, given, value, dropped)
        return (out if of_out is None else of_out(out)), lse

    monkeypatch.setattr(type(kernel), "forward", faulty)
    if kernel.has_backward and of_grad is not None:
        backward = type(kernel).backward

        def faulty_backward(self, *arguments):
            of_query, *others = backward(self, *arguments)
            return of_grad(of_query), *others

        monkeypatch.setattr(type(kernel), "backward", faulty_backward)


def found(monkeypatch, kernel):
    monkeypatch.setattr(numbers, "_plan", lambda sizes: [(kernel, "causal", 32, LENGTHS, torch.bfloat16)])
    monkeypatch.setitem(numbers.SIZES, "quick", numbers.SIZES["quick"]._replace(compiled_lengths=(1,)))
    finding, summed = numbers.measure(CONTEXT)
    assert summed.text.startswith(
        "right in 0 variants" if finding.ok is not True else "right in 1 variants, errors up to"
    )
    return finding


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kernel", numbers.KERNELS)
def test_a_right_kernel_passes(kernel, monkeypatch):
    finding = found(monkeypatch, kernel)
    assert finding.name == f"{kernel}: causal, width 32, bfloat16"
    assert finding.ok, finding.text


@pytest.mark.ci
@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kernel", numbers.KERNELS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_reported_by_name(fault, kernel, monkeypatch, tmp_path):
    seeded(monkeypatch, kernel, fault)
    finding = found(monkeypatch, kernel)
    assert not finding.ok, finding.text
    length, place = {
        "one row of a gradient": ("length 64", "gradient of query at head 1, row 37"),
        "all zeros": ("length 64", "head"),
        "NaN at L % 128 == 64": ("length 64", "gradient of query at head 0, row 0 not finite"),
    }[fault]
    assert f"{length}: " in finding.text
    assert place in finding.text
    assert ("length 129" in finding.text) == (fault != "NaN at L % 128 == 64")
    report = Report.begun("cpu", quick=True, minutes=1.0, out=tmp_path)
    report.steps = [StepReport("numbers", "", 1.0, "failed", 1.0, [finding])]
    assert any(line.startswith(f"  FAILED {kernel}: causal") for line in summary(report.as_dict()))


@pytest.mark.usefixtures("_on_cpu")
def test_a_kernel_that_raises_or_refuses_what_it_must_run_has_failed(monkeypatch):
    def raises(self, given, value, dropped):
        raise RuntimeError("an illegal memory access")

    varlen = next(type(kernel) for kernel in dispatch.KERNELS if kernel.name == "varlen")
    monkeypatch.setattr(varlen, "forward", raises)
    finding = found(monkeypatch, "varlen")
    assert finding.ok is False
    assert "length 129 raised RuntimeError: an illegal memory access" in finding.text
    monkeypatch.setattr(varlen, "verdict", lambda self, given, request: Verdict(("it is Sunday",)))
    assert found(monkeypatch, "varlen")[:3] == ("varlen: causal, width 32, bfloat16", "refused: it is Sunday", False)


@pytest.mark.usefixtures("_on_cpu")
def test_a_check_of_first_use_that_accuses_the_innocent_has_failed(monkeypatch):
    monkeypatch.setattr(numbers, "_plan", lambda sizes: [("sdpa", "causal", 32, (64,), torch.bfloat16)])
    monkeypatch.setattr("saccade.engine.first_use_check.check_kernel._LIMITS", {torch.bfloat16: 1e-9})
    finding, summed = numbers.measure(CONTEXT)
    assert summed.text.startswith(
        "right in 0 variants" if finding.ok is not True else "right in 1 variants, errors up to"
    )
    assert finding.ok is False
    assert "first_use accuses it, and every row is right" in finding.text


def test_what_no_time_was_left_for_is_said():
    (finding,) = numbers.measure(CONTEXT._replace(ends=0.0))
    assert finding.text == "not measured: no time was left"


def test_every_kernel_comes_at_every_length_and_what_compiles_comes_last():
    plan = list(numbers._plan(numbers.SIZES["cuda"]))
    for kernel in ("sdpa", "varlen", "tiled"):
        lengths = [lengths for name, _, _, lengths, dtype in plan if name == kernel and dtype is torch.bfloat16]
        assert lengths == 24 * [(63, 64, 65, 127, 128, 129, 192, 704, 8191)]
    first = [kernel for kernel, *_ in plan].index("flex")
    assert {kernel for kernel, *_ in plan[first:]} == {"flex"}


@pytest.mark.parametrize("name", numbers.VARIANTS)
def test_the_definition_is_what_autograd_says(name, monkeypatch):
    """The definition in several groups of rows agrees with the reference kernel in float64 and autograd."""
    monkeypatch.setattr(definition, "_MOST_CELLS", {"cpu": 4 * 150 * 40})
    its = numbers._problem(numbers.VARIANTS[name], 150, 8, (4, 2), torch.float64, "cpu")
    leaves = [x.requires_grad_() for x in (its.query, its.key, its.value)]
    options, parameters = numbers._options(its, 4)
    for x in options.values():
        if isinstance(x, torch.nn.Module):
            x.double()
    arguments = (*leaves, numbers.VARIANTS[name].mask(150))
    out, lse = sc.attention_with_lse(*arguments, impl="reference", **options)
    named = {"query": leaves[0], "key": leaves[1], "value": leaves[2], **parameters}
    grads = torch.autograd.grad(out, list(named.values()), its.grad)
    right = definition.truth(its)
    expected = {"output": out, "lse": lse} | {f"gradient of {n}": x for n, x in zip(named, grads, strict=True)}
    assert right.values.keys() == right.sizes.keys() == expected.keys()
    for quantity, value in expected.items():
        # The parameters and their gradients are float32.
        torch.testing.assert_close(right.values[quantity], value.detach().double(), atol=1e-5, rtol=1e-6)
        error, _ = definition.worst(value, quantity, right)
        assert error < 1e-6
        spoilt = value.detach().clone()
        spoilt.view(-1)[-1] = torch.nan
        assert definition.worst(spoilt, quantity, right)[0] == float("inf")


def test_the_masks_say_what_the_comparisons_of_indices_say():
    q, kv = torch.arange(150)[:, None], torch.arange(150)
    for variant in numbers.VARIANTS.values():
        mask = masks.Full() if variant.mask(150) is None else variant.mask(150)
        assert torch.equal(variant.allowed(150)(q, kv).expand(150, 150), mask.to_dense(150)[0, 0])
