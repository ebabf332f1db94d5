"""The process that compiles: a stand-alone script that imports jax and not jaxmem.

`pool.py` starts it as ``python -P worker.py FOLDER IDLE PATH``, so that a crash, a
hang or a lack of memory in a compiler ends this process and no other.  Requests
are lines of JSON on standard input; answers are lines of JSON on what was
standard output.  Programs and long texts go through files in FOLDER, which
belongs to the client.  It ends at the end of its input, that is with its parent,
even in the middle of a compilation; and after IDLE seconds without a request.

Each program is compiled in a child, forked while no compiler is loaded yet.  Buffers are
assigned long before there is machine code (a TPU's compiler takes up to 99 % of its time after
that), and nothing that is reported changes then: unless a request is for the code as well, the
child is ended as soon as the compiler has written about its buffers.

Known gaps: the devices of a mesh are taken in the order of the topology, which no
memory figure depends on.  On an absent GPU, jax 0.10 loses the memory kind of an
argument: one in "pinned_host" is counted on the device, unless it is donated and
comes back there, as the state of an optimizer does.
"""

import contextlib
import ctypes
import glob
import json
import os
import queue
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from typing import Any

# The process that compiles at the moment.
_child = 0
# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def main(folder: str, idle: float, jax_path: str) -> None:
    """Answer requests, one line of JSON each, until none has come for `idle` seconds."""
    # Compilers print on 1 and 2 what they like; the answers have a descriptor of their own.
    answers = os.dup(1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is to leave no file behind
    # jax warns of forks, as its backends have threads; none is started in this process.
    warnings.filterwarnings("ignore", message="os.fork")
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
        data = json.dumps(serve(request, folder, answers)).encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]


def read(requests: "queue.SimpleQueue[dict[str, Any]]", folder: str) -> None:
    """Queue requests; exit the process when the input ends, whatever it is doing."""
    for line in sys.stdin.buffer:
        requests.put(json.loads(line))
    stop_child()
    shutil.rmtree(folder, ignore_errors=True)  # if the client died, nobody else will
    os._exit(0)


def serve(request: dict[str, Any], folder: str, answers: int) -> dict[str, Any]:
    """The answer to a request; an error becomes an answer too."""
    try:
        import jax
        from jax import export  # noqa: F401  (loaded once, for all children)
        from jax.experimental import topologies  # noqa: F401

        # The types of the program are fixed already; 64-bit ones must not be narrowed.
        jax.config.update("jax_enable_x64", True)
        if request["do"] == "warm":
            return {}
        return compile_program(request, folder, answers)
    except Exception as error:
        return failed(error)


def failed(error: Exception) -> dict[str, Any]:
    """An error as an answer: the process itself is unharmed."""
    return {"error": str(error) or repr(error), "kind": type(error).__name__}


def devices(topology: dict[str, Any]) -> list[Any]:
    """The absent devices of a topology; creating them loads the compiler."""
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(**topology).devices)


# ---------------------------------------------------------------- compiling


def compile_program(request: dict[str, Any], folder: str, answers: int) -> dict[str, Any]:
    """Compile in a child, write the texts to the folder, and return the compiler's figures."""
    global _child
    start = time.perf_counter()
    dump = tempfile.mkdtemp(dir=folder)
    answer = os.path.join(folder, "answer")
    try:
        if not (_child := os.fork()):
            be_child(request, dump, answer, answers)
        found = awaited(request, dump, answer)
        texts = dumped(dump)
    finally:
        stop_child()
        shutil.rmtree(dump, ignore_errors=True)
    if "error" in found:
        return found
    if not texts:  # it did not come as far as to assign buffers
        raise RuntimeError(found["refused"] or "the compiler wrote nothing about its buffers")
    texts["hlo"] = found.pop("hlo") or texts["hlo"]
    for name, text in texts.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    return {**found, "texts": list(texts), "seconds": time.perf_counter() - start}


def be_child(request: dict[str, Any], dump: str, answer: str, answers: int) -> None:
    """Compile, write the answer to a file, and exit."""
    status = 1
    try:
        # Whoever waits for the parent's answers learns of its end, and so does this process.
        os.close(answers)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            found = compiled(request, dump)
        except Exception as error:
            found = failed(error)
        with open(answer, "w", encoding="utf-8") as file:
            json.dump(found, file)
        status = 0
    except Exception:
        traceback.print_exc()  # the answer cannot be written; the log is told of
    finally:
        os._exit(status)


def awaited(request: dict[str, Any], dump: str, answer: str) -> dict[str, Any]:
    """The child's answer; or that it was stopped, as buffers are assigned."""
    global _child
    may_stop, texts = not request["generate_code"], Texts(dump)
    stopped = {"refused": "", "stats": {}, "hlo": "", "stopped": True}
    while True:
        child, status = os.waitpid(_child, os.WNOHANG)
        if child:
            _child = 0
            break
        if may_stop and texts.are_whole():
            if has_room(request, dump):
                return stopped
            may_stop = False  # it may be refused as too large
        time.sleep(0.01)
    # What ended the child ends this process: its client knows what to make of that.
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # not for SIGKILL
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    if code := os.WEXITSTATUS(status):
        os._exit(code)
    with open(answer, encoding="utf-8") as file:
        found = json.load(file)
    os.unlink(answer)
    # What is refused behind its buffers, as a library that is only where the program runs, would
    # have been stopped there, had it been looked at in time.
    is_late = may_stop and found.get("refused") and texts.are_there()
    return stopped if is_late and has_room(request, dump) else found


def has_room(request: dict[str, Any], dump: str) -> bool:
    """Whether a program whose buffers are assigned is not too large, or that does not matter."""
    return request["room"] is None or device_bytes(dump) <= request["room"]


def stop_child() -> None:
    """End the process that compiles, if there is one."""
    global _child
    if child := _child:
        _child = 0
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def compiled(request: dict[str, Any], dump: str) -> dict[str, Any]:
    """Compile to the end; a refusal is a result, if the compiler came as far as its buffers."""
    import jax
    from jax import export

    for name, value in request["settings"].items():
        jax.config.update(name, value)
    with open(request["program"], "rb") as file:
        program = export.deserialize(bytearray(file.read()))
    lowered = lower(program, request)
    found: dict[str, Any] = {"refused": "", "stats": {}, "hlo": "", "stopped": False}
    try:
        done = lowered.compile(compiler_options={**request["options"], "xla_dump_to": dump})
    except jax.errors.JaxRuntimeError as error:
        if not dumped(dump):
            raise
        return {**found, "refused": str(error)}
    return {**found, "stats": stats(done.memory_analysis()), "hlo": done.as_text() or ""}


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
    lowered = jax.jit(call, donate_argnums=tuple(request["donate"]), **where).lower(*specs)
    if any(kinds_in):
        _tell_kinds(lowered, kinds_in)
    return lowered


def _tell_kinds(lowered: Any, kinds: list[str | None]) -> None:
    """Write memory kinds of arguments into a program for an absent GPU, of which jax forgets them.

    Its devices do not tell which memories they have, and so neither do shardings on them.
    """
    from jax.extend.mlir import ir

    module = lowered.compiler_ir("stablehlo")
    with module.context:
        (main,) = (op for op in module.body.operations if op.attributes["sym_name"].value == "main")
        told = []
        for attributes, kind in zip(main.attributes["arg_attrs"], kinds, strict=True):
            found = {entry.name: entry.attr for entry in ir.DictAttr(attributes)}
            found["mhlo.memory_kind"] = ir.StringAttr.get(kind or "device")
            told.append(ir.DictAttr.get(found))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(told)


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

_TEXTS = {
    "hlo": ".txt",
    "assignment": "-buffer-assignment.txt",
    "live_range": "-live-range.txt",
}
_LOOKS = 3
_ON_DEVICE = re.compile(r"^allocation \d+: size (\d+), (?!color [1-9])", re.MULTILINE)


class Texts:
    """Those about the buffers of a program, while the compiler writes them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._sizes: list[tuple[int, ...]] = []

    def are_whole(self) -> bool:
        """Whether all have been there and have not grown in the last looks.

        Compilers write the report on memory after the others, or from jax 0.11 on at once with
        them; where a compiler writes none, there is no saying.
        """
        sizes = self._look()
        self._sizes = [*self._sizes, sizes][-_LOOKS:]
        return bool(sizes) and self._sizes == [sizes] * _LOOKS

    def are_there(self) -> bool:
        """Whether all are, of a compiler that has ended."""
        return bool(self._look())

    def _look(self) -> tuple[int, ...]:
        """Their sizes; () if any is missing, or empty."""
        main = _main(self._folder)
        names = [*_TEXTS.values(), "-memory-usage-report.txt"]
        try:
            sizes = tuple(os.path.getsize(f"{main}{name}") for name in names) if main else ()
        except OSError:
            return ()
        return sizes if all(sizes) else ()


def device_bytes(folder: str) -> int:
    """The sum of all buffers in the memory of the device."""
    return sum(map(int, _ON_DEVICE.findall(dumped(folder)["assignment"])))


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
    # "module_0042.jit_call.….after_optimizations-buffer-assignment.txt"
    if not (main := _main(folder)):
        return {}
    found: dict[str, str] = {}
    for name, end in _TEXTS.items():
        with open(f"{main}{end}", encoding="utf-8", errors="replace") as file:
            found[name] = file.read()
    return found


def _main(folder: str) -> str:
    """What the names of the program's texts begin with; empty if there are none yet."""
    tables = glob.glob(os.path.join(glob.escape(folder), f"*.jit_call.*{_TEXTS['assignment']}"))
    return max(tables, key=os.path.getsize).removesuffix(_TEXTS["assignment"]) if tables else ""


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
