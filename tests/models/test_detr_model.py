"""A set decoder equals transformers' DETR: what it finds, how it is matched, and its loss; and says what it refuses."""

import itertools
import re
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig
from transformers.loss.loss_for_object_detection import HungarianMatcher, center_to_corners_format, generalized_box_iou

from saccade.models import Detections, SetDecoder, SetDecoderConfig, Targets, match_sets, set_loss
from saccade.models.hungarian_loss import generalized_iou
from saccade.support.errors import UnsupportedError

SIZES = {
    "channels": 20,
    "num_classes": 7,
    "num_queries": 5,
    "embed_dim": 16,
    "num_heads": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 3,
    "feed_forward_dim": 24,
}


def published(**words):
    """A DETR over a small network, with weights large enough that a wrong detail shows."""
    torch.manual_seed(0)
    backbone = ResNetConfig(
        num_channels=3,
        embedding_size=8,
        hidden_sizes=[8, 20],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "num_queries": 5, "num_labels": 7}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")}
    config = DetrConfig(use_timm_backbone=False, backbone_config=backbone, **{**sizes, **words})
    theirs = DetrForObjectDetection(config).eval()
    for name, parameter in theirs.named_parameters():
        if "backbone" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return theirs


class Backbone(torch.nn.Module):
    """A wrapper of their network for our model."""

    def __init__(self, theirs):
        super().__init__()
        self.network = theirs.model.backbone.model

    def forward(self, images):
        return self.network(images).feature_maps[-1]


def small(**changes):
    torch.manual_seed(0)
    model = SetDecoder(SetDecoderConfig(**{**SIZES, **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


IMAGES = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
VALID = torch.ones(2, 64, 96, dtype=torch.bool)
VALID[0, 40:] = VALID[0, :, 70:] = False
OBJECTS = [Targets(torch.tensor([0, 6, 3]), torch.rand(3, 4) / 2 + 0.1), Targets(torch.tensor([2]), torch.rand(1, 4))]


@torch.no_grad()
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("valid", [None, VALID], ids=["whole", "padded"])
def test_detections_equal_detr(valid, activation):
    theirs = published(activation_function=activation)
    ours = SetDecoder.from_state_dict(theirs.config, theirs.state_dict(), backbone=Backbone(theirs))
    want = theirs(IMAGES, pixel_mask=None if valid is None else valid.long())
    found = ours(IMAGES, valid=valid)
    for got, expected in (
        (found.logits, want.logits),
        (found.boxes, want.pred_boxes),
        (ours.hidden(IMAGES, valid=valid), want.last_hidden_state),
    ):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    bare = SetDecoder.from_state_dict(theirs.config, theirs.state_dict())
    features = ours.backbone(IMAGES)
    torch.testing.assert_close(bare(features, valid=valid).logits, found.logits)
    torch.testing.assert_close(ours.every_layer(IMAGES, valid=valid)[-1].boxes, found.boxes)


@torch.no_grad()
def test_matrices_are_those_of_detr():
    theirs = published(attn_implementation="eager")
    ours = SetDecoder.from_state_dict(theirs.config, theirs.state_dict(), backbone=Backbone(theirs))
    want = theirs(IMAGES, pixel_mask=VALID.long(), output_attentions=True)
    pairs = [(ours.matrices(IMAGES, valid=VALID), want.encoder_attentions)]
    pairs += [(ours.cross_matrices(IMAGES, valid=VALID), want.cross_attentions)]
    for matrices, attentions in pairs:
        for own, other in zip(matrices, attentions, strict=True):
            torch.testing.assert_close(own.to_dense(), other, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_folders_are_read(tmp_path):
    theirs = published()
    theirs.save_pretrained(tmp_path)  # under other names than those in memory
    ours = SetDecoder.from_pretrained(tmp_path, backbone=Backbone(theirs))
    torch.testing.assert_close(ours(IMAGES).logits, theirs(IMAGES).logits, atol=1e-5, rtol=1e-5)
    assert not ours.training


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [False, True])
def test_each_layer_of_the_decoder_finds_what_a_shorter_decoder_would(norm_first):
    model, features = small(norm_first=norm_first), torch.randn(2, 20, 4, 6, dtype=torch.float64)
    for depth, found in enumerate(model.every_layer(features), start=1):
        other = small(norm_first=norm_first)
        other.load_state_dict(model.state_dict())
        del other.decoder[depth:]
        torch.testing.assert_close(other(features), found)


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [False, True])
def test_padding_changes_nothing(norm_first):
    model, features = small(norm_first=norm_first), torch.randn(1, 20, 4, 6, dtype=torch.float64)
    padded = torch.full((1, 20, 7, 8), 9.0, dtype=torch.float64)
    padded[:, :, :4, :6] = features
    valid = torch.zeros(1, 7, 8, dtype=torch.bool)
    valid[:, :4, :6] = True
    torch.testing.assert_close(model(padded, valid=valid), model(features))
    assert not torch.allclose(model(padded).logits, model(features).logits, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [False, True])
def test_matrices_are_those_that_forward_multiplies_by(norm_first):
    model, features = small(norm_first=norm_first), torch.randn(1, 20, 4, 6, dtype=torch.float64)
    heard = []
    for layer in (*model.encoder, *model.decoder):
        part = layer.cross_attention or layer.attention
        part.register_forward_pre_hook(lambda own, given, facts: heard.append(own.matrix(*given[:2])), with_kwargs=True)
    model(features)
    told = [*model.matrices(features), *model.cross_matrices(features)]
    for own, other in zip(told, heard[: len(told)], strict=True):
        torch.testing.assert_close(own.to_dense(), other.to_dense())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_matching_and_loss_equal_transformers_and_every_order(data):
    draw = data.draw
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    batch, queries, kinds = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    weights = [draw(st.sampled_from([0.0, 0.5, 2.0])) for _ in range(2)] + [draw(st.sampled_from([1.0, 3.0]))]
    logits = torch.randn(batch, queries, kinds + 1, generator=generator)
    found = Detections(logits, torch.rand(batch, queries, 4, generator=generator))
    counts = [draw(st.integers(0, queries)) for _ in range(batch)]
    objects = [
        Targets(torch.randint(0, kinds, (n,), generator=generator), torch.rand(n, 4, generator=generator))
        for n in counts
    ]
    names = ("class_weight", "box_weight", "overlap_weight")
    pairs = match_sets(found, objects, **dict(zip(names, weights, strict=True)))
    labels = [{"class_labels": own.classes, "boxes": own.boxes} for own in objects]
    want = HungarianMatcher(*weights)({"logits": found.logits, "pred_boxes": found.boxes}, labels)
    for own, other in zip(pairs, want, strict=True):
        assert [part.tolist() for part in own] == [part.tolist() for part in other]
    for item, own in enumerate(objects):  # none of all orders costs less
        boxes = found.boxes[item][:, None], own.boxes
        cost = weights[1] * (boxes[0] - boxes[1]).abs().sum(-1) - weights[2] * generalized_iou(*boxes)
        cost = cost - weights[0] * logits[item].softmax(-1)[:, own.classes]
        orders = itertools.permutations(range(queries), len(own.classes))
        least = min(sum(float(cost[q, o]) for o, q in enumerate(order)) for order in orders)
        assert abs(float(cost[pairs[item]].sum()) - least) < 1e-5


@pytest.mark.parametrize("objects", [OBJECTS, [OBJECTS[0], Targets(OBJECTS[0].classes[:0], OBJECTS[0].boxes[:0])]])
def test_the_loss_and_its_gradients_equal_transformers(objects):
    theirs = published(eos_coefficient=0.3)
    ours = SetDecoder.from_state_dict(theirs.config, theirs.state_dict(), backbone=Backbone(theirs))
    want = theirs(IMAGES, labels=[{"class_labels": own.classes, "boxes": own.boxes} for own in objects])
    got = set_loss(ours(IMAGES), objects, no_object_weight=0.3)
    parts = [want.loss, *(want.loss_dict[f"loss_{name}"] for name in ("ce", "bbox", "giou"))]
    for own, other in zip(got, parts, strict=True):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)
    own, other = (
        torch.autograd.grad(loss, model)[0]
        for loss, model in ((got.total, ours.query.weight), (want.loss, theirs.model.query_position_embeddings.weight))
    )
    torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)


def test_a_batch_without_objects_teaches_that_there_are_none():
    found = small()(torch.randn(2, 20, 4, 6, dtype=torch.float64))
    none = Targets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))
    loss = set_loss(found, [none, none])
    torch.testing.assert_close(loss.total, -found.logits.log_softmax(-1)[..., -1].mean())
    assert (loss.boxes.item(), loss.overlap.item()) == (0, 0)


def test_generalized_iou_equals_transformers_and_is_finite_for_empty_boxes():
    boxes, others = torch.rand(6, 4, dtype=torch.float64), torch.rand(9, 4, dtype=torch.float64)
    want = generalized_box_iou(center_to_corners_format(boxes), center_to_corners_format(others))
    torch.testing.assert_close(generalized_iou(boxes[:, None], others), want)
    torch.testing.assert_close(generalized_iou(boxes, boxes), torch.ones(6, dtype=torch.float64))
    point = torch.tensor([0.5, 0.5, 0, 0], requires_grad=True)
    assert generalized_iou(point, point).item() == 0
    assert torch.autograd.grad(generalized_iou(point, torch.rand(4)), point)[0].isfinite().all()


def test_objects_are_those_that_are_likely_enough():
    logits = torch.tensor([[[4.0, 0, 0], [0, 4, 0], [0, 0, 4], [0.5, 0, 0]]])
    found = Detections(logits, torch.rand(1, 4, 4))
    (objects,) = found.objects()
    assert objects.classes.tolist() == [0, 1]
    assert torch.equal(objects.boxes, found.boxes[0, :2])
    assert found.objects(0.3)[0].classes.tolist() == [0, 1, 0]


@pytest.mark.slow
def test_objects_are_learned():
    torch.manual_seed(0)
    model = SetDecoder(SetDecoderConfig(**{**SIZES, "channels": 3, "dropout_p": 0.0, "norm_first": True}))
    features, objects = torch.zeros(3, 3, 6, 6), []
    for item, places in enumerate([[(1, 1, 0)], [(4, 2, 1), (1, 4, 0)], [(2, 4, 2), (4, 0, 1)]]):
        for row, column, kind in places:
            features[item, kind, row, column] = 3
        boxes = torch.tensor([[(column + 0.5) / 6, (row + 0.5) / 6, 1 / 6, 1 / 6] for row, column, _ in places])
        objects.append(Targets(torch.tensor([kind for _, _, kind in places]), boxes))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(300):
        optimizer.zero_grad()
        losses = [set_loss(found, objects, no_object_weight=1.0) for found in model.every_layer(features)]
        sum(loss.total for loss in losses).backward()
        optimizer.step()
    found = model.eval()(features)
    for own, truth in zip(found.objects(), objects, strict=True):
        assert sorted(own.classes.tolist()) == sorted(truth.classes.tolist())
    assert set_loss(found, objects).boxes.item() < 0.2


FOUND = Detections(torch.zeros(1, 2, 4), torch.rand(1, 2, 4))
ONE = Targets(torch.tensor([1]), torch.rand(1, 4))
FEATURES = torch.zeros(1, 20, 4, 6, dtype=torch.float64)
REFUSED = {
    "a tuple": (
        lambda: match_sets(tuple(FOUND), [ONE]),
        TypeError,
        "match_sets: found must be Detections, as a SetDecoder returns them",
    ),
    "no list": (lambda: match_sets(FOUND, 3), TypeError, "match_sets: objects must be a list"),
    "one for two": (
        lambda: set_loss(FOUND, []),
        ValueError,
        "match_sets: objects must contain Targets for each of the 1 images; got 0",
    ),
    "pairs": (
        lambda: match_sets(FOUND, [tuple(ONE)]),
        TypeError,
        "match_sets: objects must be Targets(classes, boxes)",
    ),
    "too many": (
        lambda: match_sets(FOUND, [Targets(torch.zeros(3, dtype=torch.int64), torch.rand(3, 4))]),
        ValueError,
        "match_sets: objects must be at most 2 per image, the number of queries; got 3",
    ),
    "nothing as a class": (
        lambda: match_sets(FOUND, [ONE._replace(classes=torch.tensor([3]))]),
        ValueError,
        "match_sets: classes must be from 0 to 2; got other classes.\nHint: the last logit stands for 'no object'",
    ),
    "floats": (lambda: match_sets(FOUND, [ONE._replace(classes=torch.ones(1))]), TypeError, "classes must be int64"),
    "corners": (
        lambda: match_sets(FOUND, [ONE._replace(boxes=torch.rand(1, 2, 2))]),
        ValueError,
        "match_sets: boxes must have shape [objects, 4]",
    ),
    "NaN": (
        lambda: match_sets(FOUND._replace(boxes=FOUND.boxes * torch.nan), [ONE]),
        ValueError,
        "match_sets: found must be finite, like objects; got NaN or inf",
    ),
    "a weight below 0": (lambda: set_loss(FOUND, [ONE], box_weight=-1), ValueError, "set_loss: box_weight must be"),
    "a probability": (
        lambda: FOUND.objects("most"),
        TypeError,
        "Detections.objects: confidence must be a finite number",
    ),
    "three axes": (lambda: small()(FEATURES[0]), ValueError, "images must have shape [batch, channels, H, W]"),
    "other channels": (lambda: small()(FEATURES[:, :3]), ValueError, "= [batch, 20, H, W]; got [1, 3, 4, 6]"),
    "a float mask": (
        lambda: small()(FEATURES, valid=FEATURES[:, 0]),
        TypeError,
        "valid must be a bool tensor; got torch.float64",
    ),
    "a flat mask": (
        lambda: small()(FEATURES, valid=FEATURES[0, 0] == 0),
        ValueError,
        "valid must have shape [batch, H, W]",
    ),
    "no config": (lambda: SetDecoder({}), TypeError, "config must be a saccade.models.SetDecoderConfig; got dict"),
    "no module": (lambda: SetDecoder(SetDecoderConfig(**SIZES), len), TypeError, "backbone must be a module or None"),
    "no images": (
        lambda: SetDecoder(SetDecoderConfig(**SIZES), torch.nn.Identity())([0]),
        TypeError,
        "images must be a tensor; got list",
    ),
    "a backbone of others": (
        lambda: SetDecoder(SetDecoderConfig(**SIZES), torch.nn.Identity())(torch.zeros(1, 3, 4, 4)),
        ValueError,
        "output of the backbone must have shape [batch, channels, H, W] = [batch, 20, H, W]",
    ),
    "an odd width": (
        lambda: SetDecoderConfig(**{**SIZES, "embed_dim": 18}),
        ValueError,
        "SetDecoderConfig: embed_dim must be a multiple of 4; got 18",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inputs_that_do_not_fit_are_refused(name):
    wrong, kind, message = REFUSED[name]
    with pytest.raises(kind, match=re.escape(message)):
        wrong()


UNREAD = {
    "another family": ({"model_type": "yolos"}, UnsupportedError, "model_type is 'yolos', not 'detr'"),
    "learned places": (
        {"position_embedding_type": "learned"},
        UnsupportedError,
        "position_embedding_type is 'learned', not 'sine'",
    ),
    "two widths": ({"decoder_ffn_dim": 9}, UnsupportedError, "encoder_ffn_dim is 24 and decoder_ffn_dim 9"),
    "an unknown activation": ({"activation_function": "mish"}, UnsupportedError, "activation_function is 'mish'"),
    "inner channels": ({"activation_dropout": 0.1}, UnsupportedError, "activation_dropout is not 0"),
    "norms between": ({"auxiliary_loss": True}, UnsupportedError, "auxiliary_loss is true"),
    "more layers": ({"decoder_layers": 10**6}, ValueError, "config.json must state sizes that match the weights"),
    "another layer": ({"decoder_layers": 4}, ValueError, "missing     decoder.layers.3.self_attn.q_proj.weight"),
    "more queries": (
        {"num_queries": 9},
        ValueError,
        "mismatched  query_position_embeddings.weight [5, 16], not [9, 16]",
    ),
    "a wrong word": ({"d_model": "wide"}, ValueError, "d_model in config.json must be an int"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_other_checkpoints_are_refused(name):
    words, kind, message = UNREAD[name]
    theirs = published()
    with pytest.raises(kind, match=re.escape(message)):
        SetDecoder.from_state_dict(theirs.config.to_dict() | words, theirs.state_dict())


def test_a_model_without_heads_is_refused_by_what_it_lacks():
    theirs = published()
    with pytest.raises(ValueError, match=r"missing     class_labels_classifier\.weight"):
        SetDecoder.from_state_dict(theirs.config, theirs.model.state_dict())


def test_a_missing_scipy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"^match_sets: scipy must be installed") as refused:
        match_sets(Detections(torch.zeros(1, 2, 4), torch.rand(1, 2, 4)), [])
    assert "pip install 'saccade-attention[pictures]'" in str(refused.value)
