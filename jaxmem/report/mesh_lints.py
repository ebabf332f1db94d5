"""What a sharding costs by accident: gathered stacks, whole optimizer states, repeated collectives.

The partitioner carries out whatever shardings are given, and says nothing of what it
inserts for that.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxmem._util.text import size
from jaxmem.compile.compiling import Compiled
from jaxmem.compile.program import Argument, Program
from jaxmem.estimate.costs import Costs
from jaxmem.hlo.collectives import Collective
from jaxmem.report.report import Lint

# Below these shares a thing is not worth a reader's time: of what is required, and of what is sent.
_MEMORY = 0.05
_SENT = 0.05
_FLOATS = ("float", "bfloat", "int8", "uint8")  # states in 8 bits, too

# ---------------------------------------------------------------- API


def gathered_stacks(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    """A whole stack of layers that is gathered before its loop, or again for each layer."""
    for one in _collectives(compiled):
        argument = _argument(program, compiled, one)
        if one.kind != "all-gather" or not one.of_stack:
            continue
        # Inside of a loop a segment of the layers may be gathered for good reason.
        if one.in_loop and (argument is None or one.shape != _long(argument.shape)):
            continue
        if one.bytes <= _MEMORY * _required(compiled):
            continue
        name = argument.name if argument else one.name
        where = f"in each of {one.times} iterations" if one.in_loop else "outside of its loop"
        fact = (
            f"the whole stack {name}, {one.dtype}[{','.join(map(str, one.shape))}], is gathered "
            f"over {one.over} {where}{_at(one)}: {size(one.bytes)} on every device at once"
        )
        layers = argument.split[0] if argument and argument.split else ()
        if layers:
            yield Lint(
                "stack-gathered",
                f"{fact}, since its axis of layers is split over {_listed(layers)}, and each layer "
                "is on other devices than the next",
                f"split another axis of {name}: with None in the first place of its PartitionSpec "
                "the loop gathers one layer at a time",
            )
        else:
            yield Lint(
                "stack-gathered",
                f"{fact}; a sharding constraint on the stack, or an operation that needs all of "
                "it, asks for that",
                f"constrain the slice of {name} inside of the loop's body, where one layer is "
                "gathered at a time, and pass the stack on as it is split",
            )


def whole_states(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    """Leaves of an optimizer's state of which several devices hold the same."""
    if compiled.devices == 1 or compiled.analysis is None:
        return
    held = _Held(program, compiled)
    along: dict[str, list[_State]] = {}
    for state in held.states():
        along.setdefault(state.cause, []).append(state)
    for cause, states in along.items():
        saved = sum(state.saved for state in states)
        if saved <= _MEMORY * _required(compiled):
            continue
        largest = max(states, key=lambda state: state.saved)
        others = f" and {len(states) - 1} more" if len(states) > 1 else ""
        is_split = largest.parameter is not None and largest.of_split_parameter
        remedy = (
            f"split {largest.name} as {largest.parameter} is: state = jax.jit(optimizer.init, "
            "out_shardings=...)(params), or jax.device_put(state, ...)"
            if is_split
            else f"split {largest.name} over the axis of the batch, which is ZeRO's stage 1: "
            "jaxmem.Zero(1, mesh=mesh).init(optimizer, params), or shardings of your own for it"
        )
        yield Lint(
            "state-replicated",
            f"{size(sum(state.bytes for state in states))} of optimizer state on each device "
            f"({largest.name}{others}) are the same on {largest.copies} devices, {cause}",
            f"{remedy}; saves {size(saved)} on each device",
        )


def repeated_collectives(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    """Collectives that only recomputation asks for."""
    every = _collectives(compiled)
    repeated = [c for c in every if c.recomputed]
    sent, again = (sum(c.total_bytes for c in some) for some in (every, repeated))
    if not repeated or again <= _SENT * sent:
        return
    worst = max(repeated, key=lambda c: c.total_bytes)
    others = f" and {len(repeated) - 1} more" if len(repeated) > 1 else ""
    argument = _argument(program, compiled, worst)
    name = argument.name if argument else worst.name.partition(" ")[0]
    behind = (
        f"keep the product that reads {name}: then recomputation needs no {name}"
        if argument
        else "keep the value behind it"
    )
    where = "the product" if argument else "the sum or the gather"
    yield Lint(
        "collective-repeated",
        f"recomputation repeats {worst.times} × {worst.kind} over {worst.over} of "
        f"{name}{_at(worst)}{others}: {size(again)} of the {size(sent)} that each device sends in "
        "one call",
        f"{behind}; give it a name with jax.ad_checkpoint.checkpoint_name after {where}, and keep "
        'that with the policy "names" (save=...); jaxmem.fit weighs that against the memory',
    )


# ---------------------------------------------------------------- implementation


def _collectives(compiled: Compiled) -> tuple[Collective, ...]:
    return () if compiled.analysis is None else compiled.analysis.collectives


def _required(compiled: Compiled) -> int:
    stats = {key: value or 0 for key, value in compiled.stats.items()}
    parts = ("argument_bytes", "output_bytes", "temp_bytes")
    return sum(stats.get(part, 0) for part in parts) - stats.get("alias_bytes", 0)


def _argument(program: Program, compiled: Compiled, one: Collective) -> Argument | None:
    if one.parameter is None or one.parameter >= len(compiled.kept):
        return None
    return program.arguments[compiled.kept[one.parameter]]


def _at(one: Collective) -> str:
    return f" ({one.source})" if one.source else ""


def _long(shape: Sequence[int]) -> tuple[int, ...]:
    """Without dimensions of length 1, as the shapes of collectives are."""
    return tuple(length for length in shape if length != 1)


def _listed(axes: Sequence[str]) -> str:
    return " and ".join(axes)


@dataclasses.dataclass(frozen=True)
class _State:
    """A leaf of an optimizer's state of which several devices hold the same.

    Attributes:
      bytes: on each device.
      copies: how many devices hold the same.
      saved: bytes on each device, were it split over them.
      parameter: the path of the parameter that it belongs to.
      cause: why, in words.
    """

    name: str
    bytes: int
    copies: int
    saved: int
    parameter: str | None
    of_split_parameter: bool
    cause: str


class _Held:
    """What each device holds of the arguments, by what the compiler allocates for them."""

    def __init__(self, program: Program, compiled: Compiled) -> None:
        assert compiled.analysis is not None
        self._devices = compiled.devices
        sizes = compiled.analysis.parameter_bytes
        self._ways: dict[str, int] = {}
        self._here: dict[str, int] = {}
        for number, index in enumerate(compiled.kept):
            argument = program.arguments[index]
            # Padding makes the parts a little larger.
            if here := sizes.get(number, 0):
                self._here[argument.name] = here
                self._ways[argument.name] = max(1, round(argument.bytes / here))
        self._arguments = [a for a in program.arguments if a.name in self._here]
        self._parameters = [a for a in self._arguments if a.is_parameter]

    def states(self) -> Iterator[_State]:
        for argument in self._arguments:
            if argument.field is None or argument.memory_kind is not None or not argument.shape:
                continue
            if not argument.dtype.startswith(_FLOATS):
                continue
            ways, here = self._ways[argument.name], self._here[argument.name]
            parameter = self._parameter(argument)
            wanted = self._ways[parameter.name] if parameter else 1
            is_split = wanted > ways
            copies = (wanted if is_split else self._devices) // ways
            if copies < 2 or not _divisible(argument, copies):
                continue
            yield _State(
                name=argument.name,
                bytes=here,
                copies=copies,
                saved=here - here // copies,
                parameter=parameter and parameter.name,
                of_split_parameter=is_split,
                cause=_cause(parameter, wanted, ways),
            )

    def _parameter(self, state: Argument) -> Argument | None:
        """The parameter in whose path the state's path ends, and which has its shape."""
        alike = [p for p in self._parameters if p.shape == state.shape]
        ending = [p for p in alike if state.name.endswith(f"/{p.name.partition('/')[2]}")]
        alone = alike if len(alike) == 1 else []
        return max(ending, key=lambda p: len(p.name), default=next(iter(alone), None))


def _cause(parameter: Argument | None, wanted: int, ways: int) -> str:
    if parameter is None or wanted <= ways:
        return "which hold the same of the parameters, too, and split only the batch"
    over = dict.fromkeys(axis for axes in parameter.split or () for axis in axes)
    by = f"split over {_listed(tuple(over))}" if over else f"split in {wanted}"
    return (
        f"though its parameter is {by}: the state was made from whole parameters, or without "
        "shardings of its own"
    )


def _divisible(argument: Argument, copies: int) -> bool:
    """Whether a dimension that is not split yet can be, into equal parts."""
    split = argument.split or ((),) * len(argument.shape)
    pairs = zip(argument.shape, split, strict=True)
    return any(length % copies == 0 for length, axes in pairs if not axes)
