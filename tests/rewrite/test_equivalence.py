"""Every policy gives the numbers of the plain scan: results, ys and all gradients, bit for bit.

Pairs of (model, policy) and of (policy, length) are all covered, triples are
not: each model has two of the lengths, for every other policy.  The quick run
has one of the two, and with it a policy of each kind.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.menagerie import (
    MODELS,
    NOT_EXACT,
    Loss,
    Problem,
    assert_close,
    assert_same,
    differentiate,
    exact_jit,
    jit_as_users,
)
from jax import lax

import jaxmem
from jaxmem import Plan, Policy, policies

pytestmark = [
    pytest.mark.usefixtures("strict"),
    pytest.mark.filterwarnings("ignore::jaxmem.errors.OffloadWarning"),
]

LENGTHS = (1, 2, 3, 7, 16, 61, 64)

POLICIES: dict[str, Callable[[int], Policy | Plan]] = {
    "none": lambda n: policies.none(),
    "full": lambda n: policies.full(),
    "dots": lambda n: policies.dots(),
    "dots_no_batch": lambda n: policies.dots_no_batch(),
    "names": lambda n: policies.names(save="kept"),
    "names|dots": lambda n: policies.names(save="kept") | policies.dots(),
    "sqrt": lambda n: policies.sqrt(),
    "sqrt levels=2": lambda n: policies.sqrt(levels=2),
    "sqrt levels=3": lambda n: policies.sqrt(levels=3),
    "sqrt segments=4": lambda n: policies.sqrt(segments=4),
    "sqrt segments=3,2": lambda n: policies.sqrt(segments=(3, 2)),
    "revolve slots=1": lambda n: policies.revolve(1),
    "revolve slots=2": lambda n: policies.revolve(2),
    "revolve slots=3": lambda n: policies.revolve(3),
    "revolve slots=8": lambda n: policies.revolve(8),
    "offload": lambda n: policies.offload(),
    "offload names": lambda n: policies.offload("kept"),
    "Plan.full": lambda n: Plan.full(n),
    "Plan.periodic": lambda n: Plan.periodic(n),
    "Plan.revolve": lambda n: Plan.revolve(n, slots=4),
}


def _cases(quick: bool) -> list[tuple[str, int, str]]:
    cases = []
    for k, model in enumerate(MODELS):
        for j, policy in enumerate(POLICIES):
            # A Plan is for one length, and the two stacks differ in theirs.
            if model == "two_stacks" and policy.startswith("Plan"):
                continue
            if quick == (j % 2 == k % 2):
                cases.append((model, LENGTHS[(k + 3 * (j % 2)) % len(LENGTHS)], policy))
    return cases


QUICK, SLOW = _cases(quick=True), _cases(quick=False)


@functools.cache
def _problem(model: str, n: int) -> Problem:
    return MODELS[model].make(n)


@functools.cache
def _expected(model: str, n: int) -> Any:
    return _run(model, n, _problem(model, n).loss)


_RESULTS: dict[tuple[str, int, str], Any] = {}


def _run(model: str, n: int, loss: Loss) -> Any:
    """Outputs and gradients; a program that was run before is not compiled again."""
    at = _problem(model, n)
    lowered = exact_jit(differentiate(loss)).lower(at.params, at.inputs)
    program = model, n, lowered.as_text()
    if program not in _RESULTS:
        _RESULTS[program] = lowered.compile()(at.params, at.inputs)
    return _RESULTS[program]


@pytest.mark.parametrize(
    ("model", "n", "policy"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_numbers_are_those_of_the_plain_scan(model: str, n: int, policy: str) -> None:
    expected = _expected(model, n)
    actual = _run(model, n, jaxmem.remat(_problem(model, n).loss, POLICIES[policy](n)))
    if model in NOT_EXACT:
        assert_close(actual, expected)
    else:
        assert_same(actual, expected)


def test_every_policy_meets_every_length() -> None:
    met = {(policy, n) for _, n, policy in QUICK + SLOW}
    assert met == {(policy, n) for policy in POLICIES for n in LENGTHS}


def test_constant_read_twice(getkey: Any) -> None:
    x = jax.random.normal(getkey(), (5,))
    ws = jax.random.normal(getkey(), (7, 5))

    def map_with(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def total(x: Any, ws: Any) -> Any:
            layer = checkpoint(lambda w: x + jnp.square(x * w))
            return lax.scan(lambda _, w: (None, layer(w)), None, ws)[1].sum()

        return total

    plain, by_hand = (
        map_with(lambda f: f),
        map_with(functools.partial(jax.checkpoint, prevent_cse=False)),
    )
    expected, kept = (exact_jit(jax.grad(fn))(x, ws) for fn in (by_hand, plain))
    for policy in (policies.full(), policies.sqrt(segments=2), policies.revolve(slots=2)):
        found = exact_jit(jax.grad(jaxmem.remat(plain, policy)))(x, ws)
        assert_same(found, expected)
        assert_close(found, kept)


# The options of `exact_jit` are for the eyes of a test.  As a user compiles,
# fusion may round otherwise, with jax.checkpoint as with us.
@pytest.mark.parametrize("policy", ["sqrt segments=4", "revolve slots=3"])
@pytest.mark.parametrize("model", ["mlp", "rnn", "tuple_carry", "conv_batch_norm"])
def test_numbers_with_the_compiler_left_alone(model: str, policy: str) -> None:
    loss = jaxmem.remat(_problem(model, 7).loss, POLICIES[policy](7))
    assert_close(_as_users(model, loss), _expected_as_users(model))


def _as_users(model: str, loss: Loss) -> Any:
    at = _problem(model, 7)
    return jit_as_users(differentiate(loss))(at.params, at.inputs)


@functools.cache
def _expected_as_users(model: str) -> Any:
    return _as_users(model, _problem(model, 7).loss)


# ---------------------------------------------------------------- jaxmem.scan


def _layer(carry: Any, x: Any) -> Any:
    h, count = carry
    w = x["w"] if x is not None else jnp.float32(0.9)
    h = jnp.sin(h * w) + h
    return (h, count + 1), {"h": h.sum(), "count": count}


@functools.cache
def _scanned(policy: str | None, n: int) -> Any:
    """Of `lax.scan`, or of ours with a policy."""
    scan = functools.partial(jaxmem.scan, remat=POLICIES[policy](n)) if policy else lax.scan

    def total(ws: Any, h: Any) -> Any:
        out = scan(_layer, (h, jnp.int32(0)), ws, reverse=True, unroll=2)
        return out[0][0].sum() + out[1]["h"].sum(), out

    ws = {"w": jnp.linspace(0.5, 1.5, n)}
    return exact_jit(jax.value_and_grad(total, (0, 1), has_aux=True))(ws, jnp.ones(3))


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("policy", [name for name in POLICIES if "names" not in name])
def test_scan_is_a_drop_in(policy: str, n: int) -> None:
    assert_same(_scanned(policy, n), _scanned(None, n))
