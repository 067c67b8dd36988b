"""Unsupported inputs are refused with a one-sentence message before any work is done."""

import pytest
import torch

import saccade as sc
from saccade import vision
from saccade.vision import BAM, CBAM, ChannelAttention, NonLocal, PositionAttention, SpatialAttention

SIZES = [
    (lambda: ChannelAttention(10, 4), r"ChannelAttention: ratio must divide channels 10; got 4\."),
    (lambda: ChannelAttention(8, 16), r"ratio must divide channels 8; got 16\.\nHint: it would leave less than one"),
    (lambda: ChannelAttention(8, 0), r"ratio must be an int of at least 1; got 0\."),
    (lambda: ChannelAttention(8.0, 2), r"channels must be an int of at least 1; got 8\.0\."),
    (lambda: ChannelAttention(True, 1), r"channels must be an int of at least 1; got True\."),
    (lambda: ChannelAttention(8, 2, pooling=("max",)), r"pooling must be .*; got \('max',\)\."),
    (lambda: ChannelAttention(8, 2, pooling="average"), r"pooling must be .*; got 'average'\."),
    (lambda: ChannelAttention(8, 2, pooling=()), r"pooling must be .*; got \(\)\."),
    (lambda: SpatialAttention(6), r"SpatialAttention: kernel_size must be odd, so that it has a centre; got 6\."),
    (lambda: SpatialAttention(0), r"kernel_size must be an int of at least 1; got 0\."),
    (lambda: CBAM(8, 3), r"CBAM: ratio must divide channels 8; got 3\."),
    (lambda: CBAM(8, 2, 4), r"kernel_size must be odd"),
    (lambda: CBAM(8, 2, order="parallel"), r"CBAM: order must be .*; got 'parallel'\."),
    (lambda: BAM(8, 3), r"BAM: ratio must divide channels 8; got 3\."),
    (lambda: BAM(8, 2, dilation=0), r"BAM: dilation must be an int of at least 1; got 0\."),
    (lambda: PositionAttention(4), r"PositionAttention: ratio must divide channels 4; got 8\."),
    (lambda: NonLocal(0), r"NonLocal: channels must be an int of at least 1; got 0\."),
    (lambda: NonLocal(8, bottleneck=0), r"NonLocal: bottleneck must be an int of at least 1; got 0\."),
    (lambda: NonLocal(8, subsample=1.5), r"NonLocal: subsample must be an int of at least 1; got 1\.5\."),
    (lambda: NonLocal(8, kind="cosine"), r"kind must be one of 'embedded', .*, 'concatenation'; got 'cosine'"),
    (lambda: NonLocal(8, scale=float("nan")), r"NonLocal: scale must be a finite number; got nan\."),
    (lambda: NonLocal(8, kind="concatenation", scale=0.5), r"scale must be 1\.0 for kind 'concatenation'; got 0\.5"),
    (lambda: NonLocal(8, kind="concatenation", scale=None), r"scale must be 1\.0 for kind 'concatenation'; got None"),
]

SHAPE = r"features must have shape \[batch, channels, H, W\]( = \[batch, 8, H, W\])?; got "
FEATURES = [
    (torch.zeros(8, 5, 7), SHAPE + r"\[8, 5, 7\]"),
    (torch.zeros(1, 2, 8, 5, 7), SHAPE + r"\[1, 2, 8, 5, 7\]"),
    (torch.zeros(2, 8, 0, 7), r"features must have at least one channel, row and column; got \[2, 8, 0, 7\]"),
    (torch.zeros(2, 0, 5, 7), r"features must have (shape .*|at least one channel, .*); got \[2, 0, 5, 7\]"),
    (torch.zeros(2, 8, 5, 7).double(), r"features must be float32, like the parameters; got float64"),
    (torch.zeros(2, 8, 5, 7).long(), r"features must be float32, like the parameters; got int64"),
    (torch.zeros(2, 8, 5, 7, device="meta"), r"features must be on cpu, like the parameters; got meta"),
]

MODULES = [ChannelAttention(8, 2), SpatialAttention(3), CBAM(8, 2), BAM(8, 2), PositionAttention(8), NonLocal(8)]
IDS = [type(module).__name__ for module in MODULES]


@pytest.mark.parametrize(("make", "sentence"), SIZES, ids=[sentence for _, sentence in SIZES])
def test_sizes(make, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize("flag", ["norm", "projection_bias"])
def test_flags_and_numbers_are_typed(flag: str) -> None:
    with pytest.raises(TypeError, match=f"{flag} must be True or False; got 1"):
        CBAM(8, 2, **{flag: 1})
    with pytest.raises(TypeError, match="NonLocal: scale must be a finite number; got '1'"):
        NonLocal(8, scale="1")


@pytest.mark.parametrize("module", MODULES, ids=IDS)
@pytest.mark.parametrize(
    ("features", "sentence"), FEATURES, ids=[str(list(x.shape)) + str(x.dtype) for x, _ in FEATURES]
)
def test_features(module, features: torch.Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{type(module).__name__}: {sentence}"):
        module(features)


@pytest.mark.parametrize(
    "module", [m for m in MODULES if not isinstance(m, SpatialAttention)], ids=lambda m: type(m).__name__
)
def test_other_numbers_of_channels(module) -> None:
    sentence = r"features must have shape \[batch, channels, H, W\] = \[batch, 8, H, W\]; got \[2, 4, 5, 7\]"
    with pytest.raises(ValueError, match=f"{type(module).__name__}: {sentence}"):
        module(torch.zeros(2, 4, 5, 7))


@pytest.mark.parametrize("module", MODULES, ids=IDS)
def test_not_a_tensor(module) -> None:
    with pytest.raises(TypeError, match="features must be a tensor; got list"):
        module([1.0])


def test_three_axes_get_the_hint_and_the_facts() -> None:
    with pytest.raises(ValueError, match=r"features \[8, 5, 7\]  float32  cpu\nHint: features\[None\] adds the batch"):
        ChannelAttention(8, 2)(torch.zeros(8, 5, 7))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (BAM(8, 2), (1, 8, 5, 7)),
        (SpatialAttention(3), (1, 8, 1, 1)),
        (CBAM(8, 2), (1, 8, 1, 1)),
        (NonLocal(8), (1, 8, 1, 1)),
    ],
    ids=["BAM", "SpatialAttention", "CBAM", "NonLocal"],
)
def test_one_value_per_channel_cannot_be_normalised_in_training(module, shape: tuple[int, ...]) -> None:
    running = {name: own.clone() for name, own in module.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"have at least 2 values per channel in training.*; got 1\.\nHint: .*eval\(\)"
    ):
        module.train()(torch.zeros(shape))
    assert all(torch.equal(own, running[name]) for name, own in module.state_dict().items())
    assert module.eval()(torch.zeros(shape)).shape == shape


def test_weights_and_matrix_check_too() -> None:
    for question in (MODULES[0].weights, MODULES[1].weights, MODULES[2].weights, MODULES[3].weights, MODULES[3].gate):
        with pytest.raises(ValueError, match="features must have shape"):
            question(torch.zeros(8, 5, 7))
    for module in MODULES[4:]:
        with pytest.raises(ValueError, match="features must have shape"):
            module.matrix(torch.zeros(8, 5, 7))


def test_conversions_say_why_not() -> None:
    with pytest.raises(TypeError, match="to_timm: module must be a ChannelAttention, ECA, SpatialAttention, CBAM"):
        vision.to_timm(BAM(8, 2))
    with pytest.raises(sc.UnsupportedError, match="norm=False") as caught:
        vision.to_timm(CBAM(8, 2, norm=False, order="spatial-channel"))
    assert len(caught.value.reasons) == 2
    with pytest.raises(sc.UnsupportedError, match="timm's block is an embedded Gaussian") as caught:
        vision.from_timm(NonLocal(8, kind="dot", subsample=2, scale=0.3), {})
    assert len(caught.value.reasons) == 3
    with pytest.raises(sc.UnsupportedError, match="norm=False"):
        vision.to_timm(SpatialAttention(3, norm=False))
    with pytest.raises(TypeError, match="from_timm: state must be a state dict; got list"):
        vision.from_timm(ChannelAttention(8, 2), [])
    state = vision.to_timm(ChannelAttention(8, 2))
    with pytest.raises(
        ValueError, match=r"state must have the names .*\n    lacks \[\]\n    has \['fc1.bias', 'fc2.bias'\]"
    ):
        vision.from_timm(ChannelAttention(8, 2, projection_bias=False), state)
    with pytest.raises(
        ValueError, match=r"fc1.weight must have shape \[2, 8, 1, 1\], like reduce.weight of the module"
    ):
        vision.from_timm(ChannelAttention(8, 4), state)
