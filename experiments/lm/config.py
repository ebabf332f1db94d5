"""The options of a run: typed, checked, and written next to its results."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import jax

from jaxmem import policies
from lm import data
from lm.mesh import Layout, MeshError, check_devices, check_model, layout, parse
from lm.optimizers import OptimizerName, StateName, WeightsName

PolicyName = Literal["none", "full", "dots", "dots_no_batch", "sqrt", "revolve", "offload"]

# Where a run writes, whether it writes at all, and how often it saves a checkpoint: none of them
# changes a number.  Nor does, but for rounding, over which devices and processes it is split: a
# run goes on over others.
_SPLIT = (
    "mesh", "processes", "devices_per_process", "cluster", "start_timeout", "heartbeat_timeout",
)  # fmt: skip
_NOT_IDENTITY = ("workdir", "dry_run", "compare", "compare_steps", "checkpoint_every", *_SPLIT)


class UserError(Exception):
    """Something that the person at the shell can put right; shown as one line."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a decoder-only transformer on real English text, byte by byte, under a policy.

    It ends with a table of what every policy costs on this very model.
    After an interruption the same command resumes from the last checkpoint.
    """

    policy: PolicyName = "sqrt"
    """What is kept for the backward pass."""
    levels: int | None = None
    """Levels of segments; with --policy sqrt."""
    slots: int | None = None
    """Carries kept; with --policy revolve."""
    framework: Literal["linen", "nnx"] = "linen"
    """Which of Flax's module systems the model is written in."""
    layers: int = 24
    """Blocks in the stack."""
    width: int = 64
    """Size of a token's vector between blocks."""
    heads: int = 4
    """Attention heads; they divide the width."""
    sequence: int = 64
    """Bytes that the model sees at once."""
    dropout: float = 0.05
    """Probability of dropping a value at the end of each branch."""
    batch: int = 8
    """Sequences in one step of the optimizer."""
    ragged: bool = False
    """Train on paragraphs, in pieces of unequal length, and not on windows of the text."""
    accum: int = 1
    """Microbatches of a batch."""
    accum_form: Literal["inside", "across"] = "inside"
    """Microbatches inside one step (value_and_grad), or one in each of several (MultiSteps)."""
    steps: int = 200
    """Steps of the optimizer."""
    optimizer: OptimizerName = "adamw"
    """What trains; the default rate is AdamW's, SGD learns with a hundred times as much."""
    learning_rate: float = 5e-3
    """Peak of the warm-up and cosine decay."""
    clip: float | None = 1.0
    """The largest global norm of a gradient, of each device's own with one-bit-…; None for any."""
    averaged_steps: int | None = None
    """With --optimizer one-bit-…: steps before signs are sent; by default a quarter of all."""
    scaled: bool = False
    """With --optimizer one-bit-…: signs of momenta over the root of their variance."""
    error_feedback: bool = True
    """With --optimizer one-bit-…: what signs are wrong by is sent later."""
    state: StateName = "float32"
    """The optimizer's state: in 32 or 8 bits; in the device's memory, the host's or on disk."""
    weights: WeightsName = "float32"
    """What parameters are stored in; bfloat16+8 has 8 bits more of each in the state."""
    fused: bool = False
    """Update each layer in the backward pass (value_and_update); clipping takes two of these."""
    seed: int = 0
    """Of parameters, batches and dropout."""
    eval_every: int = 25
    """Steps between looks at the held-out text."""
    checkpoint_every: int = 25
    """Steps between checkpoints."""
    compare: bool = True
    """Compare all policies after training."""
    compare_steps: int = 5
    """Steps of each policy in the comparison; the first is not timed."""
    workdir: Path | None = None
    """Where results go; by default a folder of runs/ named after the configuration."""
    dry_run: bool = False
    """Show sizes, plans and compiled memory; train nothing and write nothing."""
    mesh: str | None = None
    """Devices along each axis, as data=2,fsdp=2,tensor=1; with several processes all on data.
    With stage=2 layers are a pipeline in two stages, through which --accum microbatches go."""
    processes: int | None = None
    """Start so many processes on this machine, which train together on its CPU."""
    devices_per_process: int | None = None
    """Devices that the CPU is divided into, for each process; 1 with --processes."""
    cluster: bool = False
    """This is one of several processes, which a cluster's launcher starts."""
    start_timeout: int = 45
    """Seconds in which all processes must have started."""
    heartbeat_timeout: int = 20
    """Seconds without a sign of life after which a process is given up, and the run ends."""

    def check(self) -> None:
        """Raises `UserError` for the first option that cannot be."""
        for name in (
            "layers", "width", "heads", "sequence", "batch", "accum", "steps",
            "eval_every", "checkpoint_every", "levels", "slots", "processes",
            "devices_per_process", "start_timeout", "heartbeat_timeout", "averaged_steps",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{_option(name)} must be at least 1, got {value}")
        if self.compare_steps < 2:
            raise UserError(
                f"--compare-steps must be at least 2, as the first is not timed, got "
                f"{self.compare_steps}"
            )
        if self.width % (2 * self.heads):
            raise UserError(
                f"--width must be a multiple of twice --heads ({2 * self.heads}: rotary positions "
                f"turn pairs of values in each head), got {self.width}"
            )
        if self.accum > self.batch:
            raise UserError(
                f"--accum must be at most --batch ({self.batch}), so that every microbatch has a "
                f"sequence, got {self.accum}"
            )
        if self.batch % self.calls:
            raise UserError(
                f"--accum must divide --batch ({self.batch}) with --accum-form across, which "
                f"compiles one size of microbatch, got {self.accum}; --accum-form inside takes any"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"--dropout must be at least 0 and below 1, got {self.dropout}")
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{_option(name)} must be positive, got {value}")
        if self.fused and self.calls > 1:
            raise UserError(
                "--fused goes with --accum-form inside: across steps, what is accumulated is as "
                "large as the gradient that it would spare"
            )
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed must be at least 0 and below 2**32, got {self.seed}")
        if self.levels is not None and self.policy != "sqrt":
            raise UserError(f"--levels goes with --policy sqrt, not with --policy {self.policy}")
        if self.slots is not None and self.policy != "revolve":
            raise UserError(f"--slots goes with --policy revolve, not with --policy {self.policy}")
        if self.sequence > data.LONGEST:
            raise UserError(
                f"--sequence must be at most {data.LONGEST}, for the held-out text to have some, "
                f"got {self.sequence}"
            )

        self._check_split()
        self._check_signs()

    def _check_signs(self) -> None:
        if not self.sends_signs:
            if self.averaged_steps is not None or self.scaled or not self.error_feedback:
                raise UserError(
                    "--averaged-steps, --scaled and --no-error-feedback go with --optimizer "
                    f"one-bit-adam or one-bit-lamb, not with {self.optimizer}"
                )
            return
        name = f"--optimizer {self.optimizer}"
        if self.fused or self.calls > 1 or self.state != "float32" or self.weights != "float32":
            raise UserError(
                f"{name} averages once a step, in moments of float32; leave out --fused, --state, "
                "--weights and --accum-form across"
            )
        if self.split is None:
            raise UserError(
                f"{name} sends signs between devices, and this run has one; pass for example "
                "--mesh data=4 with --devices-per-process 4 or --processes 4"
            )
        sizes = parse(self.split)
        if sizes.data < 2 or sizes.devices > sizes.data:
            raise UserError(
                f"{name} has parameters whole on each of several devices, and --mesh {sizes} does "
                f"not; pass --mesh data={max(sizes.devices, 2)}"
            )

    def _check_split(self) -> None:
        if self.cluster and (self.processes is not None or self.devices_per_process is not None):
            raise UserError(
                "--cluster goes without --processes and --devices-per-process: the cluster's "
                "launcher starts the processes and says which devices are theirs"
            )
        if self.mesh is None and not self.cluster and self.processes is None:
            if self.devices_per_process is None:
                return
            raise UserError(
                "--devices-per-process goes with --mesh, which says what each device does; pass "
                f"for example --mesh data={self.devices_per_process}"
            )
        if self.dry_run and (self.cluster or self.processes is not None):
            raise UserError(
                "--dry-run is for one process; sizes and plans are the same with "
                "--devices-per-process in place of --processes"
            )
        if self.state.endswith(("host", "disk")):
            raise UserError(
                f"--state {self.state} is for one device: what is outside of a device's memory "
                "is not split over a mesh; pass --state float32 or 8bit, and fsdp in --mesh"
            )
        if "stage" in (self.mesh or "") and self.fused:
            raise UserError(
                "--fused updates layers in the backward pass of one device, and stage= in --mesh "
                "makes a pipeline of several; leave one of them out"
            )
        try:
            # Of a cluster the devices are not known before its processes have found one another.
            if self.mesh is not None or self.processes is not None:
                self._check_sizes()
            if self.processes is not None:
                each = self.devices_per_process or 1
                check_devices(parse(self.split or ""), self.processes, self.processes * each)
        except MeshError as error:
            raise UserError(str(error)) from None

    def _check_sizes(self) -> None:
        check_model(
            parse(self.split or ""),
            batch=self.batch,
            accum=self.accum,
            width=self.width,
            heads=self.heads,
            layers=self.layers,
        )

    def check_devices(self) -> None:
        """Raises `UserError` if the mesh is not for the devices that there are."""
        if self.split is None:
            return
        try:
            self._check_sizes()
            check_devices(parse(self.split), jax.process_count(), jax.device_count())
        except MeshError as error:
            raise UserError(str(error)) from None

    @property
    def split(self) -> str | None:
        """The mesh as text, or None for a run on one device."""
        if self.mesh is None and self.processes is not None:
            return f"data={self.processes * (self.devices_per_process or 1)}"
        if self.mesh is None and self.cluster:  # the launcher knows how many
            return f"data={jax.device_count()}"
        return self.mesh

    @property
    def layout(self) -> Layout | None:
        """Where arrays live, or None for a run on one device."""
        return layout(self.split) if self.split else None

    @property
    def calls(self) -> int:
        """How often the compiled step is called for one step of the optimizer."""
        return self.accum if self.accum_form == "across" else 1

    @property
    def sends_signs(self) -> bool:
        """Whether the optimizer averages over the devices, and sends signs."""
        return self.optimizer.startswith("one-bit")

    @property
    def signs(self) -> dict[str, Any]:
        """Options of an optimizer that does."""
        if not self.sends_signs:
            return {}
        steps = self.averaged_steps or max(1, self.steps // 4)
        return {
            "warmup_steps": steps, "scaled": self.scaled, "error_feedback": self.error_feedback,
        }  # fmt: skip

    @property
    def remat(self) -> policies.Policy:
        """The policy that the model is trained under."""
        options = {"levels": self.levels, "slots": self.slots}
        return policies.parse(
            self.policy, **{name: value for name, value in options.items() if value is not None}
        )

    @property
    def label(self) -> str:
        """The policy as it is called in tables."""
        if self.levels not in (None, 1):
            return f"sqrt levels={self.levels}"
        if self.slots not in (None, policies.revolve().slots):
            return f"revolve slots={self.slots}"
        return self.policy

    def identity(self) -> dict[str, Any]:
        """Everything that the numbers of a run depend on, as plain data."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if name not in _NOT_IDENTITY} | {
            "text_sha256": hashlib.sha256(data.text()).hexdigest(),
            "jax": jax.__version__,
            "backend": jax.default_backend(),
        }

    def folder(self) -> Path:
        """Where the run writes."""
        if self.workdir is not None:
            return self.workdir
        digest = hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()
        label = self.label.replace(" ", "-").replace("=", "")
        size = f"{self.layers}x{self.width}"
        return Path("runs", f"train_lm-{self.framework}-{label}-{size}-{digest[:8]}")


# ---------------------------------------------------------------- implementation


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
