"""Record and replace the attention of small models of many code bases, and compare with the models themselves."""

from benchmarks.code_bases.case import CASES, Case
from benchmarks.code_bases.recorded import judge_record
from benchmarks.code_bases.replaced import judge_replacement

__all__ = ["CASES", "Case", "judge_record", "judge_replacement"]
