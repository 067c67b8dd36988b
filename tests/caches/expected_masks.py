"""Rules and scores that caches which forget by position must keep."""

from saccade import masks
from saccade.mechanisms import Softmax
from saccade.positions import ALiBi

TOTAL, HEADS, HEAD_DIM = 23, 4, 4
WIDTH = HEADS * HEAD_DIM
RULES = [
    masks.Causal(),
    masks.sliding_window(9),
    masks.Causal() & ~masks.Window(1, 0),
    masks.Documents([4, 9, 30], rule=masks.Causal()),
    masks.Predicate(lambda b, h, q, kv: (kv <= q) & ((q + kv + h) % 3 != 0)),
]
BIASES = {"plain": Softmax, "alibi": lambda: Softmax(bias=ALiBi(HEADS)), "sink": lambda: Softmax(sink_logit=HEADS)}
