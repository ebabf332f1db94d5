"""Code without a scan: cut where little is live (`code`), planned stage by stage (`chain`), run."""

from jaxmem.unrolled.chain import Chain, HeldPlan, by_sqrt
from jaxmem.unrolled.code import Code
from jaxmem.unrolled.keys import keys_outside
from jaxmem.unrolled.plan import Piece, UnrolledPlan
from jaxmem.unrolled.region import run_region
from jaxmem.unrolled.run import run

__all__ = [
    "Chain",
    "Code",
    "HeldPlan",
    "Piece",
    "UnrolledPlan",
    "by_sqrt",
    "keys_outside",
    "run",
    "run_region",
]
