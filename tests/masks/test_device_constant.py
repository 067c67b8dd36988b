"""Tables of masks on several devices."""

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from saccade.masks.mask_fields import Table

FIRST, SECOND, ANY = torch.device("meta", 0), torch.device("meta", 1), torch.device("meta")


def test_a_table_is_made_once_for_each_device() -> None:
    table, devices = Table(np.arange(3)), (torch.device("cpu"), FIRST, SECOND, ANY)
    found = [table.on(device) for device in devices]
    assert [x.device.type for x in found] == ["cpu", *["meta"] * 3]
    assert found[0].tolist() == [0, 1, 2]
    assert len(set(map(id, found))) == 4
    for device, before in zip(devices, found, strict=True):
        assert table.on(device) is before


def test_a_table_of_a_dry_run_is_not_kept() -> None:
    table = Table(np.arange(3))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(table.on(ANY)) is not torch.Tensor
    assert type(table.on(ANY)) is torch.Tensor
