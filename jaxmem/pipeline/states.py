"""What a microbatch leaves for the next one, and where in a pipeline it is.

In a pipeline a microbatch enters the first stage while the one before is in later stages.  So a
value that goes from one to the next has to have a place on the way where both come by in turn:

* "before": its new value does not depend on the layers.  It is computed before the pipeline runs,
  microbatch by microbatch, and every stage has the values of all microbatches.
* "layers": each layer reads its row and makes the new one, as batch statistics in stacked layers.
  Each stage holds the rows of its layers.
* "after": it is read only after the layers.  The last stage holds it.

Anything else would make the first layer wait for the last one of the microbatch before.
"""

import dataclasses
from collections.abc import Sequence

from jaxmem.pipeline.cut import Cut, State

# ---------------------------------------------------------------- API


def with_states(cut: Cut, pairs: Sequence[tuple[int, int, str]], label: str) -> Cut:
    """A cut function that knows where values are that go from microbatch to microbatch.

    Args:
      cut: the function.
      pairs: operand and flat result of each, and what it is called in messages.

    Raises:
      ValueError: one has no place.
    """
    jaxpr = cut.closed.jaxpr
    found = {number: _first(cut, number, out) for number, out, _ in pairs}
    names = {number: name for number, _, name in pairs}
    into_layers = cut.reads(cut.eqn.invars)
    late = {number for number, state in found.items() if state.kind == "after"}
    for state in [*found.values()] * len(found):  # what follows from a late one is late itself
        if state.kind == "before" and cut.reads([jaxpr.outvars[state.out]]) & late:
            found[state.number] = dataclasses.replace(state, kind="after")
            late.add(state.number)
    for number in sorted(late & into_layers):
        raise ValueError(
            f"{label} reads {names[number]} before its last layer, and what the next microbatch "
            "gets for it depends on the layers: the first stage would wait for the last one of the "
            "microbatch before. A pipeline takes state that each layer reads and changes for "
            "itself, stacked along its leading axis as a parameter of the layers is (linen: "
            'variable_axes={"batch_stats": 0}), state that is made without the layers, and state '
            "that is read after them"
        )
    states = tuple(found.values())
    changing = {state.number for state in states if state.kind != "same"}
    return dataclasses.replace(cut, own=cut.own | changing, states=states)


# ---------------------------------------------------------------- implementation


def _first(cut: Cut, number: int, out: int) -> State:
    jaxpr = cut.closed.jaxpr
    var, atom = jaxpr.invars[number], jaxpr.outvars[out]
    if atom is var:
        return State(number, out, "same")
    ys = cut.body.split_out(cut.eqn.outvars)[1]
    readers = [at for at, eqn in enumerate(jaxpr.eqns) if any(x is var for x in eqn.invars)]
    xs = [k for k, x in enumerate(cut.xs) if x is var]
    places = sum(x is var for x in cut.eqn.invars)
    is_returned = any(x is var for x in jaxpr.outvars)
    made = [k for k, y in enumerate(ys) if y is atom]
    if readers == [cut.at] and len(xs) == places == 1 and made and not is_returned:
        return State(number, out, "layers", xs[0], made[0])
    return State(number, out, "after" if cut.depends([out]) else "before")
