"""Which devices a collective joins, and over which axes of the mesh that is.

Compilers write the groups in four ways: as lists; as a reshape and a transpose of 0, 1, 2, …
(the form of GSPMD's V2 shardings); as axes of a mesh of the compiler's own, whose names are not
the user's; and as nothing, for all devices.  All become lists here, and the user's axes are found
by comparing these with the coordinates of the devices in the user's mesh.
"""

import itertools
import math
import re
from collections.abc import Sequence

Groups = tuple[tuple[int, ...], ...]
Mesh = Sequence[tuple[str, int]]

# ---------------------------------------------------------------- API


def replica_groups(attributes: str, devices: int) -> Groups:
    """The groups in the attributes of a collective.

    Args:
      devices: how many the program runs on.

    >>> replica_groups("replica_groups={{0,2},{1,3}}, dimensions={0}", 4)
    ((0, 2), (1, 3))
    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> replica_groups("replica_groups=mesh['x'=2,'y'=2] {'x'}", 4)
    ((0, 2), (1, 3))
    >>> replica_groups("replica_groups={}", 4)
    ((0, 1, 2, 3),)
    """
    every = (tuple(range(devices)),)
    if match := _LISTS.search(attributes):
        lists = [_numbers(part) for part in re.findall(r"\{([\d, ]*)\}", match[1])]
        groups = tuple(group for group in lists if group)
        return groups or every
    if match := _IOTA.search(attributes):
        count, size = _numbers(match[1])
        return _cut(_arranged(match[2], match[3]), count, size)
    if match := _AXES.search(attributes):
        return _of_axes(match)
    return every


def pairs(attributes: str) -> Groups:
    """The pairs of sender and receiver of a permutation.

    >>> pairs("channel_id=1, source_target_pairs={{0,1},{1,0}}")
    ((0, 1), (1, 0))
    """
    match = _PAIRS.search(attributes)
    return tuple(_numbers(part) for part in re.findall(r"\{([\d, ]+)\}", match[1])) if match else ()


def axes_of(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh over which groups are whole; () if the groups are of no such form.

    >>> axes_of(((0, 2), (1, 3)), (("data", 2), ("model", 2)))
    ('data',)
    >>> axes_of(((0, 1, 2, 3),), (("data", 2), ("model", 2)))
    ('data', 'model')
    >>> axes_of(((0, 1), (2, 3)), (("data", 4),))
    ()
    """
    found = {_varying(group, mesh) for group in groups}
    if len(found) != 1:
        return ()
    axes = found.pop()
    sizes = dict(mesh)
    whole = math.prod(sizes[axis] for axis in axes)
    return axes if all(len(set(group)) == whole for group in groups) else ()


def axes_along(sent: Groups, mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh along which pairs of a permutation differ.

    >>> axes_along(((0, 1), (1, 0), (2, 3), (3, 2)), (("data", 2), ("model", 2)))
    ('model',)
    """
    different = {axis for pair in sent for axis in _varying(pair, mesh)}
    return tuple(axis for axis, _ in mesh if axis in different)


# ---------------------------------------------------------------- implementation

_LISTS = re.compile(r"\breplica_groups=\{((?:\{[\d, ]*\},? ?)*)\}")
_IOTA = re.compile(r"\breplica_groups=\[(\d+,\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXES = re.compile(
    r"\breplica_groups=@?mesh\[([^\]]*)\](?:, ?device_ids=\((.*?)\)(?= ?\{))? ?\{([^}]*)\}"
)
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{[\d, ]*\},? ?)*)\}")
_AXIS = re.compile(r"'([^']*)'=(\d+)")
# A part of an axis: 'x':(2)4 has 4 positions, each 2 times as many as come before it.
_PART = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _arranged(dims: str, order: str | None) -> tuple[int, ...]:
    """0, 1, 2, … in the form of `dims`, transposed, and flat again."""
    lengths = _numbers(dims)
    axes = _numbers(order) if order else tuple(range(len(lengths)))
    strides = _strides(lengths)
    ranges = [range(0, lengths[axis] * strides[axis], strides[axis]) for axis in axes]
    return tuple(sum(place) for place in itertools.product(*ranges))


def _strides(lengths: Sequence[int]) -> list[int]:
    return [math.prod(lengths[k + 1 :]) for k in range(len(lengths))]


def _cut(flat: Sequence[int], count: int, size: int) -> Groups:
    return tuple(tuple(flat[k * size : (k + 1) * size]) for k in range(count))


def _of_axes(match: re.Match[str]) -> Groups:
    mesh = [(name, int(size)) for name, size in _AXIS.findall(match[1])]
    devices = _device_ids(match[2], math.prod(size for _, size in mesh))
    joined, kept = [], []
    parts = {name: (int(before or 1), size) for name, before, size in _PART.findall(match[3])}
    for (name, size), stride in zip(mesh, _strides([size for _, size in mesh]), strict=True):
        before, own = parts.get(name, (size, "1"))
        length = int(own) if own else size
        # An axis is what is before the part, the part itself, and what is behind it.
        behind = size // (before * length)
        kept.append(range(0, before * length * behind * stride, length * behind * stride))
        joined.append(range(0, length * behind * stride, behind * stride))
        kept.append(range(0, behind * stride, stride))
    starts = [sum(place) for place in itertools.product(*kept)]
    steps = [sum(place) for place in itertools.product(*joined)]
    return tuple(tuple(devices[start + step] for step in steps) for start in starts)


def _device_ids(text: str | None, count: int) -> tuple[int, ...]:
    """The devices of a mesh in its order: 0, 1, 2, … where the text has none."""
    if not text:
        return tuple(range(count))
    if form := re.search(r"(?:<=)?\[([\d,]+)\](?:T\(([\d,]+)\))$", text):
        return _arranged(form[1], form[2])
    listed = _numbers(re.sub(r"^\[[\d,]*\]", "", text))
    return listed if len(listed) == count else tuple(range(count))


def _varying(group: Sequence[int], mesh: Mesh) -> tuple[str, ...]:
    """The axes along which devices of a group have different coordinates."""
    strides = _strides([size for _, size in mesh])
    return tuple(
        name
        for (name, size), stride in zip(mesh, strides, strict=True)
        if len({device // stride % size for device in group}) > 1
    )
