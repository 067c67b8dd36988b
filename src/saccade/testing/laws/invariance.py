"""Laws of invariance: they compare the results of one function on related inputs."""

import torch

from saccade.support.language import Message
from saccade.support.numerics import wide_dtype
from saccade.testing.case import Case
from saccade.testing.kernel_under_test import Subject
from saccade.testing.laws import applicability
from saccade.testing.laws.backward import random_like
from saccade.testing.laws.expect import close, same
from saccade.testing.laws.law import law
from saccade.testing.problem import Part


@law()
def ones(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The weights of a row with a visible key sum to 1 minus the sink's share; for values of 1, this is the output."""
    problem = case.problem(dtype, subject.device)
    problem = problem.but(value=torch.ones_like(problem.value))
    out = subject.output(problem)
    total = problem.sees_something.double()
    if problem.sink_logit is not None:
        lse = problem.truth()[1]
        total = torch.where(problem.sees_something, 1 - (problem.sink_logit[:, None] - lse).exp(), 0.0)
    close("the output for values of 1", out, total[..., None].expand_as(out), dtype)


@law()
def linear(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The output is linear in the value."""
    problem = case.problem(dtype, subject.device)
    other = random_like(problem.value, case.seed)
    apart = 2 * subject.output(problem) - 3 * subject.output(problem.but(value=other))
    together = subject.output(problem.but(value=2 * problem.value - 3 * other))
    same("the output for 2u - 3v", together, apart, dtype)


@law(needs=("gqa",), where=(applicability.shares_keys,))
def gqa(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Grouped heads give the same output as keys and values that are repeated for each query head."""
    problem = case.problem(dtype, subject.device)
    same("the output of grouped heads", subject.output(problem), subject.output(problem.ungrouped()), dtype)


@law(where=(applicability.has_several_items,))
def batch(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """A batch item gives the same result in the batch as alone."""
    problem = case.problem(dtype, subject.device)
    together = subject.output(problem)
    for index in range(case.batch):
        alone = subject.output(problem.item(index))
        same(Message("batch item {index}", index=index), together[index : index + 1], alone, dtype)


@law()
def heads(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Heads are independent: reversing their order reverses the results."""
    problem = case.problem(dtype, subject.device)
    reversed_heads = subject.output(problem.heads_reversed())
    same("the output with the heads reversed", reversed_heads, subject.output(problem).flip(1), dtype)


@law(where=(applicability.is_full,))
def key_order(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """If every query sees every key, the order of the keys does not matter, as long as each keeps its position."""
    problem = case.problem(dtype, subject.device)
    reordered = subject.output(problem.keys_reversed())
    same("the output with the keys reversed", reordered, subject.output(problem), dtype)


@law(needs=("bias",))
def shift(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """A constant added to all scores, including the sink, changes no output; the lse grows by the constant."""
    # The exponential of 1000 overflows in float64; in float32 a constant of this size would round the scores away.
    constant = 1000.0 if dtype == torch.float64 else 16.0
    problem = case.problem(dtype, subject.device).but(bias=None, relative=None)
    shifted = problem.but(
        bias=problem.query.new_full((1, 1, *problem.allowed.shape[2:]), constant),
        # In half precision the sum would round the sink, but not the scores.
        sink_logit=None if problem.sink_logit is None else problem.sink_logit.to(wide_dtype(dtype)) + constant,
    )
    same("the output with raised scores", subject.output(shifted), subject.output(problem), dtype)
    if "lse" in subject.offers:
        got, want = subject.output_and_lse(shifted)[1], subject.output_and_lse(problem)[1] + constant
        same("the lse with raised scores", got, want, dtype, "lse")


@law(needs=("lse",), where=(applicability.has_no_sink,))
def merge(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The results over two disjoint sets of keys, weighted by their lse, give the result over both."""
    problem = case.problem(dtype, subject.device)
    want, want_lse = subject.output_and_lse(problem)
    pairs: tuple[tuple[Part, Part], ...] = (("early", "late"), ("even", "odd"))
    for first, second in pairs:
        a, a_lse = subject.output_and_lse(problem.part(first))
        b, b_lse = subject.output_and_lse(problem.part(second))
        both = torch.logaddexp(a_lse, b_lse)
        a_share, b_share = ((lse - both).exp().nan_to_num(nan=0.0)[..., None] for lse in (a_lse, b_lse))
        same(
            Message("{first} and {second} keys merged", first=first, second=second),
            a * a_share + b * b_share,
            want,
            dtype,
        )
        same(
            Message("the lse of {first} and {second} keys merged", first=first, second=second),
            both,
            want_lse,
            dtype,
            "lse",
        )


@law(where=(applicability.is_causal, applicability.default_positions, applicability.has_several_queries))
def decode(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Under a causal mask, every split into steps gives the result of the full run."""
    problem = case.problem(dtype, subject.device)
    whole = subject.output(problem)
    steps = range(1, case.q_len) if case.q_len <= 16 else (1, case.q_len // 2, case.q_len - 1)
    for split in steps:
        first, rest = subject.output(problem.step(0, split)), subject.output(problem.step(split, case.q_len))
        same(Message("a prefill of {split}", split=split), first, whole[:, :, :split], dtype)
        same(Message("the rest after a prefill of {split}", split=split), rest, whole[:, :, split:], dtype)
        token = subject.output(problem.step(split, split + 1))
        same(Message("a single query at {split}", split=split), token, whole[:, :, split : split + 1], dtype)


LAWS = (ones, linear, gqa, batch, heads, key_order, shift, merge, decode)
