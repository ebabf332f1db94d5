"""Programs compiled for processors that need not be there: the compiler's texts and sums."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export

from jaxmem import targets
from jaxmem.compile.compiling import compile_with_texts
from jaxmem.hlo.analysis import Analysis, analyse

PLATFORMS = ("cpu", "gpu", "tpu")
NAMES = {"gpu": "h100-80g", "tpu": "v5e-16g"}


@dataclasses.dataclass(frozen=True)
class Texts:
    """What a compiler says of a program."""

    hlo: str
    assignment: str
    live_range: str
    stats: dict[str, Any]
    message: str = ""

    @functools.cached_property
    def analysis(self) -> Analysis:
        return analyse(self.hlo, self.assignment, self.live_range)

    @property
    def required(self) -> int:
        """Arguments, results and temporaries in device memory, by the compiler's own sums."""
        stats = self.stats
        return (
            stats["argument_bytes"]
            + stats["output_bytes"]
            - stats["alias_bytes"]
            + stats["temp_bytes"]
        )


def compiled(
    where: str,
    fn: Callable[..., Any],
    *specs: Any,
    donate: Sequence[int] = (),
    target: targets.Target | None = None,
    mesh: dict[str, int] | None = None,
    generate_code: bool = False,
) -> Texts:
    """Compile `fn` of arrays for the CPU, an absent H100 or an absent v5e, or for `target`.

    Args:
      specs: shapes and dtypes; in pytrees, which are flattened before `fn` is jitted.
      donate: indices of leaves.
      mesh: axes of the mesh that the specs are sharded over.
      generate_code: whether an absent accelerator's compiler goes on when buffers are assigned.
    """
    leaves, tree = jax.tree.flatten(specs)

    def flat(*leaves: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(fn(*jax.tree.unflatten(tree, leaves))))

    jitted = jax.jit(flat, donate_argnums=tuple(donate))
    if where == "cpu":
        return _here(jitted, leaves)
    exported = export.export(jitted, platforms=["cuda" if where == "gpu" else "tpu"])(*leaves)
    exported = dataclasses.replace(
        exported,
        in_tree=jax.tree.structure(((0,) * len(exported.in_avals), {})),
        out_tree=jax.tree.structure((0,) * len(exported.out_avals)),
    )
    kept = set(exported.module_kept_var_idx)
    output = targets.compile_for(
        target or targets.target(NAMES[where], devices=exported.nr_devices),
        bytes(exported.serialize()),
        donate=[k for k in donate if k in kept],
        mesh_axes=mesh,
        generate_code=generate_code,
    )
    return Texts(output.hlo, output.assignment, output.live_range, output.stats, output.message)


def _here(jitted: Any, leaves: Sequence[Any]) -> Texts:
    made, (assignment, live_range), _ = compile_with_texts(jitted.lower(*leaves))
    memory = made.memory_analysis()
    kinds = ("argument", "output", "alias", "temp")
    stats = {f"{kind}_bytes": getattr(memory, f"{kind}_size_in_bytes") for kind in kinds}
    return Texts(made.as_text(), assignment, live_range, stats)
