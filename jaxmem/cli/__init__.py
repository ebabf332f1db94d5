"""The command line: `jaxmem report`, `sweep`, `diff`, `targets`, `doctor`, `verify`, `cache`.

Nothing here imports jax before a command needs it, so that help and completion are quick.
"""

from jaxmem.cli.app import main as main
