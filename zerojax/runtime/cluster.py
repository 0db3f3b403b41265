"""Join the other processes of a run, with settings found in the environment.

    zj.join_cluster()        # before the first array; does nothing if this process is alone

Three settings are needed: the address of process 0, the number of processes, and the number of this
process. Each is taken from the first row that has it:

    set by              process 0                        processes              this one
    the user            JAX_COORDINATOR_ADDRESS          JAX_NUM_PROCESSES      JAX_PROCESS_ID
    Kubernetes          job's name, HEADLESS_SERVICE     (the user)             JOB_COMPLETION_INDEX
    Open MPI            OMPI_MCA_orte_hnp_uri            OMPI_COMM_WORLD_SIZE   OMPI_COMM_WORLD_RANK
    Slurm               SLURM_STEP_NODELIST              SLURM_STEP_NUM_TASKS   SLURM_PROCID
    MPICH, Intel MPI    (the user)                       PMI_SIZE               PMI_RANK

`jax.distributed.initialize` can detect some of these settings. But it gives each Slurm task the one
device with the task's number on the node, even if the task is alone there; it needs all of Slurm's
variables together; and in Kubernetes it asks the API server. So its detection is turned off here.

Slurm also sets a job's variables in shells, and in a batch script, which has only one process: only
a step of srun has tasks. MPI started inside a Slurm job has its own ranks, so it takes precedence.
If all ranks are on this machine, so is process 0.

Devices: a process that is alone on its node takes all devices that it sees. If several share a
node, each takes an equal share of CUDA_VISIBLE_DEVICES. If that is a single device, the scheduler
has already divided the devices, and the process takes it. If the variable is not set, each takes
the device with its number, as in JAX. JAX_LOCAL_DEVICE_IDS overrides this.
"""

import dataclasses
import itertools
import logging
import os
import re
from collections.abc import Iterator, Mapping

import jax

from zerojax.user_values import whole_number

PORT = 55527
"""Port of process 0, unless JAX_COORDINATOR_PORT or Slurm's job sets another."""
_SLURM_PORTS = range(61440, 65536)  # JAX's range of ports for Slurm jobs
logger = logging.getLogger("zerojax")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place of a process in its run.

    Attributes:
      source: launcher whose variables were used.
      coordinator: "host:port" of process 0; None if this process is alone.
      num_processes: number of processes in the run.
      process: number of this process, 0 .. num_processes - 1.
      device_ids: devices of this process on its node; None for all that it sees.
    """

    source: str
    coordinator: str | None = None
    num_processes: int = 1
    process: int = 0
    device_ids: tuple[int, ...] | None = None


def join_cluster(heartbeat_timeout: int = 30) -> Place:
    """Call `jax.distributed.initialize` if the environment describes one of several processes.

    Call this before anything creates the devices. It supports Slurm, Open MPI, MPICH, indexed
    Kubernetes jobs, and JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; see the
    module's docstring.

    Args:
      heartbeat_timeout: seconds without a sign of life after which a process counts as dead and the
        other processes end. JAX's default is 100.

    Returns:
      The place of this process.

    Raises:
      ValueError: the environment has only some of the needed settings; the message names the
        missing ones.
      RuntimeError: the devices already exist, the processes were joined before, or process 0 does
        not answer.
    """
    heartbeat_timeout = whole_number("heartbeat_timeout", heartbeat_timeout, 1, ", in seconds")
    place = find_place(os.environ)
    if place.coordinator is None:
        return place
    logger.info(
        "process %d of %d, by %s; process 0 is %s",
        place.process,
        place.num_processes,
        place.source,
        place.coordinator,
    )
    jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process,
        local_device_ids=place.device_ids,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=heartbeat_timeout,
    )
    return place


def find_place(env: Mapping[str, str]) -> Place:
    """Return the place of a process with this environment.

    Args:
      env: environment variables.

    Raises:
      ValueError: the environment has only some of the needed settings; the message names the
        missing ones.
    """
    launched = _kubernetes(env) or _open_mpi(env) or _of_srun_or_mpiexec(_slurm(env), _mpich(env))
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    jax_env = {name: env.get(name) for name in names}
    if launched is None:
        if not any(jax_env.values()):
            return Place(source="no launcher")
        launched = _Launched("JAX's variables", jax_env)
    if jax_env["JAX_NUM_PROCESSES"] == "1" and not jax_env["JAX_PROCESS_ID"]:
        return Place(source="JAX_NUM_PROCESSES=1")  # such as a job whose pods train separately
    count = _number(env, "JAX_NUM_PROCESSES", launched.count)
    process = _number(env, "JAX_PROCESS_ID", launched.process)
    if count is None or process is None:
        missing = [launched.needs[n] for n, value in enumerate((count, process)) if value is None]
        raise ValueError(
            f"{launched.found}, but not {' and '.join(missing)}: set "
            f"{'it' if len(missing) == 1 else 'them'}"
        )
    if not 0 <= process < count:
        raise ValueError(
            f"{launched.source}: process {process} of {count} processes: numbers go from 0 to "
            f"{count - 1}"
        )
    if count == 1:
        return Place(source=launched.source)
    address = jax_env["JAX_COORDINATOR_ADDRESS"] or launched.address
    if address is None:
        raise ValueError(f"{launched.found}, but not {launched.needs[2]}: {launched.repair}")
    if ":" not in address.rpartition("]")[2]:
        address = f"{address}:{env.get('JAX_COORDINATOR_PORT') or launched.port}"
    devices = None if env.get("JAX_LOCAL_DEVICE_IDS") else _devices(env, *launched.on_node)
    return Place(
        source=launched.source,
        coordinator=address,
        num_processes=count,
        process=process,
        device_ids=devices,
    )


def _of_srun_or_mpiexec(slurm: "_Launched | None", mpich: "_Launched | None") -> "_Launched | None":
    """Return the launcher that started this process.

    mpiexec runs one srun task per node, and its ranks inherit the task's variables. srun can also
    set the variables of MPI; then both have the same numbers, and only Slurm's variables locate
    process 0.
    """
    if slurm is None or mpich is None:
        return slurm or mpich
    return slurm if (slurm.count, slurm.process) == (mpich.count, mpich.process) else mpich


class _Launched:
    """The settings in a launcher's variables; None for missing ones."""

    def __init__(
        self,
        source: str,
        env: Mapping[str, str | None],
        *,
        count: int | None = None,
        process: int | None = None,
        address: str | None = None,
        needs: tuple[str, str, str] = (
            "JAX_NUM_PROCESSES",
            "JAX_PROCESS_ID",
            "JAX_COORDINATOR_ADDRESS",
        ),
        repair: str = "set it to host:port of process 0",
        port: int = PORT,
        on_node: tuple[int | None, int | None] = (1, 0),
    ) -> None:
        """Collect the settings.

        Args:
          source: the launcher.
          env: variables of the launcher; messages name the set variables.
          count: number of processes.
          process: number of this process.
          address: address of process 0, with or without a port.
          needs: names of the variables for count, process and address.
          repair: remedy for a missing address.
          port: port of process 0.
          on_node: number of processes on this node, and this one's number among them.
        """
        self.source = source
        self.count = count
        self.process = process
        self.address = address
        self.needs = needs
        self.repair = repair
        self.port = port
        self.on_node = on_node
        self.found = f"{source}: {', '.join(name for name, value in env.items() if value)} set"


def _kubernetes(env: Mapping[str, str]) -> _Launched | None:
    """Return the settings of an indexed job, or None.

    Its pods are <job>-<index>, under the name of a headless service.
    """
    if "JOB_COMPLETION_INDEX" not in env:
        return None
    index = _number(env, "JOB_COMPLETION_INDEX")
    host = env.get("HOSTNAME", "")
    job = host.removesuffix(f"-{index}")
    service = env.get("HEADLESS_SERVICE")
    if job != host:
        repair = (
            "set it to the name of the job's headless service, which is also its pods' subdomain"
        )
    else:
        repair = (
            f"and HOSTNAME is not the job's name and -{index}, as Kubernetes names pods: set "
            "JAX_COORDINATOR_ADDRESS"
        )
    return _Launched(
        "Kubernetes",
        _set(env, "JOB_COMPLETION_INDEX", "HOSTNAME", "JAX_NUM_PROCESSES"),
        process=index,
        address=f"{job}-0.{service}" if service and job != host else None,
        needs=("JAX_NUM_PROCESSES", "JOB_COMPLETION_INDEX", "HEADLESS_SERVICE"),
        repair=repair,
    )


def _open_mpi(env: Mapping[str, str]) -> _Launched | None:
    if not _set(env, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
        return None
    count = _number(env, "OMPI_COMM_WORLD_SIZE")
    on_node = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    # "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", or tcp6://[fe80::1,..]:43370
    match = re.search(r"tcp://([^,:]+)|tcp6://(\[[^],]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    host = None if match is None else match[1] or f"{match[2]}]"
    return _Launched(
        "Open MPI",
        _set(env, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        count=count,
        process=_number(env, "OMPI_COMM_WORLD_RANK"),
        address="localhost" if count is not None and count == on_node else host,
        needs=(
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_RANK",
            "JAX_COORDINATOR_ADDRESS or OMPI_MCA_orte_hnp_uri",
        ),
        repair=(
            "set JAX_COORDINATOR_ADDRESS to host:port of rank 0 (mpirun -x "
            "JAX_COORDINATOR_ADDRESS=..)"
        ),
        on_node=(on_node, _number(env, "OMPI_COMM_WORLD_LOCAL_RANK")),
    )


def _mpich(env: Mapping[str, str]) -> _Launched | None:
    if not _set(env, "PMI_SIZE", "PMI_RANK"):
        return None
    count = _number(env, "PMI_SIZE")
    on_node = _number(env, "MPI_LOCALNRANKS")
    return _Launched(
        "MPI",
        _set(env, "PMI_SIZE", "PMI_RANK"),
        count=count,
        process=_number(env, "PMI_RANK"),
        address="localhost" if count is not None and count == on_node else None,
        needs=("PMI_SIZE", "PMI_RANK", "JAX_COORDINATOR_ADDRESS"),
        repair=(
            "MPICH does not give its ranks the address of rank 0: set it to that host:port "
            "(mpiexec -genv ..)"
        ),
        on_node=(on_node, _number(env, "MPI_LOCALRANKID")),
    )


def _slurm(env: Mapping[str, str]) -> _Launched | None:
    of_step = _set(
        env, "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_ID"
    )
    process = _number(env, "SLURM_PROCID")
    if not of_step and not process:
        # A shell of salloc, the single process of a batch script, or no Slurm at all.
        if (_number(env, "SLURM_NTASKS") or 1) > 1:
            logger.warning(
                "SLURM_NTASKS=%s, but this process was not started by srun: it trains alone",
                env["SLURM_NTASKS"],
            )
        return None
    count = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS"))
    nodes = env.get("SLURM_STEP_NODELIST")
    of_job = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    num_nodes = env.get("SLURM_STEP_NUM_NODES")
    of_all = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES")
    # A step on fewer nodes than its job may not include the job's first node.
    if not nodes and of_job and (num_nodes == of_all or of_all == "1"):
        nodes = of_job
    address = "localhost" if num_nodes == "1" else None
    if nodes:
        address = first_host(nodes)
    job = _number(env, "SLURM_JOB_ID")
    address = "localhost" if num_nodes == "1" else None
    if nodes:
        address = first_host(nodes)
    return _Launched(
        "Slurm",
        _set(env, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", *of_step),
        count=count,
        process=process,
        address=address,
        needs=("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST"),
        repair=(
            "start with srun, which sets it, or set JAX_COORDINATOR_ADDRESS to host:port of task 0"
        ),
        port=PORT if job is None else _SLURM_PORTS[job % len(_SLURM_PORTS)],
        on_node=(_tasks_on_node(env, count), _number(env, "SLURM_LOCALID")),
    )


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm list: "node001" for "node[001-015,020],other"."""
    if not re.search(r"[\[,]", nodes):
        return nodes
    name, bracket, rest = re.split(r"(\[|,)", nodes, maxsplit=1)
    if bracket != "[":
        return name
    numbers, _, after = rest.partition("]")
    return name + re.split(r"[,-]", numbers, maxsplit=1)[0] + re.split(r",", after, maxsplit=1)[0]


def _tasks_on_node(env: Mapping[str, str], count: int | None) -> int | None:
    """Return the number of this step's tasks on this node, or None if unknown.

    SLURM_STEP_TASKS_PER_NODE lists them node by node, such as "2(x3),1".
    """
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    node = _number(env, "SLURM_NODEID")
    if not text or node is None:
        # With as many nodes as tasks, each node has one task.
        return 1 if count is not None and env.get("SLURM_STEP_NUM_NODES") == str(count) else None
    tasks = itertools.chain.from_iterable(map(_repeated, text.split(",")))
    return next(itertools.islice(tasks, node, None), None)


def _repeated(entry: str) -> Iterator[int]:
    """Yield 2, 2, 2 for "2(x3)"."""
    match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
    if match is None:
        raise ValueError(f"Slurm's tasks per node: {entry!r} is not of the form 2 or 2(x3)")
    return itertools.repeat(int(match[1]), int(match[2] or 1))


def _devices(
    env: Mapping[str, str], on_node: int | None, local: int | None
) -> tuple[int, ...] | None:
    """Return the devices of a process, as numbers among its visible devices; None for all.

    Args:
      env: environment with CUDA_VISIBLE_DEVICES.
      on_node: number of the run's processes on this node; None if unknown, which counts as several.
      local: number of this process among them.

    Raises:
      ValueError: the devices do not divide by the processes.
    """
    if on_node == 1 or local is None:
        return None
    visible = [
        device for device in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()
    ]
    if len(visible) == 1:
        return None
    if not visible or on_node is None:
        return (local,)
    if len(visible) % on_node:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES has {len(visible)} devices, which do not divide by the "
            f"{on_node} processes of this node: start a number of processes that divides them, or "
            "set JAX_LOCAL_DEVICE_IDS in each"
        )
    share = len(visible) // on_node
    return tuple(range(local * share, (local + 1) * share))


def _set(env: Mapping[str, str], *names: str) -> dict[str, str | None]:
    """Return the named variables that are set and not empty."""
    return {name: env[name] for name in names if env.get(name)}


def _number(env: Mapping[str, str], name: str, otherwise: int | None = None) -> int | None:
    """Return a variable as a whole number, or `otherwise` if it is not set.

    Raises:
      ValueError: its value is not a whole number.
    """
    text = env.get(name)
    if not text:
        return otherwise
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"{name}={text!r}: a whole number is needed")
    return int(text)
