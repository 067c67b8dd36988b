"""Tables of masks on several devices."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from saccade.masks.mask_fields import Table

FIRST, SECOND, ANY = torch.device("meta", 0), torch.device("meta", 1), torch.device("meta")


def test_a_table_is_made_once_for_each_device() -> None:
    values = torch.arange(3)
    table = Table(values)
    assert table.on(torch.device("cpu")) is values
    found = [table.on(device) for device in (FIRST, SECOND, ANY)]
    assert [x.device.type for x in found] == ["meta"] * 3
    assert len(set(map(id, found))) == 3
    for device, before in zip((FIRST, SECOND, ANY), found, strict=True):
        assert table.on(device) is before


def test_a_table_of_a_dry_run_is_not_kept() -> None:
    table = Table(torch.arange(3))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(table.on(ANY)) is not torch.Tensor
    assert type(table.on(ANY)) is torch.Tensor
