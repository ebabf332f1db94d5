"""Which of jax's compilers for accelerators are installed, and whether their versions match."""

import functools
import importlib.metadata
import re

import jax
from jaxlib.version import __version__ as jaxlib_version

# There is a CUDA plugin for each major release of CUDA; jax loads whichever it finds.
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")

# Compute capabilities that the compiler supports; CUDA 13 has dropped the older ones.
_NEWER = ("7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
_OLDER = ("5.0", "5.2", "6.0", "6.1", "7.0", "7.2")


def missing(platform: str, capability: str = "") -> tuple[str, ...]:
    """What must be installed to compile for a platform, each with the command.

    Args:
      platform: "gpu" or "tpu".
      capability: a GPU's compute capability; "" for any.

    >>> missing("gpu", "4.2")[-1].partition(";")[0]
    'no compiler knows compute capability 4.2'
    """
    found = [] if _version("flatbuffers") else [_say("flatbuffers is", "flatbuffers")]
    if platform == "tpu":
        found += _missing_libtpu()
    elif capability and (reason := dropped(capability)):
        found.append(reason)
    else:
        found += _missing_cuda()
    return tuple(found)


def dropped(capability: str) -> str:
    """Why no CUDA compiler, installed or installable, supports a compute capability."""
    if capability in _NEWER or (capability in _OLDER and "cuda12" in cuda_plugin()):
        return ""
    if capability in _OLDER:
        return (
            f"CUDA 13 has dropped compute capability {capability}; a CUDA 12 plugin in the place "
            f'of {cuda_plugin()} has it: pip install "jax-cuda12-plugin=={jaxlib_version}"'
        )
    return (
        f"no compiler knows compute capability {capability}; it knows "
        f"{', '.join((*_OLDER, *_NEWER))}"
    )


def versions(platform: str) -> dict[str, str]:
    """The versions of the packages that compile for a platform; results depend on them.

    >>> sorted(set(versions("gpu")) & {"jax", "jaxlib"})
    ['jax', 'jaxlib']
    """
    names = {"tpu": ["libtpu"], "gpu": [cuda_plugin(), *_GPU_LIBRARIES]}
    given = {name: _version(name) for name in names.get(platform, ())}
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib_version,
        **{name: version for name, version in given.items() if version},
    }


# The compiler asks cuDNN which fused attention it supports.
_GPU_LIBRARIES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


def cuda_plugin() -> str:
    """The name of jax's CUDA plugin: the installed one, or the one to install."""
    return next((name for name in _PLUGINS if _version(name)), _PLUGINS[0])


def _missing_cuda() -> list[str]:
    plugin = cuda_plugin()
    fitting = jaxlib_version
    found = []
    for name in (plugin, plugin.replace("plugin", "pjrt")):
        if not (version := _version(name)):
            found.append(_say(f"{name} is", f"{plugin}=={fitting}"))
        elif _numbers(version) != _numbers(fitting):
            found.append(
                f'{name} {version} does not fit jaxlib {fitting}: pip install "{plugin}=={fitting}"'
            )
    # The plugin requires the other package, so one command is enough.
    return found[:1]


def _missing_libtpu() -> list[str]:
    wanted = _wanted_libtpu()
    if not (version := _version("libtpu")):
        return [_say("libtpu is", f"libtpu{wanted}")]
    prefix = wanted.removeprefix("==").removesuffix(".*")
    if wanted and not f"{version}.".startswith(f"{prefix}."):
        return [
            f'libtpu {version} does not fit jax {jax.__version__}: pip install "libtpu{wanted}"'
        ]
    return []


@functools.cache
def _wanted_libtpu() -> str:
    """The libtpu that this jax asks for, as "==0.0.42.*"."""
    for line in importlib.metadata.requires("jax") or ():
        if match := re.match(r"libtpu\s*(==[\w.*]+)", line):
            return match[1]
    return ""


def _say(what: str, requirement: str) -> str:
    return f'{what} not installed: pip install "{requirement}"'


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[str, ...]:
    """The release of a version, without what stands for a build of it."""
    return tuple(re.findall(r"\d+", version.split("+")[0].split(".dev")[0]))
