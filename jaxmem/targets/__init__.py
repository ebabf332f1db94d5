"""Accelerators, present or absent, and compiling for them outside the user's process."""

from jaxmem.targets.cache import Cache as Cache
from jaxmem.targets.catalog import by_device_kind as by_device_kind
from jaxmem.targets.catalog import catalog as catalog
from jaxmem.targets.catalog import load as load
from jaxmem.targets.catalog import target as target
from jaxmem.targets.client import Compilation as Compilation
from jaxmem.targets.client import CompileError as CompileError
from jaxmem.targets.client import CompilerOutput as CompilerOutput
from jaxmem.targets.client import compile_for as compile_for
from jaxmem.targets.client import settings as settings
from jaxmem.targets.client import versions as versions
from jaxmem.targets.client import warm_up as warm_up
from jaxmem.targets.refusals import avoiding as avoiding
from jaxmem.targets.spec import Target as Target
