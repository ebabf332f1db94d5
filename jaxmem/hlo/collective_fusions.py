"""Collectives inside of a TPU's fusions, which are not what their opcodes say.

Its compiler runs a collective beside other work as a chain of fusions: one that starts it, some
that do a part of it next to a product, and one that ends it.  Each holds the same instruction, with
the same channel and the same `chain_id`.  And it has no reduce-scatter, but a fusion of an
all-reduce and of the slice that a device keeps.
"""

import re

from jaxmem.hlo.text import Instruction, Module

# ---------------------------------------------------------------- API


def is_continued(module: Module, instruction: Instruction) -> bool:
    """Whether it is a later step of a collective that a chain of fusions runs beside other work."""
    in_chain = "async_collective_fusion_config" in instruction.attributes and _marks(instruction)
    return bool(in_chain) and _used_by(module, instruction, "AsyncCollectiveStart") is None


def end_of_chain(module: Module, instruction: Instruction) -> Instruction | None:
    """What gives the value of a collective that a chain runs; None where none does."""
    if not (marks := _marks(instruction)):
        return None
    chain = (i for i in module.instructions.values() if _marks(i) == marks)
    ends = (_used_by(module, one, "AsyncCollectiveDone") for one in chain)
    return next(filter(None, ends), None)


def is_scattered(module: Module, instruction: Instruction, number: int, count: int) -> bool:
    """Whether a fusion keeps nothing of an all-reduce but slices, each for one device."""
    home = module.home[instruction.name]
    if not any(caller.opcode == "fusion" for caller in module.callers.get(home, ())):
        return False
    users = [user for user, _ in module.users.get(instruction.name, ())]
    if count > 1:
        taken = [u for u in users if u.opcode == "get-tuple-element" and u.number == number]
        users = [user for one in taken for user, _ in module.users.get(one.name, ())]
    while users and all(user.opcode == "bitcast" for user in users):
        users = [user for one in users for user, _ in module.users.get(one.name, ())]
    return bool(users) and all(user.opcode == "dynamic-slice" for user in users)


# ---------------------------------------------------------------- implementation

_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_CHAIN = re.compile(r'\bchain_id="([^"]*)"')


def _marks(instruction: Instruction) -> tuple[str, ...]:
    """The channel and the chain; () for what is in none."""
    if "chain_id=" not in instruction.attributes:
        return ()
    marks = (_CHANNEL.search(instruction.attributes), _CHAIN.search(instruction.attributes))
    return tuple(mark[1] for mark in marks if mark)


def _used_by(module: Module, instruction: Instruction, target: str) -> Instruction | None:
    users = (user for user, _ in module.users.get(instruction.name, ()))
    return next((user for user in users if user.target == target), None)
