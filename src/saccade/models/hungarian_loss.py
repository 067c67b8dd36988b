"""DETR's detection loss: Hungarian matching of queries with objects, and the set-prediction loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.support.errors import missing_extra, type_error, value_error
from saccade.support.validation import ShapeSpec, check_number, check_type

_DETECTIONS = ShapeSpec("logits [batch, num_queries, classes]", "boxes [batch, num_queries, 4]")
_TARGETS = ShapeSpec("classes [objects]", "boxes [objects, 4]")


class Targets(NamedTuple):
    """The true objects in an image, for the detection loss.

    Attributes:
        classes: int64 ``[objects]``.
        boxes: ``[objects, 4]``: x and y of the centre, width and height, as fractions of the image size.
    """

    classes: Tensor
    boxes: Tensor


class Detections(NamedTuple):
    """The predictions of a `SetDecoder` for a batch of images, one for each query.

    Attributes:
        logits: class logits, ``[batch, num_queries, num_classes + 1]``; the last class means "no object".
        boxes: ``[batch, num_queries, 4]``, in the format of `Targets`.
    """

    logits: Tensor
    boxes: Tensor

    def objects(self, confidence: float = 0.5) -> list[Targets]:
        """Return the objects detected in each image, as one `Targets` per image.

        Args:
            confidence: minimum probability of the predicted class.
        """
        confidence = check_number("confidence", confidence, least=0)
        probabilities, classes = self.logits.softmax(-1)[..., :-1].max(-1)
        each = zip(classes, self.boxes, probabilities >= confidence, strict=True)
        return [Targets(kinds[selected], boxes[selected]) for kinds, boxes, selected in each]


class DetectionLoss(NamedTuple):
    """The set-prediction loss of a detector, and its components.

    Attributes:
        total: the weighted sum, to minimize in training.
        classes: cross-entropy of the classes.
        boxes: L1 distance between predicted and true boxes, averaged over objects.
        overlap: 1 minus the generalized IoU of predicted and true boxes, averaged over objects.
    """

    total: Tensor
    classes: Tensor
    boxes: Tensor
    overlap: Tensor


def generalized_iou(boxes: Tensor, others: Tensor) -> Tensor:
    r"""Return the generalized intersection over union of boxes, from -1 (far apart) to 1 (equal).

    .. math:: \frac{|A \cap B|}{|A \cup B|} - \frac{|C| - |A \cup B|}{|C|}

    where C is the smallest box around both. Unlike plain IoU, it is larger for nearby boxes than for distant ones even
    if they are disjoint.

    Args:
        boxes, others: ``[..., 4]``, broadcastable: centre, width and height.

    Returns:
        ``[...]``; 0 if both boxes have zero area and the same position.

    Reference: Rezatofighi et al. 2019, arXiv:1902.09630 (generalized intersection over union).
    """
    (first, last), (other_first, other_last) = (
        (each[..., :2] - each[..., 2:] / 2, each[..., :2] + each[..., 2:] / 2) for each in (boxes, others)
    )
    least = torch.finfo(boxes.dtype).tiny
    shared = (torch.minimum(last, other_last) - torch.maximum(first, other_first)).clamp(min=0).prod(-1)
    union = boxes[..., 2:].prod(-1) + others[..., 2:].prod(-1) - shared
    around = (torch.maximum(last, other_last) - torch.minimum(first, other_first)).prod(-1)
    return shared / union.clamp(min=least) - (around - union) / around.clamp(min=least)


@torch.no_grad()
def match_sets(
    found: Detections,
    objects: Sequence[Targets],
    *,
    class_weight: float = 1.0,
    box_weight: float = 5.0,
    overlap_weight: float = 2.0,
) -> list[tuple[Tensor, Tensor]]:
    """Match a query to each object so that the total cost is minimal (bipartite matching).

    A pair costs less if the query predicts the object's class with a higher probability, or if the predicted box is
    nearer to the object's box or overlaps more with it.

    Args:
        found: predictions of the model.
        objects: the true objects, one `Targets` for each image.
        class_weight, box_weight, overlap_weight: weights of the class probability, of the L1 distance between the
            boxes, and of `generalized_iou`.

    Returns:
        For each image, the indices of the matched queries, ascending, and of their objects, int64 on the CPU.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes are incompatible, a class is unknown, there are more objects than queries, or a value is NaN
            or infinite.
        ImportError: scipy is not installed.

    Cost: O(num_queries ** 3) worst-case time for each image, on the CPU.

    Example:
        >>> found = Detections(torch.zeros(1, 3, 2), torch.tensor([[[0.2] * 4, [0.8] * 4, [0.5] * 4]]))
        >>> match_sets(found, [Targets(torch.tensor([0, 0]), torch.tensor([[0.5] * 4, [0.1] * 4]))])
        [(tensor([0, 2]), tensor([1, 0]))]

    Reference: Carion et al. 2020, arXiv:2005.12872, section 3.1; Kuhn 1955, doi:10.1002/nav.3800020109.
    """
    try:
        from scipy.optimize import linear_sum_assignment  # noqa: PLC0415  imported when used
    except ModuleNotFoundError:
        raise missing_extra("scipy", "pictures") from None
    _check(found, objects)
    pairs = []
    for logits, boxes, targets in zip(*found, objects, strict=True):
        distance = torch.cdist(boxes.float(), targets.boxes.float(), p=1)
        cost = box_weight * distance - overlap_weight * generalized_iou(boxes[:, None].float(), targets.boxes.float())
        cost = cost - class_weight * logits.softmax(-1)[:, targets.classes].float()
        if not bool(cost.isfinite().all()):
            raise value_error("found", "be finite, like objects", "NaN or inf")
        queries, order = linear_sum_assignment(cost.cpu().numpy())
        pairs.append((torch.from_numpy(queries), torch.from_numpy(order)))
    return pairs


def set_loss(
    found: Detections,
    objects: Sequence[Targets],
    *,
    no_object_weight: float = 0.1,
    class_weight: float = 1.0,
    box_weight: float = 5.0,
    overlap_weight: float = 2.0,
) -> DetectionLoss:
    """Return the detection loss; each object is compared with the query that `match_sets` assigns to it.

    Queries without an object have the target class "no object".

    Args:
        found, objects, class_weight, box_weight, overlap_weight: as in `match_sets`; the total has the same weights.
        no_object_weight: weight of queries without an object in the cross-entropy. It is small because most queries
            have no object.

    Returns:
        The total and its components, all differentiable.

    Raises:
        TypeError, ValueError, ImportError: as in `match_sets`.

    Example:
        >>> found = Detections(torch.zeros(1, 3, 2), torch.full((1, 3, 4), 0.5))
        >>> loss = set_loss(found, [Targets(torch.tensor([0]), torch.full((1, 4), 0.5))])
        >>> [round(float(part), 4) for part in loss]
        [0.6931, 0.6931, 0.0, 0.0]

    Reference: Carion et al. 2020, arXiv:2005.12872, sections 3.1 and A.2.
    """
    weights = {"class_weight": class_weight, "box_weight": box_weight, "overlap_weight": overlap_weight}
    for name, weight in {"no_object_weight": no_object_weight, **weights}.items():
        check_number(name, weight, least=0)
    pairs = match_sets(found, objects, **weights)
    logits, boxes = found
    item = torch.cat([torch.full_like(queries, index) for index, (queries, _) in enumerate(pairs)])
    query = torch.cat([queries for queries, _ in pairs])
    matched = [(each.classes[order], each.boxes[order]) for each, (_, order) in zip(objects, pairs, strict=True)]
    true_classes, true_boxes = map(torch.cat, zip(*matched, strict=True))
    targets = torch.full(logits.shape[:2], logits.shape[2] - 1, dtype=torch.int64, device=logits.device)
    targets[item, query] = true_classes
    class_weights = logits.new_ones(logits.shape[2])
    class_weights[-1] = no_object_weight
    classes = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), class_weights)
    predicted, count = boxes[item, query], max(1, len(item))
    distance = (predicted - true_boxes).abs().sum() / count
    overlap = (1 - generalized_iou(predicted, true_boxes)).sum() / count
    total = class_weight * classes + box_weight * distance + overlap_weight * overlap
    return DetectionLoss(total, classes, distance, overlap)


def _check(found: Detections, objects: Sequence[Targets]) -> None:
    """Raise an error unless the targets of the detection loss match the predictions.

    Every image needs targets, with known classes and at most as many objects as there are queries.
    """
    check_type("found", found, Detections, "be Detections, as a SetDecoder returns them")
    sizes = _DETECTIONS.check(*found)
    check_type("objects", objects, Sequence, "be a list with Targets for each image")
    if len(objects) != sizes["batch"]:
        raise value_error("objects", f"contain Targets for each of the {sizes['batch']} images", len(objects))
    for targets in objects:
        check_type("objects", targets, Targets, "be Targets(classes, boxes), one for each image")
        count = _TARGETS.check(*targets)["objects"]
        if targets.classes.dtype != torch.int64:
            raise type_error("classes", "be int64", targets.classes.dtype)
        if count > sizes["num_queries"]:
            raise value_error("objects", f"be at most {sizes['num_queries']} per image, the number of queries", count)
        if count and not 0 <= int(targets.classes.min()) <= int(targets.classes.max()) < sizes["classes"] - 1:
            hint = "the last logit stands for 'no object'"
            raise value_error("classes", f"be from 0 to {sizes['classes'] - 2}", "other classes", hint=hint)
