"""Trains a small language model under a remat policy, and compares all policies on it.

    python experiments/train_lm.py --policy sqrt --layers 24
    python experiments/train_lm.py --help

The model, the data, the loop and the comparison are in `lm/`; this is the command
line and its output.

Over several devices, and over several processes of this machine's CPU:

    python experiments/train_lm.py --mesh data=2,fsdp=2 --devices-per-process 4
    python experiments/train_lm.py --mesh data=2,fsdp=2 --processes 4
    python experiments/train_lm.py --mesh stage=2 --processes 2 --accum 4    # a pipeline

Under a cluster's launcher each process is started with `--cluster`, and jax finds
the others (`jax.distributed.initialize()` without arguments) by what is set there:

    SLURM       srun python experiments/train_lm.py --cluster --mesh data=4,fsdp=2
                SLURM_JOB_ID, SLURM_STEP_NODELIST, SLURM_NTASKS, SLURM_PROCID, SLURM_LOCALID
    Open MPI    mpirun python experiments/train_lm.py --cluster --mesh …
                OMPI_MCA_orte_hnp_uri, OMPI_COMM_WORLD_SIZE, …_RANK, …_LOCAL_RANK
    Kubernetes  an indexed Job with a headless service, and the package jax[k8s]:
                KUBERNETES_SERVICE_HOST, JOB_COMPLETION_INDEX, HOSTNAME
    Cloud TPU   what the machine itself knows

JAX_COORDINATOR_ADDRESS (host:port of process 0) goes before what jax finds.  The
folder of `--workdir` is one that all processes see.  When a process is lost all
others end, and the same command goes on from the last checkpoint, bit for bit; with
another `--mesh`, or other processes, it goes on as well, but for rounding.
"""

import sys
from collections.abc import Callable

import jax
import tyro

from lm import processes, supervisor
from lm.config import Config, UserError
from lm.stopping import Listener, Stopped, listening


def main(config: Config) -> None:
    """One run: train, compare, write.

    Raises:
      UserError: the options cannot be, or the workdir is another run's.
      Stopped: a signal came.
    """
    from lm import run  # models, optax, orbax: slow to import, and no use to a supervisor

    config.check()
    _divide_cpu(config)
    config.check_devices()
    with listening() as listener:
        if config.dry_run:
            run.dry_run(config, listener)
        else:
            run.run(config, listener)


def _divide_cpu(config: Config) -> None:
    if config.devices_per_process is not None:
        jax.config.update("jax_num_cpu_devices", config.devices_per_process)


def _start(config: Config) -> int:
    """In this process, or in several; gives the exit status."""
    if processes.is_worker():
        return processes.work(config, _run)
    if config.cluster or config.processes is not None:
        config.check()
        return supervisor.supervise(config)
    main(config)
    return 0


def _run(config: Config, listener: Listener, saved: Callable[[int], None]) -> None:
    from lm import run  # late, so that a worker gives signs of life while it imports

    run.run(config, listener, saved)


if __name__ == "__main__":
    try:
        sys.exit(_start(tyro.cli(Config)))
    except UserError as error:
        print(f"train_lm.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stopped:
        print(f"stopped by {stopped}; the same command resumes the run", file=sys.stderr)
        sys.exit(128 + stopped.number)
    except KeyboardInterrupt:
        sys.exit(130)
