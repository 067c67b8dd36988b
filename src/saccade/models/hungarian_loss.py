"""Sets of objects: which query found which, and how far off it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.support.errors import missing_extra, type_error, value_error
from saccade.support.validation import ShapeSpec, check_number, check_type

__all__ = ["Found", "Objects", "SetLoss", "match_sets", "overlap", "set_loss"]

_FOUND = ShapeSpec("logits [batch, num_queries, classes]", "boxes [batch, num_queries, 4]")
_OBJECTS = ShapeSpec("classes [objects]", "boxes [objects, 4]")


class Objects(NamedTuple):
    """The objects of one picture.

    Attributes:
        classes: what they are, int64 ``[objects]``.
        boxes: where they are, ``[objects, 4]``: x and y of the middle, width and height, as parts of the picture's.
    """

    classes: Tensor
    boxes: Tensor


class Found(NamedTuple):
    """What the queries of a `SetDecoder` found in a batch of pictures.

    Attributes:
        logits: of the classes, ``[batch, num_queries, num_classes + 1]``; the last says that nothing is there.
        boxes: ``[batch, num_queries, 4]``, as those of `Objects`.
    """

    logits: Tensor
    boxes: Tensor

    def objects(self, confidence: float = 0.5) -> list[Objects]:
        """The objects of each picture.

        Args:
            confidence: the least probability of its class with which an object counts.
        """
        confidence = check_number("confidence", confidence, least=0)
        most, classes = self.logits.softmax(-1)[..., :-1].max(-1)
        counts = most >= confidence
        return [Objects(own[kept], box[kept]) for own, box, kept in zip(classes, self.boxes, counts, strict=True)]


class SetLoss(NamedTuple):
    """How far off what was found is, and the parts of it.

    Attributes:
        total: the weighted sum, which is trained with.
        classes: cross entropy of the classes.
        boxes: distance of boxes: the sum over four numbers, the mean over objects.
        overlap: 1 minus the overlap of boxes, the mean over objects.
    """

    total: Tensor
    classes: Tensor
    boxes: Tensor
    overlap: Tensor


def overlap(boxes: Tensor, others: Tensor) -> Tensor:
    r"""How much boxes have in common, from -1 (nothing, and far apart) to 1 (they are the same).

    .. math:: \frac{|A \cap B|}{|A \cup B|} - \frac{|C| - |A \cup B|}{|C|}

    with C the smallest box around both, which tells boxes that are near from others where nothing is shared.

    Args:
        boxes, others: ``[..., 4]``, broadcast: middle, width and height.

    Returns:
        ``[...]``; 0 where both have no area and stand at one place.

    Reference: Rezatofighi et al. 2019, arXiv:1902.09630 (generalised intersection over union).
    """
    (first, last), (other_first, other_last) = (
        (own[..., :2] - own[..., 2:] / 2, own[..., :2] + own[..., 2:] / 2) for own in (boxes, others)
    )
    least = torch.finfo(boxes.dtype).tiny
    shared = (torch.minimum(last, other_last) - torch.maximum(first, other_first)).clamp(min=0).prod(-1)
    union = boxes[..., 2:].prod(-1) + others[..., 2:].prod(-1) - shared
    around = (torch.maximum(last, other_last) - torch.minimum(first, other_first)).prod(-1)
    return shared / union.clamp(min=least) - (around - union) / around.clamp(min=least)


@torch.no_grad()
def match_sets(
    found: Found,
    objects: Sequence[Objects],
    *,
    class_weight: float = 1.0,
    box_weight: float = 5.0,
    overlap_weight: float = 2.0,
) -> list[tuple[Tensor, Tensor]]:
    """Say which query is to find which object, so that all together are as near to it as can be.

    A pair costs less the likelier the object's class is, the nearer the box, the larger the overlap. Of all ways in
    which every object gets a query of its own, the cheapest is found (bipartite matching).

    Args:
        found: what the queries found.
        objects: what there is, one for each picture.
        class_weight, box_weight, overlap_weight: of the probability of the class, of the distance of the boxes (the sum
            over four numbers), and of `overlap`.

    Returns:
        For each picture the indices of queries, ascending, and of their objects, int64 on the CPU.

    Raises:
        TypeError: another type.
        ValueError: shapes that do not fit, a class that is none, more objects than queries, NaN or infinity.
        ImportError: scipy is not installed.

    Cost: O(num_queries ** 3) time for each picture at worst, on the CPU.

    Example:
        >>> found = Found(torch.zeros(1, 3, 2), torch.tensor([[[0.2] * 4, [0.8] * 4, [0.5] * 4]]))
        >>> match_sets(found, [Objects(torch.tensor([0, 0]), torch.tensor([[0.5] * 4, [0.1] * 4]))])
        [(tensor([0, 2]), tensor([1, 0]))]

    Reference: Carion et al. 2020, arXiv:2005.12872, section 3.1; Kuhn 1955, doi:10.1002/nav.3800020109.
    """
    try:
        from scipy.optimize import linear_sum_assignment  # noqa: PLC0415  imported when used
    except ModuleNotFoundError:
        raise missing_extra("scipy", "pictures") from None
    _check(found, objects)
    pairs = []
    for logits, boxes, own in zip(*found, objects, strict=True):
        near = torch.cdist(boxes.float(), own.boxes.float(), p=1)
        cost = box_weight * near - overlap_weight * overlap(boxes[:, None].float(), own.boxes.float())
        cost = cost - class_weight * logits.softmax(-1)[:, own.classes].float()
        if not bool(cost.isfinite().all()):
            raise value_error("found", "be finite, as objects", "NaN or infinity")
        queries, order = linear_sum_assignment(cost.cpu().numpy())
        pairs.append((torch.from_numpy(queries), torch.from_numpy(order)))
    return pairs


def set_loss(
    found: Found,
    objects: Sequence[Objects],
    *,
    no_object_weight: float = 0.1,
    class_weight: float = 1.0,
    box_weight: float = 5.0,
    overlap_weight: float = 2.0,
) -> SetLoss:
    """Say how far off what was found is, whatever the order, each object being held against the query of `match_sets`.

    Queries without an object are to say that nothing is there.

    Args:
        found, objects, class_weight, box_weight, overlap_weight: as in `match_sets`; the sum has the same weights.
        no_object_weight: of queries without an object, among the classes: most have none.

    Returns:
        The sum and its parts, differentiable.

    Raises:
        TypeError, ValueError, ImportError: as in `match_sets`.

    Example:
        >>> found = Found(torch.zeros(1, 3, 2), torch.full((1, 3, 4), 0.5))
        >>> loss = set_loss(found, [Objects(torch.tensor([0]), torch.full((1, 4), 0.5))])
        >>> [round(float(part), 4) for part in loss]
        [0.6931, 0.6931, 0.0, 0.0]

    Reference: Carion et al. 2020, arXiv:2005.12872, sections 3.1 and A.2.
    """
    weights = {"class_weight": class_weight, "box_weight": box_weight, "overlap_weight": overlap_weight}
    for name, given in {"no_object_weight": no_object_weight, **weights}.items():
        check_number(name, given, least=0)
    pairs = match_sets(found, objects, **weights)
    logits, boxes = found
    item = torch.cat([torch.full_like(queries, index) for index, (queries, _) in enumerate(pairs)])
    query = torch.cat([queries for queries, _ in pairs])
    wanted = torch.full(logits.shape[:2], logits.shape[2] - 1, dtype=torch.int64, device=logits.device)
    wanted[item, query] = torch.cat([own.classes[order] for own, (_, order) in zip(objects, pairs, strict=True)])
    weight = logits.new_ones(logits.shape[2])
    weight[-1] = no_object_weight
    classes = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), weight)
    got, want = (
        boxes[item, query],
        torch.cat([own.boxes[order] for own, (_, order) in zip(objects, pairs, strict=True)]),
    )
    count = max(1, len(item))
    far, apart = (got - want).abs().sum() / count, (1 - overlap(got, want)).sum() / count
    return SetLoss(class_weight * classes + box_weight * far + overlap_weight * apart, classes, far, apart)


def _check(found: Found, objects: Sequence[Objects]) -> None:
    """Raise unless there is a set of objects for each picture, with classes that are known and no more than queries."""
    check_type("found", found, Found, "be what a SetDecoder returns")
    sizes = _FOUND.check(*found)
    check_type("objects", objects, Sequence, "be a list, with Objects for each picture")
    if len(objects) != sizes["batch"]:
        raise value_error("objects", f"be one for each of {sizes['batch']} pictures", len(objects))
    for own in objects:
        check_type("objects", own, Objects, "be Objects(classes, boxes), one for each picture")
        count = _OBJECTS.check(*own)["objects"]
        if own.classes.dtype != torch.int64:
            raise type_error("classes", "be int64", own.classes.dtype)
        if count > sizes["num_queries"]:
            raise value_error("objects", f"be at most {sizes['num_queries']} in a picture, as queries", count)
        if count and not 0 <= int(own.classes.min()) <= int(own.classes.max()) < sizes["classes"] - 1:
            hint = "the last logit says that nothing is there"
            raise value_error("classes", f"be from 0 to {sizes['classes'] - 2}", "others", hint=hint)
