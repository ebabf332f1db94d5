"""What a collective sends and how long it takes, by the ring algorithms.

Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002: in a group of n devices each
sends (n-1)/n of the array, in n-1 steps; an all-reduce goes round twice.
"""

# ---------------------------------------------------------------- API


def ring_bytes(kind: str, size: int, devices: int) -> int:
    """What one device of a group sends.

    Args:
      kind: HLO's name of the collective.
      size: bytes of the array: of an all-gather the result, of all others what goes in.
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    return _rounds(kind) * size * (devices - 1) // devices


def ring_seconds(kind: str, sent: int, devices: int, link: tuple[float, float]) -> float:
    """Seconds of a collective in which one device sends so many bytes.

    Args:
      link: bytes per second that a device sends to the next one, and seconds of one step.
    """
    bandwidth, latency = link
    return sent / bandwidth + _rounds(kind) * (devices - 1) * latency


# ---------------------------------------------------------------- implementation


def _rounds(kind: str) -> int:
    return 2 if kind == "all-reduce" else 1
