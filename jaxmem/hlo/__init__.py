"""Analysis of a compiler's texts of a program: its memory, by named values, and its matmul FLOPs.

Pure Python, without jax: `text` reads optimized HLO, `buffers` the compiler's
dump, and `analysis` combines them.
"""

from jaxmem.hlo.analysis import Analysis as Analysis
from jaxmem.hlo.analysis import analyse as analyse
from jaxmem.hlo.buffers import Buffer as Buffer
from jaxmem.hlo.buffers import Loop as Loop
from jaxmem.hlo.buffers import Timeline as Timeline
from jaxmem.hlo.collectives import Collective as Collective
