"""Laws that compare the output, the lse and their derivatives with the definition."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from saccade.positions import ALiBi
from saccade.scores import Cosine
from saccade.support.language import Message
from saccade.support.numerics import wide_dtype
from saccade.testing.case import Case
from saccade.testing.kernel_under_test import Subject
from saccade.testing.laws import applicability
from saccade.testing.laws.backward import gradients, truth_gradients
from saccade.testing.laws.example_options import EXAMPLES, some_bias, some_relative, some_score, some_sink
from saccade.testing.laws.expect import LawBroken, close, holds
from saccade.testing.laws.law import law
from saccade.testing.problem import Problem

_ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@law()
def oracle(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The output equals softmax attention by its definition, computed in float64."""
    problem = case.problem(dtype, subject.device)
    close("the output", subject.output(problem), problem.truth()[0], dtype)


@law(needs=("lse",))
def lse(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The lse of a row is the natural logarithm of the sum of the exponentials of its scores."""
    problem = case.problem(dtype, subject.device)
    out, lse = subject.output_and_lse(problem)
    close("the lse", lse, problem.truth()[1], dtype, "lse")
    close("the output returned with the lse", out, problem.truth()[0], dtype)


@law(where=(applicability.has_queries_and_keys,))
def gradients_of_inputs(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The gradients of query, key and value are those of the definition."""
    problem = case.problem(dtype, subject.device)
    want = truth_gradients(problem)
    for name, got in gradients(subject, problem).items():
        close(Message("the gradient of {name}", name=name), got, want[name], dtype, "gradient")


@law(needs=("bias",), where=(applicability.has_queries_and_keys,))
def gradient_of_bias(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The gradient of the bias is that of the definition, summed over the broadcast dimensions."""
    problem = case.problem(dtype, subject.device)
    if problem.bias is None:
        problem = problem.but(bias=some_bias(problem))
    want = truth_gradients(problem, bias=True)["bias"]
    got = gradients(subject, problem, bias=True)["bias"]
    close("the gradient of the bias", got, want, dtype, "gradient")


@law(where=(applicability.trains_parameters, applicability.has_queries_and_keys))
def gradients_of_parameters(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The gradients of sink logits and of the parameters of scores and biases are those of the definition."""
    problem = case.problem(dtype, subject.device)
    for option in ("score", "sink_logit", "relative"):
        if option not in subject.offers:
            continue
        if option == "relative" and problem.bias is not None:
            continue
        with_option = problem if option in problem.in_use else problem.but(**{option: EXAMPLES[option](problem)})
        want = truth_gradients(with_option, parameters=True)
        for name, got in gradients(subject, with_option, parameters=True).items():
            holds(
                got.dtype == dtype,
                Message("the gradient of {name} is {got}, not {dtype}", name=name, got=got.dtype, dtype=dtype),
            )
            close(
                Message("the gradient of {name}, with a {option}", name=name, option=Message(option)),
                got,
                want[name],
                dtype,
                "gradient",
            )


@law(needs=("lse",), where=(applicability.has_queries_and_keys,))
def gradients_through_lse(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The lse of a row with a visible key is differentiable, and its gradients are those of the definition."""
    problem = case.problem(dtype, subject.device)
    want = truth_gradients(problem, through="lse")
    for name, got in gradients(subject, problem, through="lse").items():
        close(Message("the gradient of {name} through the lse", name=name), got, want[name], dtype, "gradient")


@law(where=(applicability.has_queries_and_keys, applicability.is_small), dtypes=(torch.float64,))
def gradcheck(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The gradients agree with finite differences of the output itself."""
    problem = case.problem(dtype, subject.device)
    leaves = problem.leaves()
    holds(torch.isfinite(subject.output(leaves)).all(), "the output is not finite, so it has no derivative")

    def answer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return subject.output(problem.but(query=query, key=key, value=value))

    _expect_derivative(answer, leaves.query, leaves.key, leaves.value)
    trained = problem.leaves(parameters=True)
    parameters = [x for x in trained.parameters().values() if x.requires_grad]
    if parameters:
        # Parameters are perturbed in place, in their modules.
        _expect_derivative(lambda *_: subject.output(trained), *parameters)


def _expect_derivative(answer: Callable[..., Tensor], *inputs: Tensor) -> None:
    try:
        torch.autograd.gradcheck(answer, inputs, fast_mode=True)
    except GradcheckError as reason:
        raise LawBroken(" ".join(str(reason).split())[:300]) from None


@law(needs=("scale",))
def scale(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """An explicit scale replaces the default, even if it is 0."""
    problem = case.problem(dtype, subject.device)
    for factor in (0.0, 0.3, 2.0):
        scaled = problem.but(scale=factor)
        close(
            Message("the output with scale={factor}", factor=factor), subject.output(scaled), scaled.truth()[0], dtype
        )


@law(needs=("softcap",))
def softcap(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """A softcap c replaces a scaled score s by c * tanh(s / c)."""
    problem = case.problem(dtype, subject.device)
    for cap in (0.5, 20.0):
        capped = problem.but(softcap=cap)
        close(Message("the output with softcap={cap}", cap=cap), subject.output(capped), capped.truth()[0], dtype)


@law(needs=("bias",), where=(applicability.has_queries_and_keys,))
def bias(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """A bias is added to the scaled scores, broadcast as usual."""
    problem = case.problem(dtype, subject.device)
    added = some_bias(problem)
    for what, part in (("of a table", added), ("of one column", added[:, :1, :, :1]), ("of one row", added[:, :, :1])):
        biased = problem.but(bias=part)
        close(
            Message("the output with a bias {what}", what=Message(what)),
            subject.output(biased),
            biased.truth()[0],
            dtype,
        )


@law(needs=("score",), where=(applicability.has_queries_and_keys, applicability.is_small))
def score(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """A score replaces the dot product and sets the default scale; scale and softcap apply to it in the same way."""
    problem = case.problem(dtype, subject.device)
    network = some_score(problem)
    alike = problem.key.shape[3] == problem.query.shape[3]
    for compare in (network, Cosine()) if alike else (network,):
        compared = problem.but(score=compare)
        what = Message("the output with the score {score}", score=type(compare).__name__)
        close(what, subject.output(compared), compared.truth()[0], dtype)
    for option, number in (("scale", 1.7), ("softcap", 0.8)):
        if option in subject.offers:
            compared = problem.but(score=network, **{option: number})
            close(
                Message("the output with a score and a {option}", option=Message(option)),
                subject.output(compared),
                compared.truth()[0],
                dtype,
            )


@law(needs=("relative",), where=(applicability.has_queries_and_keys, applicability.is_small))
def relative(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """A relative bias is added like any other bias; its value depends on the query's position minus the key's."""
    problem = case.problem(dtype, subject.device).but(bias=None)
    for distance_bias in (some_relative(problem), ALiBi(case.num_heads)):
        biased = problem.but(relative=distance_bias)
        close(
            Message("the output with {bias}", bias=type(distance_bias).__name__),
            subject.output(biased),
            biased.truth()[0],
            dtype,
        )


@law(needs=("sink_logit",))
def sink(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """A sink adds a term without a key to each softmax denominator, and the lse includes this term."""
    problem = case.problem(dtype, subject.device)
    sunk = problem.but(sink_logit=some_sink(problem))
    out, lse = sunk.truth()
    close("the output with a sink", subject.output(sunk), out, dtype)
    if "lse" in subject.offers:
        close("the lse with a sink", subject.output_and_lse(sunk)[1], lse, dtype, "lse")
    # A very low sink logit changes nothing; a very high one takes all the weight.
    for logit, factor in ((-1e4, 1.0), (1e4, 0.0)):
        extreme = problem.but(sink_logit=torch.full_like(some_sink(problem), logit))
        want = factor * problem.but(sink_logit=None).truth()[0]
        close(Message("the output with a sink logit of {logit:g}", logit=logit), subject.output(extreme), want, dtype)


@law(needs=("scale", "softcap", "bias"), where=(applicability.has_queries_and_keys,))
def order(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Scores are scaled, then capped, then biased, then masked."""
    problem = case.problem(dtype, subject.device)
    problem = problem.but(scale=1.5, softcap=0.5, bias=some_bias(problem))
    close("the output with all options", subject.output(problem), problem.truth()[0], dtype)


@law(dtypes=_ALL_DTYPES)
def dtypes(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The output has the query's dtype and the value's width; the lse is float32, or float64 for float64."""
    problem = case.problem(dtype, subject.device)
    shape = [*problem.query.shape[:3], problem.value.shape[3]]
    _expect_form("the output", subject.output(problem), dtype, shape, problem)
    if "lse" in subject.offers:
        out, lse = subject.output_and_lse(problem)
        _expect_form("the output returned with the lse", out, dtype, shape, problem)
        _expect_form("the lse", lse, wide_dtype(dtype), shape[:3], problem)


@law(
    cases=(Case("two-large-scores", batch=1, num_heads=1, num_kv_heads=1, q_len=1, kv_len=2, head_dim=4, value_dim=4),),
    dtypes=(torch.bfloat16, torch.float16),
)
def half_precision(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """For half-precision inputs, scores and softmax are computed in float32 or wider."""
    problem = case.problem(dtype, subject.device)
    # All numbers below are exact in half precision except the second score: 0.5 * (64 * 64 + 2) = 2049.
    query = torch.zeros_like(problem.query)
    key, value = torch.zeros_like(problem.key), torch.zeros_like(problem.value)
    query[..., 0], query[..., 1] = 64.0, 1.0
    key[..., 0], key[:, :, 1, 1] = 64.0, 2.0
    value[:, :, 1] = 1.0
    want = torch.full_like(problem.query, 1 / (1 + math.exp(-1)))
    got = subject.output(problem.but(query=query, key=key, value=value))
    close("the weight of a score of 2049 next to one of 2048", got, want, dtype)


def _expect_form(what: str, got: Tensor, dtype: torch.dtype, shape: list[int], problem: Problem) -> None:
    holds(got.dtype == dtype, Message("{what} is {got}, not {dtype}", what=Message(what), got=got.dtype, dtype=dtype))
    holds(
        list(got.shape) == shape,
        Message("{what} has shape {got}, not {want}", what=Message(what), got=list(got.shape), want=shape),
    )
    holds(
        got.device == problem.query.device,
        Message("{what} is on {got}, not on {device}", what=Message(what), got=got.device, device=problem.query.device),
    )


LAWS = (
    *(oracle, lse, gradients_of_inputs, gradient_of_bias, gradients_of_parameters, gradients_through_lse, gradcheck),
    *(scale, softcap, bias, score, relative, sink, order, dtypes, half_precision),
)
