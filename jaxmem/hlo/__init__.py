"""What a compiler's texts say of a program: its memory, named, and its matrix work.

Pure Python, with no jax: `text` reads optimized HLO, `buffers` the compiler's
dump, and `analysis` puts them together.
"""

from jaxmem.hlo.analysis import Analysis as Analysis
from jaxmem.hlo.analysis import analyse as analyse
from jaxmem.hlo.buffers import Buffer as Buffer
from jaxmem.hlo.buffers import Loop as Loop
from jaxmem.hlo.buffers import Timeline as Timeline
