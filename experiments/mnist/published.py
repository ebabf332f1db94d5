"""What was published of this net, and what that says of how it was measured.

The figures are those of a post, "Gradient Checkpoint" (in Chinese), with PyTorch's
`checkpoint_sequential`; section 6 of the project's list of references has them.  Neither
batch size, optimizer nor hardware is told.

They are not of training the whole net.  `checkpoint_sequential` was called on the images, which
need no gradient, and in its reentrant mode, the only one there was, a checkpoint none of whose
inputs needs a gradient gives none to its parameters.  So nothing but the last segment, which is
not under a checkpoint, was trained: of 101 convolutions 101, 50, 25, 14, 10 and 7 for 1, 2, 4,
8, 16 and 32 segments (seen so with PyTorch 2.13, which warns of it).  With 32 segments 580 MB
are also less than the 737 MB of the parameters and their gradient.
"""

import math

import jax

from mnist.net import SIDE, cut, modules, parameters

# Megabytes by the number of segments, 0 for no checkpoint.
MEGABYTES = {0: 1139, 1: 1069, 2: 854, 4: 686, 8: 609, 16: 590, 32: 580}
DEPTH, WIDTH = 100, 320

# ---------------------------------------------------------------- API


def trained(segments: int, depth: int = DEPTH) -> int:
    """Convolutions that had a gradient."""
    last = cut(modules(depth), max(segments, 1))[-1]
    return sum(kind == "conv" for kind, _ in last)


def images() -> tuple[float, float]:
    """The least and the most images of a batch that the figures agree with.

    Most: with no checkpoint there is nothing in memory but parameters, their gradient and what
    PyTorch keeps.  Least: between 1 segment and 32 nothing falls but gradients and what is kept.
    """
    leaves = jax.tree.leaves(parameters(DEPTH, WIDTH)["convs"])
    params = sum(4 * math.prod(leaf.shape) for leaf in leaves)
    convs = DEPTH + 1
    most = (MEGABYTES[0] * 1e6 - 2 * params) / kept(0)
    without_gradient = params * (1 - trained(32) / convs)
    fell = (MEGABYTES[1] - MEGABYTES[32]) * 1e6 - without_gradient
    least = fell / (kept(0) - kept(convs - trained(32)))
    return least, most


def kept(first: int) -> int:
    """Bytes that PyTorch keeps of an image from a convolution on, for the backward pass."""
    total, side = 0, SIDE
    for k in range(DEPTH + 1):
        given = side**2 * (4 if k == 0 else 4 * WIDTH)
        side += 2
        pooled = side // 2
        # Of relu the result, of pooling its argument, which is the same, and where maxima were.
        made = 0 if k == 0 else WIDTH * (4 * side**2 + 8 * pooled**2)
        total += given + made if k >= first else 0
        side = pooled if k else side
    return total
