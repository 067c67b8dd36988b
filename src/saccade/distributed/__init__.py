"""Attention over a sequence that is split across many ranks, with communication planned from the mask."""

from saccade.distributed.context_parallel import ContextParallel
from saccade.distributed.exchange_plan import Exchange, Machine, RankPlan, exchange
from saccade.distributed.layouts import Layout
from saccade.distributed.parallelize import parallelize
from saccade.distributed.plan_export import QKRanges, block_mask, cp_comm_types, qk_ranges
from saccade.distributed.sharded_cache import ShardedCache, sharded_cache
from saccade.distributed.tensor_parallel import tp_plan

__all__ = [
    "ContextParallel",
    "Exchange",
    "Layout",
    "Machine",
    "QKRanges",
    "RankPlan",
    "ShardedCache",
    "block_mask",
    "cp_comm_types",
    "exchange",
    "parallelize",
    "qk_ranges",
    "sharded_cache",
    "tp_plan",
]
