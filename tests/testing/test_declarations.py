"""Declarations of a function are tested both ways: a "no" must be refused, and a "yes" must be answered."""

import pytest
import torch
import torch.nn.functional as F

from saccade import UnsupportedError, testing
from saccade.testing import Stepwise

LAWS = [law for law in testing.LAWS if law.name in ("declined", "offered")]
STEPWISE = Stepwise()


def verdicts(function, cases=("causal",), **said):
    """Return the verdict and the message of both laws on one or more cases."""
    chosen = [case for case in testing.CASES if case.name in cases]
    report = testing.check(function, cases=chosen, laws=LAWS, dtypes=[torch.float32], **said, seed=0)
    return {result.law: (result.verdict, result.message) for result in report.results}


def plain(query, key, value, mask, **options):
    return STEPWISE(query, key, value, mask, **options)


def plain_without_options(query, key, value, mask):
    return STEPWISE(query, key, value, mask)


def test_options_missing_from_a_signature_are_refused_by_python():
    found = verdicts(plain_without_options)
    assert found["declined"] == ("kept", "")
    assert found["offered"] == ("not applicable", "the accepted options are not declared")


def test_a_builtin_says_nothing_about_its_options_and_is_not_asked_for_them():
    found = verdicts(F.scaled_dot_product_attention, gqa=False)
    assert found["declined"] == ("kept", "")  # grouped heads are declined, and refused
    assert "scale" in testing.Subject(F.scaled_dot_product_attention).undeclared


def test_an_option_that_vanishes_in_the_dark_is_a_broken_declaration():
    found = verdicts(lambda query, key, value, mask, **options: plain(query, key, value, mask), offers=["scale"])
    verdict, message = found["declined"]
    assert verdict == "broken"
    assert message == "bias: declared as unsupported (takes no bias), but it returned a wrong result"


def broadcasting(query, key, value, mask):
    """Compute attention that is right for one key head, which broadcasts, and an error for two."""
    scores = (query @ key.mT / query.shape[3] ** 0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value


def first_key_head(query, key, value, mask):
    return (
        broadcasting(query, key[:, :1], value[:, :1], mask)
        if key.shape[1] != query.shape[1]
        else plain(query, key, value, mask)
    )


@pytest.mark.parametrize("case", ["causal", "all-heads-share"])
@pytest.mark.parametrize("function", [plain, broadcasting])
def test_grouped_heads_that_are_declined_may_be_answered_rightly(function, case):
    assert verdicts(function, [case], gqa=False)["declined"] == ("kept", "")


def detached(query, key, value, mask):
    return plain(query, key.detach(), value, mask)


@pytest.mark.parametrize(
    ("function", "trial"), [(first_key_head, "no option"), (detached, "no option, with gradients")]
)
def test_grouped_heads_that_are_declined_and_answered_wrongly(function, trial):
    verdict, message = verdicts(function, gqa=False)["declined"]
    assert verdict == "broken"
    assert message == (
        f"grouped heads, {trial}: declared as unsupported (takes no grouped heads), but it returned a wrong result"
    )


def test_dropout_that_is_declined_and_ignored():
    verdict, message = verdicts(
        lambda query, key, value, mask, dropout_p=0.0: plain(query, key, value, mask), offers=[]
    )["declined"]
    assert (verdict, message[:9]) == ("broken", "dropout_p")


def test_positions_that_are_declined_and_ignored():
    def deaf(query, key, value, mask, *, q_positions=None, kv_positions=None):
        return value.new_zeros(*query.shape[:3], value.shape[3])

    verdict, message = verdicts(deaf, ["evicted-cache"], masks="objects", offers=[])["declined"]
    assert verdict == "broken"
    assert "(takes no q_positions; takes no kv_positions), but it returned a wrong result" in message


def test_a_promise_that_is_not_kept():
    def choosy(query, key, value, mask, *, scale=None, bias=None):
        if scale is not None:
            raise UnsupportedError("no", ("it is Sunday",))
        return plain(query, key, value, mask, bias=bias)

    assert verdicts(choosy)["offered"][0] == "not applicable"
    found = verdicts(choosy, offers=["scale", "bias"])
    assert found["offered"] == ("broken", "scale: not declared as unsupported, but refused (it is Sunday)")
    found = verdicts(choosy, reasons=lambda *tensors, **options: ("it is Sunday",) if "scale" in options else ())
    assert [verdict for verdict, _ in found.values()] == ["kept", "kept"]


@pytest.mark.parametrize(
    ("reasons", "raised", "message"),
    [
        (("it rains",), None, "(it rains), but it returned a result"),
        (
            ("it rains",),
            UnsupportedError("", ("it snows",)),
            "(it rains), but refused for a different reason (it snows)",
        ),
        (("it rains",), ValueError("softcap"), "(it rains), but then ValueError is raised"),
        ((), UnsupportedError("", ("it rains",)), "softcap: not declared as unsupported, but refused (it rains)"),
    ],
)
def test_reasons_and_conduct_must_agree(reasons, raised, message):
    def moody(query, key, value, mask, *, softcap=None):
        if softcap is not None and raised is not None:
            raise raised
        return plain(query, key, value, mask, softcap=softcap)

    found = verdicts(moody, reasons=lambda *tensors, softcap=None, **options: reasons if softcap else ())
    broken = [message for verdict, message in found.values() if verdict == "broken"]
    assert len(broken) == 1
    assert message in broken[0]


def test_a_function_that_refuses_everything_does_not_keep_the_law_by_that():
    def refusing(query, key, value, mask):
        raise NotImplementedError("not yet")

    assert verdicts(refusing)["declined"] == ("not offered", "not yet")
