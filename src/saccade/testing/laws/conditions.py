"""Where a law has something to say: each condition gives the reason why not, or None."""

from saccade.testing.case import Case
from saccade.testing.subject import Subject

__all__ = [
    "claims_memory",
    "default_positions",
    "has_empty_rows",
    "has_no_sink",
    "has_queries_and_keys",
    "has_several_items",
    "has_several_queries",
    "hides_something",
    "is_causal",
    "is_full",
    "is_small",
    "shares_keys",
    "shows_something",
    "trains_parameters",
]


def is_causal(subject: Subject, case: Case) -> str | None:
    """No query sees a later key."""
    return None if case.is_causal else "a query may see the future"


def is_full(subject: Subject, case: Case) -> str | None:
    """Every query sees every key."""
    return None if bool(case.allowed.all()) else "some key may not be seen"


def is_small(subject: Subject, case: Case) -> str | None:
    """Small enough to ask for every derivative."""
    return None if case.q_len * case.kv_len <= 400 else "too long to ask for every derivative"


def has_empty_rows(subject: Subject, case: Case) -> str | None:
    """Some row may attend to nothing."""
    return None if not bool(case.allowed.any(-1).all()) else "every row sees something"


def has_no_sink(subject: Subject, case: Case) -> str | None:
    """No sink."""
    return "a sink would count once in each part" if case.sink else None


def has_queries_and_keys(subject: Subject, case: Case) -> str | None:
    """There is something to attend to, and someone to do so."""
    return None if case.allowed.numel() else "nothing to attend to"


def hides_something(subject: Subject, case: Case) -> str | None:
    """Some query may not attend to some key."""
    return None if not bool(case.allowed.all()) else "nothing is hidden"


def shows_something(subject: Subject, case: Case) -> str | None:
    """Some query may attend to some key."""
    return None if bool(case.allowed.any()) else "nothing is seen"


def has_several_queries(subject: Subject, case: Case) -> str | None:
    """More than one query."""
    return None if case.q_len > 1 else "a single query"


def default_positions(subject: Subject, case: Case) -> str | None:
    """Positions follow from lengths."""
    return None if not case.explicit_positions else "positions are given"


def shares_keys(subject: Subject, case: Case) -> str | None:
    """Several query heads read one group of keys."""
    return None if case.num_kv_heads < case.num_heads else "every head has its own keys"


def has_several_items(subject: Subject, case: Case) -> str | None:
    """More than one batch item."""
    return None if case.batch > 1 else "a single batch item"


def claims_memory(subject: Subject, case: Case) -> str | None:
    """The author says how memory grows."""
    return None if subject.claims.memory_exponent is not None else "no growth of memory is claimed"


def trains_parameters(subject: Subject, case: Case) -> str | None:
    """It takes something that has parameters."""
    takes = subject.offers.intersection({"score", "relative", "sink_logit"})
    return None if takes else "nothing that it takes has parameters"
