"""Beyond one machine: attention over a sequence that lies on many ranks, planned from the mask."""

from saccade.distributed.context_parallel import ContextParallel
from saccade.distributed.exchange_plan import Exchange, exchange
from saccade.distributed.exports import block_mask, cp_comm_types
from saccade.distributed.layouts import Layout
from saccade.distributed.parallelize import parallelize
from saccade.distributed.qk_ranges import QKRanges, qk_ranges
from saccade.distributed.rank_plan import RankPlan
from saccade.distributed.rank_speed import Machine
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
