"""The process that compiles: a stand-alone script that imports jax and not jaxmem.

`pool.py` starts it as ``python -P worker.py FOLDER IDLE PATH``, so that a crash, a
hang or a lack of memory in a compiler ends this process and no other.  Requests
are lines of JSON on standard input; answers are lines of JSON on what was
standard output.  Programs and long texts go through files in FOLDER, which
belongs to the client.  It ends at the end of its input, that is with its parent,
even in the middle of a compilation; and after IDLE seconds without a request.

Known gaps: the devices of a mesh are taken in the order of the topology, which no
memory figure depends on.  On an absent GPU, jax 0.10 loses the memory kind of an
argument: one in "pinned_host" is counted on the device, unless it is donated and
comes back there, as the state of an optimizer does.
"""

import contextlib
import glob
import json
import os
import queue
import resource
import shutil
import sys
import tempfile
import threading
import time
from typing import Any


def main(folder: str, idle: float, jax_path: str) -> None:
    """Answer requests, one line of JSON each, until none has come for `idle` seconds."""
    # Compilers print on 1 and 2 what they like; the answers have a descriptor of their own.
    answers = os.dup(1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is to leave no file behind
    # The parent may have found jax where this interpreter does not look by itself.
    if jax_path not in sys.path:
        sys.path.append(jax_path)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=read, args=(requests, folder), daemon=True).start()
    while True:
        try:
            request = requests.get(timeout=idle)
        except queue.Empty:
            os._exit(0)  # past the thread that waits for input, which Python would trip over
        data = json.dumps(serve(request, folder)).encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]


def read(requests: "queue.SimpleQueue[dict[str, Any]]", folder: str) -> None:
    """Queue requests; exit the process when the input ends, whatever it is doing."""
    for line in sys.stdin.buffer:
        requests.put(json.loads(line))
    shutil.rmtree(folder, ignore_errors=True)  # if the client died, nobody else will
    os._exit(0)


def serve(request: dict[str, Any], folder: str) -> dict[str, Any]:
    """The answer to a request; an error becomes an answer too."""
    try:
        import jax

        # The types of the program are fixed already; 64-bit ones must not be narrowed.
        jax.config.update("jax_enable_x64", True)
        if request["do"] == "warm":
            devices(request["topology"])
            return {}
        return compile_program(request, folder)
    except Exception as error:
        # The process itself is unharmed, so the client gets the error as an answer.
        return {"error": str(error) or repr(error), "kind": type(error).__name__}


_topologies: dict[str, list[Any]] = {}


def devices(topology: dict[str, Any]) -> list[Any]:
    """The absent devices of a topology; creating them loads the compiler."""
    from jax.experimental import topologies

    key = json.dumps(topology, sort_keys=True)
    if key not in _topologies:
        _topologies[key] = list(topologies.get_topology_desc(**topology).devices)
    return _topologies[key]


# ---------------------------------------------------------------- compiling


def compile_program(request: dict[str, Any], folder: str) -> dict[str, Any]:
    """Compile, write the texts to the folder, and return the compiler's figures."""
    import jax
    from jax import export

    start = time.perf_counter()
    with contextlib.ExitStack() as after:
        for name, value in request["settings"].items():
            after.callback(jax.config.update, name, getattr(jax.config, name))
            jax.config.update(name, value)
        with open(request["program"], "rb") as file:
            program = export.deserialize(bytearray(file.read()))
        lowered = lower(program, request)
        dump = tempfile.mkdtemp(dir=folder)
        after.callback(shutil.rmtree, dump, ignore_errors=True)
        found: dict[str, Any] = {"refused": "", "stats": {}}
        try:
            compiled = lowered.compile(compiler_options={**request["options"], "xla_dump_to": dump})
        except jax.errors.JaxRuntimeError as error:
            # If it came as far as to place all buffers, the client knows what to make of it.
            found["refused"] = str(error)
            if not (texts := dumped(dump)):
                raise
        else:
            found["stats"] = stats(compiled.memory_analysis())
            if not (texts := dumped(dump)):
                raise OSError(f"the compiler wrote nothing about its buffers to {dump}")
            texts["hlo"] = compiled.as_text() or texts["hlo"]
    for name, text in texts.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    jax.clear_caches()
    return {**found, "texts": list(texts), "seconds": time.perf_counter() - start}


def lower(program: Any, request: dict[str, Any]) -> Any:
    """The program, lowered for absent devices with its shardings and memory kinds."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

    absent = devices(request["topology"])[: request["devices"]]
    if len(absent) > 1:
        mesh = mesh_of(program, absent, request["mesh_axes"])
        whole = NamedSharding(mesh, PartitionSpec())
        shardings = [given or whole for given in program.in_shardings_jax(mesh)]
    else:
        whole = SingleDeviceSharding(absent[0])
        shardings = [whole] * len(program.in_avals)
    kinds_in, kinds_out = request["memory_kinds"] or ([], [])
    if kinds_in:
        shardings = [
            sharding.with_memory_kind(kind) if kind else sharding
            for sharding, kind in zip(shardings, kinds_in, strict=True)
        ]

    def call(*args: Any) -> Any:
        results = program.call(*args)
        if not any(kinds_out):
            return results
        return tuple(
            jax.device_put(result, jax.memory.Space.Host) if kind and "host" in kind else result
            for result, kind in zip(results, kinds_out, strict=True)
        )

    specs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(program.in_avals, shardings, strict=True)
    ]
    # Without arguments only the results say which device it is.
    where: dict[str, Any] = {} if specs else {"out_shardings": whole}
    return jax.jit(call, donate_argnums=tuple(request["donate"]), **where).lower(*specs)


def mesh_of(program: Any, absent: list[Any], axes: list[list[Any]]) -> Any:
    """The devices in the mesh that the program was traced with, including the kinds of its axes."""
    import numpy as np
    from jax.sharding import AxisType, Mesh

    for aval in program.in_avals:
        if (mesh := aval.sharding.mesh).axis_names:
            names, sizes, kinds = mesh.axis_names, mesh.axis_sizes, mesh.axis_types
            break
    else:  # no argument is sharded by name
        names, sizes = zip(*(axes or [["devices", len(absent)]]), strict=True)
        kinds = (AxisType.Auto,) * len(names)
    return Mesh(np.array(absent).reshape(sizes), names, axis_types=kinds)


# ---------------------------------------------------------------- what the compiler says


def stats(analysis: Any) -> dict[str, int]:
    """The compiler's sums; empty if it gives none."""
    if analysis is None:
        return {}
    found = {
        f"{place}{name}_bytes": getattr(analysis, f"{place}{name}_size_in_bytes")
        for place in ("", "host_")
        for name in ("argument", "output", "alias", "temp")
    }
    found["code_bytes"] = analysis.generated_code_size_in_bytes
    found["peak_bytes"] = analysis.peak_memory_in_bytes
    return found


def dumped(folder: str) -> dict[str, str]:
    """The texts of the program itself, not of modules compiled before it."""
    end = "-buffer-assignment.txt"
    # "module_0042.jit_call.….after_optimizations-buffer-assignment.txt"
    tables = glob.glob(os.path.join(glob.escape(folder), f"*.jit_call.*{end}"))
    if not tables:
        return {}
    main = max(tables, key=os.path.getsize).removesuffix(end)
    found: dict[str, str] = {}
    for name, path in (
        ("hlo", f"{main}.txt"),
        ("assignment", f"{main}{end}"),
        ("live_range", f"{main}-live-range.txt"),
    ):
        with open(path, encoding="utf-8", errors="replace") as file:
            found[name] = file.read()
    return found


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
