"""The manifests on the page about clusters start runs that the script and the launcher accept."""

import re
from typing import Any

import blocks
import finetune
import pytest
import yaml

from zerojax.runtime.cluster import find_place

PAGE = blocks.ROOT / "docs/howto/cluster.md"


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    """Return the page's manifests by kind."""
    texts = re.findall(r"^```\{code-block\} yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    found = [manifest for text in texts for manifest in yaml.safe_load_all(text)]
    return {manifest["kind"]: manifest for manifest in found}


def test_pods_of_the_job_find_process_0(manifests):
    name, spec = manifests["Job"]["metadata"]["name"], manifests["Job"]["spec"]
    pod = spec["template"]["spec"]
    env = {pair["name"]: pair["value"] for pair in pod["containers"][0]["env"]}
    assert manifests["Service"]["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == manifests["Service"]["metadata"]["name"]
    assert spec["parallelism"] == spec["completions"]
    place = find_place(env | {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": f"{name}-1"})
    assert (place.process, place.num_processes) == (1, spec["completions"])
    assert place.coordinator == f"{name}-0.{pod['subdomain']}:55527"


def test_pods_of_the_jobset_find_process_0(manifests):
    name = manifests["JobSet"]["metadata"]["name"]
    (workers,) = manifests["JobSet"]["spec"]["replicatedJobs"]
    count = workers["template"]["spec"]["completions"]
    job = f"{name}-{workers['name']}-0"
    assert f"`{job}-0`" in PAGE.read_text()
    env = {"HEADLESS_SERVICE": name, "JAX_NUM_PROCESSES": str(count)}
    place = find_place(env | {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": f"{job}-1"})
    assert place.coordinator == f"{job}-0.{name}:55527"


def test_the_job_mounts_what_the_options_name(manifests):
    spec = manifests["Job"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    options = finetune.parse(container["command"][2:])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts.values())
    assert options.zero.swap_dir in mounts
    for path in (options.model, *options.data, options.checkpoint_dir, options.logdir):
        assert path is not None
        assert path.startswith("/shared/")
    assert "/shared" in mounts
    num_gpus = spec["completions"] * container["resources"]["limits"]["nvidia.com/gpu"]
    assert options.mesh == f"fsdp={num_gpus}"
    assert options.batch_size % num_gpus == 0
    codes = [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"]]
    assert codes == [[options.stopped_status, 143], [2]]
