"""Laws about the behaviour of an attention function as a program: side effects, strides, empty inputs, memory."""

import dataclasses
import math
from functools import partial

import torch

from saccade.masks import Causal, Window, sparse_transformer
from saccade.positions import ALiBi, ShawKeys
from saccade.scores import Additive
from saccade.support.language import Message
from saccade.testing.case import Case, seeded
from saccade.testing.kernel_under_test import Subject
from saccade.testing.largest_tensor import largest_tensor
from saccade.testing.laws import applicability, buffers, repeated_calls
from saccade.testing.laws.backward import gradients
from saccade.testing.laws.expect import close, holds
from saccade.testing.laws.law import law


@law(
    cases=tuple(
        dataclasses.replace(case, name=f"{case.name}-without-{what}", batch=batch, q_len=q_len, kv_len=kv_len)
        for case in (
            Case("none"),
            Case("causal", Causal(), lambda b, h, q, kv: kv <= q),
            Case("sink", sink=True),
            Case("additive", score=seeded(lambda: Additive(8, 8, 3))),
            Case("relative", relative=seeded(lambda: ShawKeys(8, 2))),
        )
        for what, batch, q_len, kv_len in (("queries", 2, 0, 7), ("keys", 2, 7, 0), ("items", 0, 7, 7))
    )
)
def zero_lengths(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Without queries, keys or batch items, the output has the right shape; without keys, it is 0."""
    problem = case.problem(dtype, subject.device)
    want, want_lse = problem.truth()
    close("the output", subject.output(problem), want, dtype)
    if "lse" in subject.offers:
        close("the lse", subject.output_and_lse(problem)[1], want_lse, dtype, "lse")
    for name, gradient in gradients(subject, problem).items():
        holds((gradient == 0).all(), Message("the gradient of {name} is not 0", name=name))


@law(
    where=(applicability.claims_memory,),
    cases=tuple(
        dataclasses.replace(
            case, batch=1, num_heads=1, num_kv_heads=1, q_len=length, kv_len=length, head_dim=2, value_dim=2
        )
        for length, case in (
            (1024, Case("full")),
            (1024, Case("causal", Causal())),
            (1024, Case("window", Window(64, 0))),
            (1024, Case("sparse", sparse_transformer(32))),
            (512, Case("relative", relative=ALiBi(1))),
            (512, Case("score", Window(64, 0), score=seeded(lambda: Additive(2, 2, 4)))),
        )
    ),
    dtypes=(torch.float32,),
)
def cost(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Doubling the length does not make the largest tensor, forward or backward, grow faster than claimed."""
    claimed = subject.claims.memory_exponent or 0.0
    sizes = []
    for length in (case.q_len, 2 * case.q_len):
        problem = dataclasses.replace(case, q_len=length, kv_len=length).problem(dtype, subject.device)
        sizes.append(largest_tensor(partial(gradients, subject, problem)))
    exponent = math.log2(sizes[1] / sizes[0])
    sentence = Message(
        "the largest tensor grew from {before} to {after} bytes: length to the power {exponent:.2f}",
        before=sizes[0],
        after=sizes[1],
        exponent=exponent,
    )
    holds(exponent <= claimed + 0.25, Message("{sentence}, not {claimed:.2f}", sentence=sentence, claimed=claimed))


LAWS = (buffers.pure, repeated_calls.determinism, buffers.strides, zero_lengths, cost)
