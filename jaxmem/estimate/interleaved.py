"""The order in which a backward pass outside of loops recomputes, and what waits for what.

Each value is computed again right in front of what reads it, behind barriers that keep it there
until the gradient comes by that needs it.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.estimate.arrays import in_memory, leading_on
from jaxmem.estimate.counting import flops, kind_of
from jaxmem.estimate.normalised import Normalised
from jaxmem.trace.context import platform
from jaxmem.trace.layer import nbytes

# ---------------------------------------------------------------- API


@dataclasses.dataclass(frozen=True)
class BackwardStep:
    """One operation that pulls gradients back, and what is recomputed for it.

    Attributes:
      recomputed: places of operations, which stand in front of it.
      operation: its place.
      anew: whether what was recomputed so far, and is no kernel's, is forgotten before it.
      waits: for what `recomputed` has to wait, as it makes something large: the gradients that it
        is for, and what the kernel before made, so that branches come one after the other; and
        gradients of matrices, which might else be put off.
      first: gradients that wait for the operation, which is done with something large.  These are
        the ones that it pulls back; if none is read any more, larger ones that are there.
      reads: what `recomputed` takes from behind a barrier.
    """

    recomputed: range
    operation: int
    anew: bool
    waits: tuple[Any, ...]
    first: tuple[Any, ...]
    reads: tuple[Any, ...] = ()


def interleave(
    closed: ClosedJaxpr, count: int, gradients: Sequence[Any], late: Iterable[Any]
) -> tuple[ClosedJaxpr, tuple[BackwardStep, ...]]:
    """A backward pass with what is recomputed right in front of what reads it, and its steps.

    Args:
      closed: so many operations that recompute, and behind these what pulls gradients back.
      gradients: of the results, among its inputs.
      late: inputs that are computed where they are read, as what they are computed from is kept.
    """
    order = _Order(closed, count, gradients, late)
    return _jax.with_equations(closed, order.eqns), _with_reads(order.steps, order.eqns)


# ---------------------------------------------------------------- implementation

# What is smaller than this part of the gradient need not wait for it.
_LARGE = 16
# What makes bits that no compiler computes in what reads them.
_RANDOM = ("random_bits", "threefry2x32")
# What makes more bytes of the same numbers: a cast is to a wider type then.
_REPEATING = ("broadcast_in_dim", "convert_element_type")
# What reads more than this, in units of its own size, is not computed several times.
_LIGHT = 1.05
# Products that do no more operations for each byte that they make are, as a convolution of an
# image's three channels (accelerators do hundreds in the time in which they write a byte), if
# together they are no larger a part of all products than this.
_THIN = 16
_ASIDE = 1 / 100


class _Order:
    """The operations of a backward pass, what is recomputed in front of what reads it.

    Attributes:
      eqns: in their order; what stands there several times has results of other names.
      steps: which of these belong together.
    """

    def __init__(
        self, closed: ClosedJaxpr, count: int, gradients: Sequence[Any], late: Iterable[Any]
    ) -> None:
        jaxpr = closed.jaxpr
        self.eqns: list[Any] = []
        self.steps: list[BackwardStep] = []
        self._again = jaxpr.eqns[:count]
        self._makers = {var: at for at, eqn in enumerate(self._again) for var in eqn.outvars}
        self._stored = in_memory(jaxpr)
        self._thin = _thin_products(jaxpr.eqns, count)
        self._lasting = self._lasts()
        # What a value that is recomputed is called now; those that last and those that do not.
        self._kept: dict[Any, Any] = {}
        self._now: dict[Any, Any] = {}
        self._used: set[Any] = set()
        self._large: set[Any] = set(late)
        self._following = set(gradients)
        # What repeats the numbers of something smaller, and what that is.
        self._spread: dict[Any, Any] = {}
        # What the last kernel made, what follows from that, and whether it stands right in front.
        self._before: tuple[Any, ...] = ()
        self._behind: set[Any] = set()
        self._ended = False
        # What is elementwise stands in front of the kernel or the sum that reads it.
        self._late: dict[Any, int] = {}
        after = jaxpr.eqns[count:]
        # Gradients that kernels made, and how often each is still to be read.
        self._made: dict[Any, None] = {}
        self._left = Counter(filter(_jax.is_var, (a for eqn in after for a in eqn.invars)))
        # What others follow from; and gradients of matrices, from which none does, that nobody has
        # waited for yet.
        self._lead_on = leading_on(after)
        self._alone: dict[Any, None] = {}
        for at, eqn in enumerate(after):
            if self._can_wait(eqn):
                self._late.update(dict.fromkeys(eqn.outvars, at))
                continue
            waited = self._in_front(after, eqn.invars)
            if kind_of(eqn) == "kernel":  # what it needs itself is not for what waited
                self._place_all(waited)
                waited = []
            self._place_all([*waited, eqn])
        self._place_all(self._in_front(after, jaxpr.outvars))
        # Gradients that are values of the forward pass as they stand.
        self._compute(self._wanted(filter(_jax.is_var, jaxpr.outvars)))

    def _lasts(self) -> set[Any]:
        """What is recomputed once: the results of dear kernels, and what reads much."""
        behind: dict[Any, frozenset[Any]] = {}
        found: set[Any] = set()
        # What compilers of GPUs compute in the kernels of softmaxes and norms, each of them anew.
        reduced = Normalised(self._again).reduced if platform() != "tpu" else set()
        for at, eqn in enumerate(self._again):
            kind, atoms = kind_of(eqn), list(filter(_jax.is_var, eqn.invars))
            taken = frozenset().union(*(behind.get(a, frozenset([a])) for a in atoms))
            if reduced.issuperset(eqn.outvars):
                behind.update((var, taken) for var in eqn.outvars)
                continue
            kernel = kind in ("kernel", "reduction") and at not in self._thin
            size = sum(nbytes(var.aval) for var in taken)
            for var in eqn.outvars:
                stored = var in self._stored
                if kernel or (stored and size > _LIGHT * nbytes(var.aval)):
                    found.add(var)
                behind[var] = frozenset([var]) if kernel or stored else taken
        return found

    def _can_wait(self, eqn: Any) -> bool:
        atoms = filter(_jax.is_var, eqn.invars)
        pulls = any(atom in self._following or atom in self._late for atom in atoms)
        return pulls and kind_of(eqn) in ("fused", "view")

    def _in_front(self, after: Sequence[Any], atoms: Iterable[Any]) -> list[Any]:
        """What waits and these follow from; it waits no longer."""
        found: set[int] = set()
        pending = list(filter(_jax.is_var, atoms))
        while pending:
            if (at := self._late.pop(pending.pop(), None)) is not None and at not in found:
                found.add(at)
                pending += filter(_jax.is_var, after[at].invars)
        for at in found:
            for var in after[at].outvars:
                self._late.pop(var, None)
        return [after[at] for at in sorted(found)]

    def _place_all(self, eqns: Sequence[Any]) -> None:
        """Several operations, what they need in front of all of them."""
        made = {var for eqn in eqns for var in eqn.outvars}
        several = dict.fromkeys(a for eqn in eqns for a in eqn.invars if _jax.is_var(a))
        atoms = [atom for atom in several if atom not in made]
        gradients = [atom for atom in atoms if atom in self._following]
        size = max((nbytes(var.aval) for var in gradients), default=0)
        for eqn in eqns:
            self._place(eqn, atoms, gradients, size)

    def _place(self, eqn: Any, atoms: Sequence[Any], gradients: Sequence[Any], size: int) -> None:
        """One operation that pulls gradients back, with what it needs in front.

        Args:
          atoms: what it reads, or all that read what it makes up to a kernel or a sum.
          gradients, size: those of them that are, and bytes of the largest.
        """
        own = list(dict.fromkeys(filter(_jax.is_var, eqn.invars)))
        pulled = [atom for atom in own if atom in self._following]
        kernel = kind_of(eqn) == "kernel"
        wanted = self._wanted(atoms)
        large = self._made_large(wanted, size, kernel)
        if anew := bool(large and self._now):
            self._now.clear()
            wanted = self._wanted(atoms)
            large = self._made_large(wanted, size, kernel)
        start = len(self.eqns)
        self._compute(wanted)
        self._large.update(self._called(var) for var in large)
        ins = [self._called(a) if _jax.is_var(a) else a for a in eqn.invars]
        done = kernel and any(_jax.is_var(a) and a in self._large for a in ins)
        self._left.subtract(filter(_jax.is_var, eqn.invars))
        waits = tuple(dict.fromkeys([*self._waits(gradients), *self._alone])) if large else ()
        self._alone = {} if large else self._alone
        self.steps.append(
            BackwardStep(
                recomputed=range(start, len(self.eqns)),
                operation=len(self.eqns),
                anew=anew or self._ended,
                waits=waits,
                first=self._unspread(self._yet_to_wait(pulled)) if done else (),
            )
        )
        self.eqns.append(_jax.renamed(eqn, ins, eqn.outvars))
        if pulled:
            self._following.update(eqn.outvars)
            self._made.update(dict.fromkeys(eqn.outvars) if kernel else {})
        self._note_spread(eqn, own)
        if kernel:
            made = tuple(var for var in eqn.outvars if not _jax.is_dropped(var))
            if pulled and self._is_put_off(made, own):
                self._alone.update(dict.fromkeys(made))
            self._now.clear()
            self._before = made
            self._behind = set(self._before)
        elif any(atom in self._behind for atom in own):
            self._behind.update(eqn.outvars)
        self._ended = kernel

    def _yet_to_wait(self, pulled: Sequence[Any]) -> Sequence[Any]:
        """What waits for an operation that pulls these back and is done with something large.

        Nothing would wait through gradients that it is the last to read.  What it reads should be
        gone when larger ones are pulled further: as the probabilities of attention, kept, which are
        for the gradient of the values, when the softmax is reversed.
        """
        if any(self._left[var] for var in pulled):
            return pulled
        size = max((nbytes(var.aval) for var in pulled), default=0)
        return [var for var in self._made if self._left[var] and nbytes(var.aval) > size]

    def _waits(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """These gradients, and the last kernel, if they are there without it."""
        first = self._unspread(gradients)
        if any(atom in self._behind for atom in gradients):
            return first  # more in the barrier would be live for nothing
        return tuple(dict.fromkeys([*first, *self._before]))

    def _is_put_off(self, made: Sequence[Any], read: Sequence[Any]) -> bool:
        """Whether the compiler of GPUs may make these at the end, and hold for it what they need.

        Only the optimizer waits for the gradient of a matrix.  One that is larger than what it is
        made of may come late.
        """
        if platform() == "tpu" or not self._lead_on.isdisjoint(made):
            return False
        return sum(nbytes(var.aval) for var in read) > sum(nbytes(var.aval) for var in made)

    def _note_spread(self, eqn: Any, atoms: Sequence[Any]) -> None:
        """Note what repeats the numbers of something smaller, as the gradient of a mean does."""
        if len(atoms) == 1 and kind_of(eqn) in ("fused", "view"):
            size, made = (max(nbytes(var.aval) for var in vars) for vars in (atoms, eqn.outvars))
            repeats = eqn.primitive.name in _REPEATING and made > size
            if repeats or atoms[0] in self._spread:
                source = self._spread.get(atoms[0], atoms[0])
                self._spread.update(dict.fromkeys(eqn.outvars, source))

    def _unspread(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """These, or what they repeat: what goes through a barrier is in memory."""
        return tuple(dict.fromkeys(self._spread.get(var, var) for var in gradients))

    def _wanted(self, atoms: Iterable[Any]) -> list[int]:
        """Places of what has to be recomputed for these to be there."""
        found: set[int] = set()
        pending = list(atoms)
        while pending:
            var = pending.pop()
            if var in self._kept or var in self._now:
                continue
            if (at := self._makers.get(var)) is not None and at not in found:
                found.add(at)
                pending += filter(_jax.is_var, self._again[at].invars)
        return sorted(found)

    def _made_large(self, wanted: Sequence[int], size: int, for_kernel: bool) -> list[Any]:
        """What of it will be in memory, and is not small compared with the gradient.

        What is elementwise and not for a kernel is fused into what it is for; random bits are not.
        """
        eqns = [self._again[at] for at in wanted]
        bits = {var for eqn in eqns if eqn.primitive.name in _RANDOM for var in eqn.outvars}
        if not (for_kernel or bits or any(kind_of(eqn) == "kernel" for eqn in eqns)):
            return []
        made = [var for eqn in eqns for var in eqn.outvars if var in self._stored or var in bits]
        return [var for var in made if nbytes(var.aval) * _LARGE >= size]

    def _compute(self, wanted: Sequence[int]) -> None:
        for at in wanted:
            eqn = self._again[at]
            outs = [var if var not in self._used else _jax.another(var) for var in eqn.outvars]
            self._used.update(eqn.outvars)
            ins = [self._called(a) if _jax.is_var(a) else a for a in eqn.invars]
            self.eqns.append(_jax.renamed(eqn, ins, outs))
            for var, out in zip(eqn.outvars, outs, strict=True):
                (self._kept if var in self._lasting else self._now)[var] = out

    def _called(self, var: Any) -> Any:
        return self._kept.get(var) or self._now.get(var, var)


def _thin_products(eqns: Sequence[Any], count: int) -> set[int]:
    """Of the first so many operations, products so small that each who reads one does it himself.

    They read nothing that is recomputed: else that would be, each time, with all before it.
    """
    products = list(map(flops.matmul_flops, eqns))
    left = _ASIDE * sum(products)
    found: set[int] = set()
    anew: set[Any] = set()
    for at, eqn in enumerate(eqns[:count]):
        is_anew = any(atom in anew for atom in filter(_jax.is_var, eqn.invars))
        if is_anew or kind_of(eqn) != "view":
            anew.update(eqn.outvars)
        made = sum(nbytes(var.aval) for var in eqn.outvars)
        if not is_anew and 0 < products[at] <= min(_THIN * made, left):
            found.add(at)
            left -= products[at]
    return found


def _with_reads(steps: Sequence[BackwardStep], eqns: Sequence[Any]) -> tuple[BackwardStep, ...]:
    """Steps with what each reads that is not behind a barrier yet."""
    behind: set[Any] = set()
    found = []
    for step in steps:
        if step.anew:
            behind.clear()
        again = [eqns[at] for at in step.recomputed]
        reads = tuple(var for var in _read(again) if var not in behind)
        behind.update(reads, *(eqn.outvars for eqn in again))
        found.append(dataclasses.replace(step, reads=reads))
    return tuple(found)


def _read(eqns: Sequence[Any]) -> list[Any]:
    """What operations read and do not make."""
    made = {var for eqn in eqns for var in eqn.outvars}
    atoms = (atom for eqn in eqns for atom in eqn.invars)
    return [a for a in dict.fromkeys(filter(_jax.is_var, atoms)) if a not in made]
