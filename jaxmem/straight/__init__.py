"""Code without a scan: cut where little is alive (`code`), planned link by link (`chain`), run."""

from jaxmem.straight.chain import Chain, HeldPlan, by_sqrt
from jaxmem.straight.code import Code
from jaxmem.straight.plan import Piece, StraightPlan
from jaxmem.straight.region import run_region
from jaxmem.straight.run import run

__all__ = [
    "Chain",
    "Code",
    "HeldPlan",
    "Piece",
    "StraightPlan",
    "by_sqrt",
    "run",
    "run_region",
]
