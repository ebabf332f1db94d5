"""Is the gradient that of the whole batch, and what is the effect of one microbatch of NaN?

The problem is small enough to write its gradient by hand, in numpy's float64, independent of
what is tested.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem
from acc.forms import FORMS, Form, Losses
from acc.table import REFUSES, Row

GRADIENT, MOMENT, AFTER_NAN = "gradient error", "second moment error", "after NaN"
SKIPPED = "skipped"  # the microbatch alone; the next window is right
STEP_LOST = "step lost"  # the whole window; the next one is right
POISONED = "poisoned"  # nothing is right any more

_WIDTHS = (6, 8)

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch and how it is cut.

    Attributes:
      tokens: of each row, how many count.
      microbatches: how many.
      dtype: of the parameters, and so of the gradient of a microbatch.
    """

    name: str
    tokens: tuple[int, ...]
    microbatches: int
    dtype: str = "float32"


class Recorded(NamedTuple):
    """What the wrapped optimizer was given last."""

    gradient: Any
    steps: jax.Array


CASES = (
    Case("equal", (12,) * 16, 4),
    Case("4 to 16 tokens", (4, 16, 7, 12), 4),
    Case("bfloat16", (12,) * 256, 256, "bfloat16"),
    Case("13 rows in 4", (12,) * 13, 4),
)

# ---------------------------------------------------------------- API


def rows(forms: tuple[Form, ...] = FORMS) -> Iterator[Row]:
    """Every form on every case, and after a microbatch of NaN."""
    device = jax.default_backend()
    for form in forms:
        for case in CASES:
            yield _error(form, case, device)
        yield Row(GRADIENT, AFTER_NAN, form.name, after_nan(form), "", device)
    # Adam is the gradient's square; what has no gradient is judged by that.
    for form in forms:
        if form.approximate:
            case = CASES[0]
            square = jax.tree.map(np.square, exact(case))
            found = _run(form, case).nu
            value = _difference(jax.tree.map(lambda leaf: leaf / (1 - 0.999), found), square)
            yield Row(MOMENT, case.name, form.name, value, "relative", device)


def count(forms: tuple[Form, ...] = FORMS) -> int:
    """How many rows there will be."""
    return len(forms) * (len(CASES) + 1) + sum(form.approximate for form in forms)


def gradient(form: Form, case: Case) -> Any:
    """The gradient that reaches the optimizer, for Adam's kin the first moment after one step.

    Raises:
      TypeError, ValueError: the tool refuses the batch.
    """
    state = _run(form, case)
    if form.approximate:
        return jax.tree.map(lambda leaf: leaf / (1 - 0.9), state.mu)
    return _recorded(state).gradient


def exact(case: Case) -> Any:
    """The gradient of the whole batch in float64, by hand."""
    params, batch = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), _problem(case))
    x, mask = batch["x"], batch["mask"]
    h = np.tanh(x @ params["in"])
    slope = 2 * mask * (h @ params["out"] - batch["y"]) / mask.sum()
    back = slope[..., None] * params["out"] * (1 - h**2)
    return {
        "in": np.einsum("btd,bth->dh", x, back),
        "out": np.einsum("bth,bt->h", h, slope),
    }


def after_nan(form: Form) -> str:
    """What one microbatch of NaN leaves, with an optimizer under `optax.apply_if_finite`."""
    case = CASES[0]
    params, batch = _problem(case)
    step = form.make(LOSSES, optax.apply_if_finite(recorder(), 100), case.microbatches)
    update, state = jax.jit(step.update), step.init(params)
    spoilt = {**batch, "x": batch["x"].at[1 :: case.microbatches].set(jnp.nan)}
    # One more window than is looked at: a microbatch left out is made up for by a later one.
    for whole in (spoilt, batch, batch):
        for part in _parts(form, case, whole):
            _, state, _ = update(params, state, part)
    if form.approximate:
        finite = all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.mu))
        return STEP_LOST if finite else POISONED
    if not _difference(_recorded(state).gradient, exact(case)) < 1e-5:
        return POISONED
    lost = int(_find(state, optax.ApplyIfFiniteState).total_notfinite)
    return STEP_LOST if lost else SKIPPED


def recorder() -> optax.GradientTransformation:
    """An optimizer that moves nothing and remembers what it was given, in float32."""

    def init(params: Any) -> Recorded:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        return Recorded(zeros, jnp.zeros((), jnp.int32))

    def update(grads: Any, state: Recorded, params: Any = None) -> tuple[Any, Recorded]:
        seen = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads)
        return jax.tree.map(jnp.zeros_like, grads), Recorded(seen, state.steps + 1)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- implementation


def _squares(params: Any, batch: Any) -> jax.Array:
    """The squared error of every token that counts, in float32 whatever the parameters are."""
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    h = jnp.tanh(batch["x"] @ weights["in"])
    return batch["mask"] * (h @ weights["out"] - batch["y"]) ** 2


LOSSES = Losses(
    mean=lambda params, batch: _squares(params, batch).sum() / batch["mask"].sum(),
    weighted=lambda params, batch: jaxmem.Weighted(
        _squares(params, batch).sum(), batch["mask"].sum()
    ),
    weight=lambda batch: batch["mask"].sum(),
)


def _problem(case: Case) -> tuple[Any, Any]:
    draw = np.random.default_rng(0).standard_normal
    (wide, hidden), longest = _WIDTHS, max(case.tokens)
    shape = (len(case.tokens), longest)
    params = {"in": draw((wide, hidden)) / wide**0.5, "out": draw(hidden) / hidden**0.5}
    batch = {
        "x": draw((*shape, wide)),
        # Far from what the model says, so that microbatches agree on where to go.
        "y": 2 + draw(shape),
        "mask": np.arange(longest) < np.array(case.tokens)[:, None],
    }
    return (
        jax.tree.map(lambda leaf: jnp.asarray(leaf, case.dtype), params),
        jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), batch),
    )


def _error(form: Form, case: Case, device: str) -> Row:
    try:
        found = gradient(form, case)
    except (TypeError, ValueError) as error:
        note = str(error).partition("\n")[0]
        return Row(GRADIENT, case.name, form.name, REFUSES, "", device, note)
    value = _difference(found, exact(case))
    return Row(GRADIENT, case.name, form.name, value, "relative", device)


@functools.cache
def _run(form: Form, case: Case) -> Any:
    """The state after one batch."""
    params, batch = _problem(case)
    step = form.make(LOSSES, recorder(), case.microbatches)
    update, state = jax.jit(step.update), step.init(params)
    for part in _parts(form, case, batch):
        _, state, _ = update(params, state, part)
    return state


def _parts(form: Form, case: Case, batch: Any) -> list[Any]:
    """What the step is called with, one after another, for one batch."""
    if form.takes == "batch":
        return [batch]
    starts = [slice(start, None, case.microbatches) for start in range(case.microbatches)]
    # Of numpy: jax would compile each of these slices.
    rows = jax.tree.map(np.asarray, batch)
    return [{name: leaf[start] for name, leaf in rows.items()} for start in starts]


def _difference(found: Any, wanted: Any) -> float:
    """Length of the difference of two trees, over the length of the second."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    off = sum(((np.asarray(a, np.float64) - b) ** 2).sum() for a, b in pairs)
    return float(np.sqrt(off / sum((b**2).sum() for _, b in pairs)))


def _recorded(state: Any) -> Recorded:
    return _find(state, Recorded)


def _find(state: Any, kind: type) -> Any:
    """The first node of a tree that is of a type."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return next(node for node in nodes if isinstance(node, kind))
