"""Messages of a compiler that does not compile: programs too large, and everything else.

A TPU's compiler refuses a program that is too large, and gives its size in one of
several forms.  That is a result, not an error.  Buffer assignment is complete by then,
so its table of buffers, where there is one, gives the same sum to the byte.
"""

import dataclasses
import re

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """How much a program would need, in bytes.

    Attributes:
      required: bytes of all buffers in this memory.
      available: size of the memory.
      space: which memory: "hbm", that of the device, or one on the chip, such as "vmem".
      message: the compiler's first line.
    """

    required: int
    available: int
    space: str
    message: str


# ---------------------------------------------------------------- API


def too_large(message: str) -> TooLarge | None:
    """The sizes in a compiler's refusal; None if it is not a refusal of that kind.

    >>> too_large(
    ...     "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
    ...     "temporaries (104.00G) exceeds available HBM (15.75G)."
    ... ).required // 2**30
    104
    """
    if not message.startswith("RESOURCE_EXHAUSTED"):
        return None
    for pattern in _PATTERNS:
        if match := pattern.search(message):
            found = match.groupdict()
            space = found.get("space") or _space_named_in(message)
            return TooLarge(
                _bytes(found["required"]),
                _bytes(found["available"]),
                space.casefold(),
                first_line(message),
            )
    return None


def is_defect(message: str) -> bool:
    """Whether a compiler met something that its authors took to be impossible.

    >>> is_defect("INTERNAL: RET_CHECK failure (xla/hlo/ir/hlo_instruction.cc:3699) ...")
    True
    """
    return message.startswith("INTERNAL")


def unassembled(message: str) -> bool:
    """Whether a GPU compiler had finished except for the last step, assembling machine code.

    That step needs NVIDIA's tools (ptxas, libdevice), 120 MB which nothing else here needs:
    buffer assignment is complete by then, and is the same with and without them.
    """
    return any(mark in message for mark in _NO_ASSEMBLER)


def avoiding(message: str) -> dict[str, bool] | None:
    """Compiler options with which a refusal that is a defect of the compiler is avoided, if known.

    >>> avoiding("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot = bf16[25216]")
    {'xla_gpu_enable_triton_gemm': False}
    """
    return next((dict(options) for mark, options in _DEFECTS if mark in message), None)


def stats_of(assignment: str, platform: str) -> dict[str, int | None]:
    """The compiler's sums, from its table of allocations, for a program that it refused.

    Memory spaces are identified by their colors: on a TPU all but two are on the chip.
    """
    sums = dict.fromkeys((f"{place}{kind}_bytes" for place in ("", "host_") for kind in _KINDS), 0)
    for size, color, rest in _ALLOCATION.findall(assignment):
        on_host = color == _HOST_COLOR
        if platform == "tpu" and color and not on_host:
            continue
        if "thread-local:" in rest or (platform == "gpu" and "constant:" in rest):
            continue  # space of an operation's inside, or counted with code
        is_argument, is_output = "parameter " in rest, "maybe-live-out" in rest
        for kind, counts in (
            ("argument", is_argument),
            ("output", is_output),
            ("alias", is_argument and is_output),
            ("temp", not is_argument and not is_output),
        ):
            sums[f"{'host_' * on_host}{kind}_bytes"] += int(size) * counts
    return {**sums, "code_bytes": 0, "peak_bytes": None}


def first_line(message: str) -> str:
    """The first line of a compiler's message with more than a status."""
    lines = [line.strip() for line in message.splitlines()]
    said = [line for line in lines if line and not _EMPTY.fullmatch(line)]
    return said[0] if said else message.strip()


# ---------------------------------------------------------------- implementation

_KINDS = ("argument", "output", "alias", "temp")
_HOST_COLOR = "5"
_NO_ASSEMBLER = ("libdevice not found", "No PTX compilation provider", "ptxas too old")
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (?:color (\d+), )?([^\n]*)", re.MULTILINE)
# Of an absent GPU kernels are not tuned, and the sizes of tiles that are taken unseen do not suit
# every shape; without Triton the product is a library's.
_DEFECTS = (("Couldn't find output tile sizes", {"xla_gpu_enable_triton_gemm": False}),)
_SIZE = r"\d+(?:\.\d+)?[KMGTP]?B?"
_PATTERNS = tuple(
    re.compile(pattern.replace("SIZE", _SIZE))
    for pattern in (
        # "Ran out of memory on HBM, the total memory required for HLO temporaries (20.00G)
        # exceeds available HBM (15.75G)"; the total has arguments and results in it.
        r"required for [\w ]+ \((?P<required>SIZE)\) exceeds available (?P<space>\w+) "
        r"\((?P<available>SIZE)\)",
        # "Ran out of memory in memory space vmem. Used 64.00M of 63.94M vmem."
        r"Used (?P<required>SIZE) of (?P<available>SIZE) (?P<space>\w+)",
        # "… in memory space vmem … Scoped allocation with size 64.00M and limit 16.00M"
        r"allocation with size (?P<required>SIZE) and limit (?P<available>SIZE)",
        # "Allocation (size=268435456) would exceed memory (size=134217728) :: … space=vmem"
        r"\(size=(?P<required>SIZE)\) would exceed memory \(size=(?P<available>SIZE)\)",
    )
)
# A line with only a status: "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:"
_EMPTY = re.compile(r"(?:[\w.]+:\s*)*")


def _space_named_in(message: str) -> str:
    match = re.search(r"memory space (\w+)|space=(\w+)", message)
    return next(filter(None, match.groups()), "") if match else ""


def _bytes(text: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+)([KMGTP]?)B?", text).groups()  # type: ignore[union-attr]
    return round(float(number) * 1024 ** (" KMGTP".index(unit) if unit else 0))
