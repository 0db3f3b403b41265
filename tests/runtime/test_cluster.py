"""A process finds its place in a run from its launcher's variables; a missing variable is named."""

import jax
import pytest

import zerojax as zj
from zerojax.runtime import Place, find_place

SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[003,007-009]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
STEP = SLURM | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[003,007]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
PORT = 61440 + 70001 % 4096
EIGHT = STEP | {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
}
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
URI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
POD = {
    "JOB_COMPLETION_INDEX": "3",
    "HOSTNAME": "tune-3",
    "JAX_NUM_PROCESSES": "4",
    "HEADLESS_SERVICE": "tune-pods",
}
OWN_ADDRESS = {"JAX_COORDINATOR_ADDRESS": "here:1"}
OWN = {"JAX_COORDINATOR_ADDRESS": "here:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (OWN, ("here:1", 2, 1, None)),
        # a task that is alone on its node has all of the node's devices
        (STEP, (f"gpu003:{PORT}", 2, 1, None)),
        (STEP | {"JAX_COORDINATOR_PORT": "99"}, ("gpu003:99", 2, 1, None)),
        (STEP | {"SLURM_STEP_NODELIST": "a-1,b"}, (f"a-1:{PORT}", 2, 1, None)),
        (STEP | {"SLURM_STEP_NODELIST": "gpu[3-4]-ib,b"}, (f"gpu3-ib:{PORT}", 2, 1, None)),
        (without(STEP, "SLURM_STEP_NODELIST"), (f"gpu003:{PORT}", 2, 1, None)),
        # tasks that share a node split its devices, unless the scheduler has assigned them
        (EIGHT, (f"gpu003:{PORT}", 16, 11, (3,))),
        (
            EIGHT | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(16)))},
            (f"gpu003:{PORT}", 16, 11, (6, 7)),
        ),
        (EIGHT | {"CUDA_VISIBLE_DEVICES": "5"}, (f"gpu003:{PORT}", 16, 11, None)),
        (EIGHT | {"JAX_LOCAL_DEVICE_IDS": "1"}, (f"gpu003:{PORT}", 16, 11, None)),
        (without(STEP, "SLURM_STEP_TASKS_PER_NODE"), (f"gpu003:{PORT}", 2, 1, None)),
        (STEP | {"JAX_COORDINATOR_ADDRESS": "head:5"}, ("head:5", 2, 1, None)),
        # MPI in a Slurm job has ranks of its own
        (OMPI | URI | STEP, ("10.96.0.1:55527", 4, 2, (0,))),
        (
            OMPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fe80::b9b,2620:10d::2]:43370"},
            ("[fe80::b9b]:55527", 4, 2, (0,)),
        ),
        (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ("localhost:55527", 4, 2, (0,))),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "1", "JAX_COORDINATOR_ADDRESS": "head:5"},
            ("head:5", 2, 1, None),
        ),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
            ("localhost:55527", 2, 1, (1,)),
        ),
        # one srun task per node starts the mpiexec ranks there; srun itself can set both
        (
            STEP
            | {"PMI_SIZE": "8", "PMI_RANK": "5", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"}
            | OWN_ADDRESS,
            ("here:1", 8, 5, (1,)),
        ),
        (STEP | {"PMI_SIZE": "2", "PMI_RANK": "1"}, (f"gpu003:{PORT}", 2, 1, None)),
        (POD, ("tune-0.tune-pods:55527", 4, 3, None)),
        (
            without(POD, "HEADLESS_SERVICE") | {"JAX_COORDINATOR_ADDRESS": "tune-0.pods:7"},
            ("tune-0.pods:7", 4, 3, None),
        ),
    ],
)
def test_a_process_finds_its_place(env, expected):
    place = find_place(env)
    assert (place.coordinator, place.num_processes, place.process, place.device_ids) == expected


@pytest.mark.parametrize(
    "env",
    [
        {},
        without(SLURM, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),  # a shell of salloc
        SLURM | {"SLURM_PROCID": "0"},  # a batch script, before srun
        STEP
        | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # a step of one task, in a job of two
        # pods that train independently
        without(POD, "HEADLESS_SERVICE") | {"JAX_NUM_PROCESSES": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"JAX_NUM_PROCESSES": "1"},
    ],
)
def test_a_process_that_is_alone_joins_nothing(monkeypatch, env):
    place = find_place(env)
    assert (place.coordinator, place.num_processes, place.process, place.device_ids) == (
        None,
        1,
        0,
        None,
    )
    monkeypatch.setattr(jax.distributed, "initialize", None)
    for name in {*OWN, *STEP, *POD, *OMPI} - env.keys():
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert zj.join_cluster() == place


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (
            without(OWN, "JAX_NUM_PROCESSES"),
            "JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID set, but not JAX_NUM_PROCESSES: set it",
        ),
        (
            without(OWN, "JAX_COORDINATOR_ADDRESS"),
            "but not JAX_COORDINATOR_ADDRESS: set it to host:port",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "here:1"},
            "but not JAX_NUM_PROCESSES and JAX_PROCESS_ID: set them",
        ),
        (OWN | {"JAX_PROCESS_ID": "2"}, "process 2 of 2 processes: numbers go from 0 to 1"),
        (OWN | {"JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID='one': a whole number"),
        (without(STEP, "SLURM_PROCID"), "but not SLURM_PROCID"),
        (
            without(STEP, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
            "SLURM_JOB_NUM_NODES, .*but not SLURM_STEP_NODELIST",
        ),
        # for a step on part of the job's nodes, the first node is unknown
        (
            without(STEP, "SLURM_STEP_NODELIST") | {"SLURM_JOB_NUM_NODES": "4"},
            "but not SLURM_STEP_NODELIST: start with srun",
        ),
        (without(SLURM, "SLURM_JOB_NODELIST"), "but not SLURM_STEP_NODELIST"),
        (without(STEP, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "but not SLURM_STEP_NUM_TASKS"),
        (
            EIGHT | {"CUDA_VISIBLE_DEVICES": "0,1,2"},
            "3 devices, which do not divide by the 8 processes",
        ),
        (OMPI, "OMPI_MCA_orte_hnp_uri: set JAX_COORDINATOR_ADDRESS"),
        (without(OMPI, "OMPI_COMM_WORLD_RANK"), "but not OMPI_COMM_WORLD_RANK"),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "1"},
            "but not JAX_COORDINATOR_ADDRESS: MPICH does not give",
        ),
        (
            without(POD, "JAX_NUM_PROCESSES"),
            "JOB_COMPLETION_INDEX, HOSTNAME set, but not JAX_NUM_PROCESSES",
        ),
        (
            without(POD, "HEADLESS_SERVICE"),
            "but not HEADLESS_SERVICE: set it to the name of the job's headless service",
        ),
        (POD | {"HOSTNAME": "renamed"}, "HOSTNAME is not the job's name and -3"),
    ],
)
def test_what_is_missing_is_named(env, words):
    with pytest.raises(ValueError, match=words):
        find_place(env)


def test_jax_is_told_all_and_detects_nothing(monkeypatch):
    """JAX's own detection would give the node's only task one device.

    It would also wait 100 s for a process that died.
    """
    calls = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *args, **options: calls.append((args, options))
    )
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    place = zj.join_cluster(7)
    assert place == Place(source="Slurm", coordinator=f"gpu003:{PORT}", num_processes=2, process=1)
    told = {
        "local_device_ids": None,
        "cluster_detection_method": "deactivate",
        "heartbeat_timeout_seconds": 7,
    }
    assert calls == [((f"gpu003:{PORT}", 2, 1), told)]
    with pytest.raises(
        ValueError, match=r"heartbeat_timeout=0: an integer of at least 1 is needed, in seconds"
    ):
        zj.join_cluster(0)
