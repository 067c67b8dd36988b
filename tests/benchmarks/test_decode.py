"""The decode question, at tiny sizes."""

import pytest
import torch

from benchmarks import decode


@pytest.mark.parametrize("dtype", decode.TARGETS)
def test_a_step_is_the_product_with_all_keys(dtype):
    its = decode.case(50, dtype, 4, 2, 8)
    assert its.cache.length == 49
    decode.check(its)
    assert its.cache.length == 49


def test_another_token_is_noticed():
    its = decode.case(50, torch.float32, 4, 2, 8)
    other = (its.copied[0] + 1.0 * torch.arange(50)[:, None], its.copied[1])
    for name in ("held", "copied"):
        with pytest.raises(AssertionError, match="not close"):
            decode.check(its._replace(**{name: other}))
