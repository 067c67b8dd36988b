"""Kernels with one mistake each, of the kinds that compilers and drivers have made."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade import masks
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Backward, Kernel
from saccade.engine.kernels.reference import Reference
from saccade.engine.kernels.tiled import Tiled

BLOCK = 128


class Right(Kernel):
    """The definition, under the check of first use."""

    name, is_checked = "right", True

    def cost(self, given, value_dim, dropout_p):
        return Reference().cost(given, value_dim, dropout_p)

    def forward(self, given, value, dropped):
        return Reference().forward(given, value, dropped)


class Changed(Right):
    """A kernel that applies the definition to changed inputs."""

    name = "changed"

    def changed(self, given: AttentionInputs, value: Tensor) -> tuple[AttentionInputs, Tensor]:
        raise NotImplementedError

    def forward(self, given, value, dropped):
        return Reference().forward(*self.changed(given, value), dropped)


class OneKeyTooFew(Changed):
    """A window that ends one key early."""

    def changed(self, given, value):
        return given.replaced(rule=given.rule & ~masks.Window(0, 0)), value


class LastBlockOfKeys(Changed):
    """Keys behind the last whole block are not read."""

    def changed(self, given, value):
        whole = given.shape[3] // BLOCK * BLOCK
        return given.replaced(rule=given.rule & masks.Predicate(lambda b, h, q, kv: kv < whole)), value


class MaskOfTheFirstItem(Changed):
    """Every batch item gets the mask of the first."""

    def changed(self, given, value):
        rule = given.rule
        first = masks.Predicate(lambda b, h, q, kv: rule.allows(torch.zeros_like(b), h, q, kv))
        return given.replaced(rule=first), value


class OtherGroups(Changed):
    """Heads read group ``h % kv_heads``."""

    def changed(self, given, value):
        share = given.shape[1] // given.key.shape[1]
        key, value = (x.repeat(1, share, 1, 1) for x in (given.key, value))
        return given.replaced(key=key), value


class ScaleTwice(Changed):
    """A scale that is set once more by default."""

    def changed(self, given, value):
        return given.replaced(scale=given.scale * 1.02), value


class HalfPrecision(Changed):
    """float32 that is computed in bfloat16."""

    def changed(self, given, value):
        query, key, value = (x.bfloat16().to(x.dtype) for x in (given.query, given.key, value))
        return given.replaced(query=query, key=key), value


class NoSoftcap(Changed):
    """Scores as they are."""

    def changed(self, given, value):
        return given.replaced(softcap=None), value


class BiasOfOtherHeads(Changed):
    """The bias of the next head."""

    def changed(self, given, value):
        return given.replaced(bias=given.bias.of(given.bias.source.roll(1, 1))), value


class FrozenBias(Changed):
    """No gradient goes to the bias."""

    def changed(self, given, value):
        return given.replaced(bias=given.bias.of(given.bias.source.detach())), value


class Unmoved(Changed):
    """No gradient goes to the keys."""

    def changed(self, given, value):
        return given.replaced(key=given.key.detach()), value


class LseOfBaseTwo(Right):
    name = "lse of base two"

    def forward(self, given, value, dropped):
        out, lse = super().forward(given, value, dropped)
        return out, lse / torch.log(torch.tensor(2.0))


class LseWithoutGradient(Right):
    name = "lse without gradient"

    def forward(self, given, value, dropped):
        out, lse = super().forward(given, value, dropped)
        return out, lse.detach()


class RestOfRows(Right):
    """A kernel that never writes the rows after the last whole block."""

    name = "rest of rows"

    def forward(self, given, value, dropped):
        out, lse = super().forward(given, value, dropped)
        whole = given.shape[2] // BLOCK * BLOCK
        keep = (torch.arange(given.shape[2]) < whole)[:, None]
        return out * keep, lse


class EmptyRowsGetTheMean(Right):
    """A row that sees nothing gives the mean of all values."""

    name = "mean"

    def forward(self, given, value, dropped):
        out, lse = super().forward(given, value, dropped)
        share = given.shape[1] // value.shape[1]
        mean = value.repeat_interleave(share, 1).mean(2, keepdim=True)
        return torch.where((lse == -torch.inf)[..., None], mean, out), lse


class Raises(Right):
    name = "raises"

    def forward(self, given, value, dropped):
        raise RuntimeError("no kernel image is available for execution on the device")


class RaisesBackwards(Right):
    """A kernel whose forward pass works and whose backward pass raises an error."""

    name = "raises backwards"

    def forward(self, given, value, dropped):
        out, lse = super().forward(given, value, dropped)
        if out.requires_grad:
            out.register_hook(self._raise)
        return out, lse

    @staticmethod
    def _raise(grad):
        raise RuntimeError("out of resource: shared memory")


class ByHand(Tiled):
    """A kernel with a hand-written backward pass, which is right."""

    name, is_checked = "by hand", True


class NoDelta(ByHand):
    """A backward pass without the correction term of softmax."""

    def backward(self, given, value, dropped, results: Backward, wanted):
        return super().backward(given, value, dropped, results._replace(out=torch.zeros_like(results.out)), wanted)


class OneHeadOfAGroup(ByHand):
    """A backward pass that sums the gradients of keys over only the first head of a group."""

    def backward(self, given, value, dropped, results: Backward, wanted):
        share = given.shape[1] // given.key.shape[1]
        kept = (torch.arange(given.shape[1]) % share == 0)[:, None, None]
        whole = super().backward(given, value, dropped, results, wanted)
        part = super().backward(given, value, dropped, results._replace(grad_out=results.grad_out * kept), wanted)
        return whole[0], part[1], *whole[2:]
