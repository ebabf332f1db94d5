"""Code without a scan: cut where little is alive (`code`), planned (`chain`), run (`run`)."""

from jaxmem.straight.chain import Chain, Chains, Stretch, by_sqrt
from jaxmem.straight.code import Code
from jaxmem.straight.plan import Piece, StraightPlan
from jaxmem.straight.run import run

__all__ = ["Chain", "Chains", "Code", "Piece", "StraightPlan", "Stretch", "by_sqrt", "run"]
