"""The command line: `jaxmem report`, `fit`, `sweep`, `diff`, `verify`, `targets`, `doctor` …

Nothing here imports jax before a command needs it, so that help and completion are quick.
"""

from jaxmem.cli.app import main as main
