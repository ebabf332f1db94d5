"""jaxmem: train JAX models that do not fit.

In the order of the data's way: what a layer keeps (`policies`), how a stack is
cut (`Plan`), what to decorate (`remat` and its short forms, `scan`, `linen`,
`nnx`), what a whole step is to keep within a budget (`fit`, `frontier`), in how many parts a
batch goes through it (`value_and_grad`, `MultiSteps`), and what came of it (`stacks`,
`saved_residuals`, `memory_report`, for any of `targets`).

What each name is, and where it is from, stands in ``__init__.pyi``.  A name is imported when it is
first used, so that `import jaxmem` and the command's help cost next to nothing.
"""

import lazy_loader

from jaxmem._util.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
