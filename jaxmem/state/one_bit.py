"""1-bit Adam: after a warm-up devices exchange signs of the momentum, and not gradients.

Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed", arXiv 2102.02888.  The variance settles early in training.  From then on it is held fixed,
which leaves momentum SGD with a learning rate for each number, and that converges when its momentum
is compressed with error feedback (`jaxmem.state.signs`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmem import _jax
from jaxmem.accumulate.trees import described, difference, leaf_names
from jaxmem.errors import check_flags, check_positive
from jaxmem.state.signs import Exchanged, exchange, part_size, sent_error

# ---------------------------------------------------------------- types


class OneBitAdamState(NamedTuple):
    """What `one_bit_adam` remembers.

    Attributes:
      count: int32, steps so far, without those skipped.
      frozen: int32, the step after which the variance was held fixed; 0 in the warm-up.
      skipped: int32, steps that were skipped, as a gradient was not finite.
      still: int32, numbers that had no variance when it was held fixed, and do not move any more; 0
        in the warm-up.  Worth a look after the switch: many mean that the warm-up was too short, or
        that parameters get no gradient.
      norms: float32[window], sums of the variance in the last steps of the warm-up, for the test of
        its stability; float32[1], unused, where the warm-up ends at a given step.
      mu, nu: first and second moments, float32 in the shapes of the parameters.
      worker_error: what each device's signs were wrong by, float32[devices, …]; split over the
        devices along the first axis.
      server_error: the same of the averages that each device owns, float32[devices, part]; split
        likewise.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    frozen: jax.Array
    skipped: jax.Array
    still: jax.Array
    norms: jax.Array
    mu: Any
    nu: Any
    worker_error: Any
    server_error: Any


# ---------------------------------------------------------------- API


def one_bit_adam(
    learning_rate: float | Callable[[Any], Any],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    warmup_steps: int | None = None,
    stability: float = 0.96,
    check_after: int = 0,
    weight_decay: float = 0.0,
    axis: str | tuple[str, ...] = "data",
    scaled: bool = False,
    error_feedback: bool = True,
) -> optax.GradientTransformation:
    """1-bit Adam, as an optax transformation: 1/32 of the bytes between devices.

        optimizer = jaxmem.one_bit_adam(3e-4, warmup_steps=1000)
        step = jaxmem.one_bit_step(loss, optimizer, mesh=mesh)  # a mesh with an axis "data"

    Gradients are those of each device, of its own rows of the batch: `update` averages, and so it
    is called inside `jax.shard_map` over the mesh axis, as `jaxmem.one_bit_step` does.  In the
    warm-up it averages gradients, and all is as in optax.adam (AdamW with `weight_decay`).  Then
    the second moments stay as they are, with their correction for the start at zero, and

        m ← average over devices of (b1 · m + (1 − b1) · gradient), sent as signs with scales
        θ ← θ − α · m̂ / (√v̂ + eps)

    Both directions of the average have error feedback.  Where a second moment is 0 in the end of
    the warm-up, as of the embedding of a token that never came, the number does not move any more:
    signs have no zero, and each would be divided by eps.  The state's `still` counts them, and
    `OneBitStep.explain` says of which parameters they are.

    A step in which a gradient of any device is not finite changes nothing on any of them, but is
    counted in the state's `skipped`.

    On each of N devices, moments are whole, as all of them use them.  With P bytes of parameters in
    float32, the state is (3 + 1/N) P: Adam's 2 P, P of errors of what the device sends, and P/N of
    errors of what it owns.

    Args:
      learning_rate: α: a number, or a schedule of optax.
      b1, b2, eps: as in optax.adam.
      warmup_steps: steps with averaged gradients; a sixth to a quarter of all in the paper.  None
        for the paper's test: until the sum of the second moments has changed by less than
        1 − `stability` within 1 / (1 − b2) steps.
      stability: the least ratio of the smaller to the larger of these sums.
      check_after: the step after which the test is made, such as the end of the learning rate's
        own warm-up.
      weight_decay: θ is also moved by −α · weight_decay · θ.
      axis: the mesh axis, or axes, that the rows of the batch lie over.
      scaled: exchange m / (√v̂ + eps) and not m.  An array has one scale, and so the signs of a
        number whose gradients are small are large for it; divided by what is fixed, and the same on
        all devices, all numbers are of one size.  Not in the paper; it comes closer to Adam in
        `experiments/one_bit.py`.
      error_feedback: False for an ablation: the same without errors.

    Returns:
      An optax transformation with a `OneBitAdamState`.

    Raises:
      TypeError, ValueError: an argument is not in its range; at `init` or `update`: outside of
        `jax.shard_map`, on one device, or of a state of another number of devices.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> devices = jax.devices()
    >>> optimizer = jaxmem.one_bit_adam(1e-2, warmup_steps=10)
    >>> if len(devices) > 3:
    ...     with jax.set_mesh(jax.make_mesh((4,), ("data",), devices=devices[:4])):
    ...         state = optimizer.init({"w": jnp.ones((10, 10))})
    ...     assert state.worker_error["w"].shape == (4, 10, 10)
    ...     assert state.server_error["w"].shape == (4, 32)
    """
    core = Core(
        "one_bit_adam", b1, b2, eps, warmup_steps, stability, check_after, axis, scaled,
        error_feedback,
    )  # fmt: skip
    check_number("one_bit_adam", "weight_decay", weight_decay, 0)

    def init(params: Any) -> OneBitAdamState:
        return OneBitAdamState(**core.begun(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        if weight_decay:
            check_params("one_bit_adam", params)
        moments = core.advanced(updates, state)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate

        def moved(m: jax.Array, v: jax.Array, g: jax.Array, *theta: jax.Array) -> jax.Array:
            step = core.ratio(moments, m, v)
            if theta:
                step = step + weight_decay * theta[0].astype(jnp.float32)
            found = jnp.where(moments.finite, -rate * step, 0.0)
            return found.astype((theta[0] if theta else g).dtype)

        decayed = (params,) if weight_decay else ()
        found = jax.tree.map(moved, moments.mu, moments.nu, updates, *decayed)
        return found, OneBitAdamState(**core.held(state, moments))

    return optax.GradientTransformation(init, update)


# ---------------------------------------------------------------- implementation


class Moments(NamedTuple):
    """Of one step.

    Attributes:
      count, frozen, still, norms: as in the state, after the step.
      mu, nu, worker_error, server_error: as there.
      finite: whether the step is to be taken.
    """

    count: Any  # pyright: ignore[reportIncompatibleMethodOverride]
    frozen: jax.Array
    still: jax.Array
    norms: jax.Array
    mu: Any
    nu: Any
    worker_error: Any
    server_error: Any
    finite: jax.Array


@dataclasses.dataclass(frozen=True)
class Core:
    """What 1-bit Adam and 1-bit LAMB share: both phases of the moments.

    Attributes:
      name: of the function that a user called.
    """

    name: str
    b1: float
    b2: float
    eps: float
    warmup_steps: int | None
    stability: float
    check_after: int
    axis: str | tuple[str, ...]
    scaled: bool
    error_feedback: bool

    def __post_init__(self) -> None:
        for what in ("b1", "b2"):
            check_number(self.name, what, getattr(self, what), 0, below=1)
        check_number(self.name, "eps", self.eps, 0)
        if self.warmup_steps is not None:
            check_positive(f"{self.name}: warmup_steps", self.warmup_steps)
        check_number(self.name, "stability", self.stability, 0, below=1)
        check_number(self.name, "check_after", self.check_after, 0)
        check_flags(scaled=self.scaled, error_feedback=self.error_feedback)

    @property
    def window(self) -> int:
        """Steps between the two variances that are compared; 0 for no test."""
        return 0 if self.warmup_steps is not None else max(1, round(1 / (1 - self.b2)))

    def begun(self, params: Any) -> dict[str, Any]:
        """The fields of a state before the first step."""
        check_floating(self.name, params)
        devices, rows = self._devices()
        return {
            "count": jnp.zeros((), jnp.int32),
            "frozen": jnp.zeros((), jnp.int32),
            "skipped": jnp.zeros((), jnp.int32),
            "still": jnp.zeros((), jnp.int32),
            "norms": jnp.zeros(max(self.window, 1), jnp.float32),  # orbax saves none of size 0
            "mu": jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            "nu": jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            "worker_error": jax.tree.map(
                lambda p: self._varying(jnp.zeros((rows, *p.shape))), params
            ),
            "server_error": jax.tree.map(
                lambda p: self._varying(jnp.zeros((rows, part_size(p.size, devices)))), params
            ),
        }

    def advanced(self, updates: Any, state: Any) -> Moments:
        """The moments after a step with these gradients."""
        self._check_state(updates, state)
        gradients, tree = jax.tree.flatten(updates)
        gradients = [leaf.astype(jnp.float32) for leaf in gradients]
        mu, nu, worker, server = (tree.flatten_up_to(getattr(state, name)) for name in _TREES)
        warm, count = state.frozen == 0, jnp.asarray(optax.safe_increment(state.count))
        sizes = [self.size(v, jnp.maximum(state.frozen, 1)) if self.scaled else 1.0 for v in nu]
        counted = [v > 0 for v in nu]

        def own() -> list[jax.Array]:
            """What this device has to send."""
            found = []
            for m, g, e, size in zip(mu, gradients, worker, sizes, strict=True):
                x = (self.b1 * m + (1 - self.b1) * g) / size
                found.append(x + e[0] if self.error_feedback else x)
            return found

        def averaged() -> Exchanged:
            average = lax.pmean(gradients, self.axis)
            # Of the squares: where these are finite, so are the gradients of all devices.
            finite = jnp.stack([jnp.isfinite(g**2).all() for g in average]).all()
            unsent = [jnp.zeros((devices, part // 8), jnp.uint8) for part in parts]
            unsent, scales = jax.tree.map(self._varying, (unsent, jnp.zeros(len(parts))))
            return Exchanged(average, unsent, scales, [error[0] for error in server], finite)

        def exchanged() -> Exchanged:
            owned = [error[0] for error in server]
            return exchange(own(), owned, counted, self.axis, feedback=self.error_feedback)

        if not gradients:
            frozen, norms = self._frozen(state, count, jnp.zeros(()))
            held = {name: getattr(state, name) for name in _TREES}
            finite = jnp.ones((), bool)
            return Moments(count, frozen, state.still, norms, **held, finite=finite)
        devices = lax.axis_size(self.axis)
        parts = [part_size(g.size, devices) for g in gradients]
        # Nothing of the state comes out of the branches but what is owned: it would be another
        # buffer for each array, where what is computed of one number at a time goes in place.
        found = lax.cond(warm, averaged, exchanged)
        errors = [
            jnp.where(warm, e, sent_error(x, bits, scale, mask)[None])
            for e, x, bits, scale, mask in zip(
                worker, own(), found.sent, found.scales, counted, strict=True
            )
        ]
        averages = found.averages
        mu = [
            jnp.where(warm, self.b1 * m + (1 - self.b1) * a, a * size)
            for m, a, size in zip(mu, averages, sizes, strict=True)
        ]
        nu = [
            jnp.where(warm, self.b2 * v + (1 - self.b2) * a**2, v)
            for v, a in zip(nu, averages, strict=True)
        ]
        total = sum((v.sum() for v in nu), jnp.zeros(())) if self.window else jnp.zeros(())
        frozen, norms = self._frozen(state, count, total)
        owned = [error[None] for error in found.owned_errors]
        new = map(tree.unflatten, (mu, nu, errors, owned))
        trees: dict[str, Any] = dict(zip(_TREES, new, strict=True))
        still = lax.cond(
            warm & (frozen > 0),
            lambda: sum((jnp.sum(v == 0, dtype=jnp.int32) for v in nu), jnp.zeros((), jnp.int32)),
            lambda: state.still,
        )
        return Moments(count, frozen, still, norms, **trees, finite=found.finite)

    def ratio(self, moments: Any, m: jax.Array, v: jax.Array) -> jax.Array:
        """Adam's step of one array, before the learning rate."""
        seen = jnp.where(moments.frozen > 0, moments.frozen, moments.count)
        return m / (1 - self.b1 ** moments.count.astype(jnp.float32)) / self.size(v, seen)

    def size(self, v: jax.Array, steps: jax.Array) -> jax.Array:
        """What momenta are divided by: √v̂ + eps, of a variance after so many steps."""
        return jnp.sqrt(v / (1 - self.b2 ** steps.astype(jnp.float32))) + self.eps

    def held(self, state: Any, moments: Moments, **more: Any) -> dict[str, Any]:
        """The fields of the next state: those of the last, where the step is skipped."""
        new = moments._asdict() | more
        finite = new.pop("finite")
        old = {name: getattr(state, name) for name in new}
        kept = jax.tree.map(functools.partial(jnp.where, finite), new, old)
        return kept | {"skipped": state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32)}

    def _frozen(self, state: Any, count: jax.Array, total: jax.Array) -> tuple[Any, Any]:
        """The step of the last variance, or 0, and the sums of those before; `total` is its own."""
        if self.warmup_steps is not None:
            ends, norms = count >= self.warmup_steps, state.norms
        else:
            place = state.count % self.window
            before = state.norms[place]
            norm = total / (1 - self.b2 ** count.astype(jnp.float32))
            settled = jnp.minimum(before, norm) >= self.stability * jnp.maximum(before, norm)
            ends = settled & (norm > 0) & (count > max(self.window, self.check_after))
            norms = state.norms.at[place].set(norm)
        warm = state.frozen == 0
        frozen = jnp.where(warm, jnp.where(ends, count, 0), state.frozen)
        return frozen, jnp.where(warm, norms, state.norms)

    def _devices(self) -> tuple[int, int]:
        """How many devices there are, and of how many `init` makes the errors here."""
        try:
            devices = lax.axis_size(self.axis)
            rows = 1
        except NameError:
            mesh = jax.sharding.get_abstract_mesh()
            axes = (self.axis,) if isinstance(self.axis, str) else self.axis
            if not set(axes) <= set(mesh.axis_names):
                raise ValueError(
                    f"{self.name}: no device axis {self.axis!r} is known here, so it is not known "
                    "for how many devices the errors are; make the state by jaxmem.one_bit_step("
                    "loss, optimizer, mesh=mesh).init(params), or call init inside jax.shard_map "
                    "over that axis or under jax.set_mesh"
                ) from None
            devices = rows = 1
            for axis in axes:
                devices *= mesh.shape[axis]
            rows = devices
        self._check_several(devices)
        return devices, rows

    def _check_several(self, devices: int) -> None:
        if devices == 1:
            plain = "optax.lamb" if self.name == "one_bit_lamb" else "optax.adamw"
            raise ValueError(
                f"{self.name} sends signs between the devices of {self.axis!r}, and there is one; "
                f"pass a mesh in which it has several, or train with {plain}, which needs no "
                "errors in its state"
            )

    def _varying(self, array: jax.Array) -> jax.Array:
        """The array, held by each device for itself."""
        try:
            index = lax.axis_index(self.axis)
        except NameError:
            return array
        return _jax.as_varying(array, _jax.varying(index))

    def _check_state(self, updates: Any, state: Any) -> None:
        """Raises `ValueError` where a step cannot be taken."""
        try:
            devices = lax.axis_size(self.axis)
        except NameError:
            raise ValueError(
                f"{self.name}: update averages over the devices of {self.axis!r}, and is called "
                "outside of jax.shard_map over that axis; call it inside, with each device's own "
                "gradients, or let jaxmem.one_bit_step(loss, optimizer, mesh=mesh) do so"
            ) from None
        self._check_several(devices)
        check_floating(self.name, updates)
        found = difference(state.mu, updates, ("the state", "the gradient"))
        if found:
            raise ValueError(
                f"{self.name}: the state is not of these parameters: {found}; pass the state that "
                "init made of them"
            )
        tracked = _jax.varying(lax.axis_index(self.axis))
        named = zip(leaf_names(updates), jax.tree.leaves(updates), strict=True)
        for (name, leaf), worker, server in zip(
            named, *map(jax.tree.leaves, (state.worker_error, state.server_error)), strict=True
        ):
            wanted = (1, *leaf.shape), (1, part_size(leaf.size, devices))
            if (worker.shape, server.shape) != wanted:
                raise ValueError(
                    f"{self.name}: the errors of {name} are {described(worker)} and "
                    f"{described(server)} on a device, and not {list(wanted[0])} and "
                    f"{list(wanted[1])}: the state is of another number of devices than {devices}, "
                    "or not split; pass it by jaxmem.redistribute_errors(state, devices), and into "
                    "jax.shard_map with the specs of jaxmem.one_bit_specs(state)"
                )
            if not tracked <= _jax.varying(leaf):
                raise ValueError(
                    f"{self.name}: the gradient of {name} is the same on all devices already: "
                    "jax.shard_map sums gradients of parameters that are, unless it is called with "
                    "check_vma=False; pass that, or let jaxmem.one_bit_step do so"
                )


_TREES = ("mu", "nu", "worker_error", "server_error")


def check_number(name: str, what: str, value: Any, least: float, below: float = jnp.inf) -> None:
    """Raises `TypeError` or `ValueError` for what is no number, or in another range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: {what} must be a number, got {described(value)}")
    if not least <= value < below:
        limit = "" if below == jnp.inf else f" and less than {below:g}"
        raise ValueError(f"{name}: {what} must be at least {least:g}{limit}, got {value}")


def check_params(name: str, params: Any) -> None:
    """Raises `ValueError` where there are none."""
    if params is None:
        raise ValueError(
            f"{name}: the update depends on the parameters; pass them to update as the third "
            "argument"
        )


def check_floating(name: str, tree: Any) -> None:
    """Raises `TypeError` for an array that has no signs, by its path."""
    for path, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"{name}: {path} is {described(leaf)}, and signs are sent of real floating-point "
                "numbers; leave it out by optax.masked, or train its real and imaginary part"
            )
