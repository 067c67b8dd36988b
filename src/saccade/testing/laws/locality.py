"""Laws of locality: masked pairs must not affect any output or gradient, and allowed pairs must."""

import torch
from torch import Tensor

from saccade.support.language import Message
from saccade.testing.case import Case
from saccade.testing.kernel_under_test import Subject
from saccade.testing.laws import applicability
from saccade.testing.laws.backward import gradients
from saccade.testing.laws.example_options import some_sink
from saccade.testing.laws.expect import holds, same
from saccade.testing.laws.law import law
from saccade.testing.problem import Problem

_NOT_FINITE = {"NaN": torch.nan, "inf": torch.inf, "-inf": -torch.inf}
_LEAST = 1e-7  # weights above this are representable in every dtype


@law(where=(applicability.has_queries_and_keys,))
def sensitivity(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The gradient of an output row reaches the values that the row may attend to, and no others."""
    problem = case.problem(dtype, subject.device).leaves()
    out = subject.output(problem)
    holds(out.requires_grad, "the output has no gradient with respect to the values")
    truth = problem.truth()[0]
    for head in range(problem.repeats):  # one head of every group at a time
        heads = slice(head, None, problem.repeats)
        for row in _spread(range(out.shape[2]), 8):
            upstream = torch.zeros_like(out)
            upstream[:, heads, row] = 1.0
            (reached,) = torch.autograd.grad(
                out, problem.value, upstream, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            got, want = reached.ne(0).any(-1), problem.allowed[:, heads, row]
            (true,) = torch.autograd.grad(truth, problem.value, upstream.double(), retain_graph=True)
            # A weight that underflows (below 6e-8 in float16) may be 0.
            vanishes = want & ~got & (true.abs().amax(-1) < _LEAST)
            holds(
                torch.equal(got | vanishes, want),
                Message(
                    "row {row} of head {head} reaches keys {got}, but may attend to {want}",
                    row=row,
                    head=head,
                    got=_indices(got),
                    want=_indices(want),
                ),
            )


@law(where=(applicability.hides_something,))
def polarity(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Changing a key and its value changes nothing for a query that may not attend to it."""
    problem = case.problem(dtype, subject.device)
    before = subject.output(problem)
    for key in _spread(_blind_keys(problem), 4):
        at = torch.tensor([key], device=problem.key.device)
        changed = problem.but(
            key=problem.key.index_add(2, at, torch.full_like(problem.key[:, :, :1], 9.0)),
            value=problem.value.index_add(2, at, torch.full_like(problem.value[:, :, :1], 9.0)),
        )
        blind = ~problem.allowed[..., key]
        same(
            Message("after key {key} changed, a row that may not see it", key=key),
            subject.output(changed)[blind],
            before[blind],
            dtype,
        )


@law(where=(applicability.is_causal, applicability.hides_something))
def causality(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Under a causal mask, changing later keys and values does not change earlier rows."""
    problem = case.problem(dtype, subject.device)
    before = subject.output(problem)
    positions = [case.positions_of_item(b) for b in range(case.batch)]
    for now in _spread(sorted({q for queries, _ in positions for q in queries if q is not None}), 4):
        past = _bool_tensor([[q is None or q <= now for q in queries] for queries, _ in positions], problem)[:, None]
        future = _bool_tensor([[kv is None or kv > now for kv in keys] for _, keys in positions], problem)[:, None]
        moved = 7.0 * future[..., None].to(problem.key)
        changed = problem.but(key=problem.key + moved, value=problem.value + moved)
        rows = past.expand(problem.query.shape[:3])
        what = Message("after all keys behind position {now} changed, a row up to that position", now=now)
        same(what, subject.output(changed)[rows], before[rows], dtype)


@law(where=(applicability.has_empty_rows,))
def empty_rows(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """A row without a visible key is exactly 0, its lse is -inf, and its gradients are 0."""
    problem = case.problem(dtype, subject.device)
    empty = ~problem.sees_something
    out = subject.output(problem)[empty]
    holds((out == 0).all(), Message("a row that sees nothing gives {got}, not 0", got=out.flatten()[:3].tolist()))
    if "lse" in subject.offers:
        lse = subject.output_and_lse(problem)[1][empty]
        holds(
            lse.isneginf().all(), Message("the lse of a row that sees nothing is {got}, not -inf", got=lse[:3].tolist())
        )
    if "sink_logit" in subject.offers:
        sunk = problem.but(sink_logit=torch.full_like(some_sink(problem), torch.nan))
        holds((subject.output(sunk)[empty] == 0).all(), "with a sink of NaN, a row that sees nothing is not 0")
    for name, gradient in gradients(subject, problem).items() if subject.has_gradients else ():
        holds(torch.isfinite(gradient).all(), Message("the gradient of {name} is not finite", name=name))
        if name == "query":
            holds((gradient[empty] == 0).all(), "the gradient of a query that sees nothing is not 0")


@law(where=(applicability.hides_something,), non_finite=True)
def isolation(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """NaN or inf in a key or value does not reach a query that may not attend to it, forward or backward."""
    problem = case.problem(dtype, subject.device)
    clean = subject.output(problem)
    for key in _spread(_blind_keys(problem), 2):
        blind = ~problem.allowed[..., key]
        want = gradients(subject, problem, blind) if subject.has_gradients else {}
        # Rows that see the changed key have undefined gradients for all their keys, so those are not checked.
        seen = problem.allowed[..., key, None] & problem.allowed
        untouched = ~seen.any(2).unflatten(1, (-1, problem.repeats)).any(2)
        for name, kind in (("key", "NaN"), ("value", "NaN"), ("key", "inf"), ("value", "-inf")):
            dirty = _poisoned(problem, name, key, kind)
            what = Message("with {kind} in {name} {key}", kind=kind, name=name, key=key)
            same(
                Message("{what}, a row that may not see it", what=what),
                subject.output(dirty)[blind],
                clean[blind],
                dtype,
            )
            if not want:
                continue
            got = gradients(subject, dirty, blind)
            for of, rows in (("query", blind), ("key", untouched), ("value", untouched)):
                same(
                    Message("{what}, the gradient of {of}", what=what, of=of),
                    got[of][rows],
                    want[of][rows],
                    dtype,
                    "gradient",
                )


@law(where=(applicability.has_queries_and_keys, applicability.has_several_queries), non_finite=True)
def rows(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Queries are independent: the content of one query, even NaN, does not change any other row."""
    problem = case.problem(dtype, subject.device)
    before = subject.output(problem)
    for query in _spread(range(problem.query.shape[2]), 2):
        others = torch.arange(problem.query.shape[2], device=problem.query.device) != query
        for kind in ("NaN", "inf"):
            out = subject.output(_poisoned(problem, "query", query, kind))
            same(
                Message("with {kind} in query {query}, another row", kind=kind, query=query),
                out[:, :, others],
                before[:, :, others],
                dtype,
            )


@law(where=(applicability.hides_something, applicability.has_queries_and_keys), non_finite=True)
def blindness(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """NaN or inf in a query, or in the gradient of its row, reaches no gradient of a key that the query may not see.

    The row of a query without visible keys is 0 and its lse is -inf, whatever the query contains. The gradients of
    other queries do not change, and neither do those of keys and values that the query may not attend to.
    """
    problem = case.problem(dtype, subject.device)
    sees = problem.sees_something
    blind = torch.nonzero(~sees.flatten(0, 1).all(0))[:, 0].tolist()
    some = torch.nonzero(~problem.allowed.all(-1).flatten(0, 1).all(0))[:, 0].tolist()
    for query in sorted({*_spread(blind, 1), *_spread(some, 2)}):
        others = torch.ones_like(sees)
        others[:, :, query] = False
        counts = others | ~sees  # gradients of rows with a visible key are undefined
        want = gradients(subject, problem, counts) if subject.has_gradients else {}
        reached = (problem.allowed & ~others[..., None]).any(2).unflatten(1, (-1, problem.repeats)).any(2)
        for kind in ("NaN", "inf"):
            dirty, what = (
                _poisoned(problem, "query", query, kind),
                Message("with {kind} in query {query}", kind=kind, query=query),
            )
            out = subject.output(dirty)
            holds((out[~sees] == 0).all(), Message("{what}, a row that sees nothing is not 0", what=what))
            if "lse" in subject.offers:
                lse = subject.output_and_lse(dirty)[1][~sees]
                holds(
                    lse.isneginf().all(),
                    Message("{what}, the lse of a row that sees nothing is not -inf", what=what),
                )
            if not want:
                continue
            got = gradients(subject, dirty, counts)
            for of, rows in (("query", counts), ("key", ~reached), ("value", ~reached)):
                same(
                    Message("{what}, the gradient of {of}", what=what, of=of),
                    got[of][rows],
                    want[of][rows],
                    dtype,
                    "gradient",
                )
    if not subject.has_gradients:
        return
    leaves = problem.leaves()
    out = subject.output(leaves)
    upstream = torch.where(sees[..., None], torch.ones_like(out), torch.nan)
    named = {"query": leaves.query, "key": leaves.key, "value": leaves.value}
    by_input = torch.autograd.grad(out, list(named.values()), upstream, allow_unused=True, materialize_grads=True)
    for of, gradient in zip(named, by_input, strict=True):
        what = Message(
            "if rows that see nothing have NaN as upstream gradient, the gradient of {of} is not finite", of=of
        )
        holds(torch.isfinite(gradient).all(), what)


@law(where=(applicability.shows_something,), non_finite=True)
def honesty(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """NaN in a query, visible key or visible value shows in the output; NaN in a query or key also shows in the lse."""
    problem = case.problem(dtype, subject.device)
    for key in _spread(range(problem.key.shape[2]), 2):
        sees = problem.allowed[..., key]
        for name in ("key", "value"):
            what = Message("with NaN in {name} {key}, a row that sees it", name=name, key=key)
            _expect_nan(subject, _poisoned(problem, name, key, "NaN"), sees, what)
    for query in _spread(range(problem.query.shape[2]), 2):
        its_row = torch.zeros_like(problem.sees_something)
        its_row[:, :, query] = problem.sees_something[:, :, query]
        what = Message("with NaN in query {query}, its row", query=query)
        _expect_nan(subject, _poisoned(problem, "query", query, "NaN"), its_row, what)
    everything = problem.but(key=torch.full_like(problem.key, torch.nan))
    _expect_nan(subject, everything, problem.sees_something, Message("with NaN in every key, a row that sees any"))


def _expect_nan(subject: Subject, poisoned: Problem, rows: Tensor, what: str) -> None:
    out = subject.output(poisoned)[rows]
    holds(not torch.isfinite(out).any(), Message("{what} is finite", what=what))
    if "lse" in subject.offers and torch.isfinite(poisoned.value).all():
        lse = subject.output_and_lse(poisoned)[1][rows]
        holds(lse.isnan().all(), Message("{what} has an lse that is not NaN", what=what))


def _poisoned(problem: Problem, name: str, key: int, kind: str) -> Problem:
    poisoned = getattr(problem, name).clone()
    poisoned[:, :, key] = _NOT_FINITE[kind]
    return problem.but(**{name: poisoned})


def _blind_keys(problem: Problem) -> list[int]:
    """Return the indices of the keys that are masked for at least one query."""
    return torch.nonzero(~problem.allowed.flatten(0, 2).all(0))[:, 0].tolist()


def _spread(items: list[int] | range, at_most: int) -> list[int]:
    """Select up to ``at_most`` evenly spaced indices for a law to try, including the first and the last."""
    if len(items) <= at_most or at_most == 1:
        return list(items[:at_most])
    return [items[round(n * (len(items) - 1) / (at_most - 1))] for n in range(at_most)]


def _indices(row: Tensor) -> list[list[int]]:
    """Return the indices of the True keys in the first two batch items and groups, for a law's message."""
    return [torch.nonzero(keys)[:, 0].tolist() for keys in row.flatten(0, 1)[:2]]


def _bool_tensor(rows: list[list[bool]], problem: Problem) -> Tensor:
    return torch.tensor(rows, device=problem.query.device)


LAWS = (sensitivity, polarity, causality, empty_rows, isolation, rows, blindness, honesty)
