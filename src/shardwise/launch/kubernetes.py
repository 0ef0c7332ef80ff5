"""Kubernetes: a TrainingRuntime with a TrainJob (Kubeflow Trainer v2), and a JobSet for clusters without it.

    kubectl apply --> TrainJob --> JobSet --> one pod for each node: agent, its ranks
    a pod is preempted, or ranks end with 75 --> the JobSet starts all pods again, which is not counted
    another failure --> the same, at most `RESTARTS` times

Pods find the first one by its name in the JobSet's network, which both manifests set up.
"""

from __future__ import annotations

import re
from typing import Any

from shardwise.errors import Stopped
from shardwise.launch.engines import LaunchEngine
from shardwise.launch.launch_job import LaunchJob
from shardwise.launch.lines import AGENT, header, host_words
from shardwise.launch.yaml import to_yaml

RESTARTS = 3
GRACE_S = 120  # seconds between SIGTERM and SIGKILL
NODE = "node"  # name of the container and of the replicated job, as in Kubeflow's own runtimes
STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def _render(job: LaunchJob) -> dict[str, str]:
    """Returns {file name: YAML text} of a TrainingRuntime with its TrainJob, and of a JobSet for other clusters."""
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name},
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {"spec": _job_set(job, _pod(job, ["sleep", "infinity"]), STEP)},
        },
    }
    # torchrun reads PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and the like, which the runtime sets
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": {
                "image": job.image,
                "command": _command(job, [*AGENT, "--no-python", *map(_kept, job.command)]),
                "numNodes": job.nodes,
                "numProcPerNode": job.per_node,
                "resourcesPerNode": _resources(job),
            },
            **_deadline(job),
        },
    }
    first = f"{job.name}-{NODE}-0-0.{job.name}"
    words = host_words(job.nodes, job.per_node, "$(JOB_COMPLETION_INDEX)", first, job.port)
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": _job_set(job, _pod(job, _command(job, [*AGENT, *words, *map(_kept, job.command)]))),
    }
    head = f"{header(job)}\n"
    return {
        f"{job.name}-trainjob.yaml": f"{head}{to_yaml(runtime)}---\n{to_yaml(train_job)}",
        f"{job.name}-jobset.yaml": f"{head}# for a cluster without Kubeflow's trainer\n{to_yaml(job_set)}",
    }


def _deadline(job: LaunchJob) -> dict[str, int]:
    return {"activeDeadlineSeconds": job.minutes * 60} if job.minutes else {}


def _command(job: LaunchJob, words: list[str]) -> list[str]:
    """Returns a container's command: `words`, in a shell after the job's setup if there is one."""
    if job.setup:
        words = ["bash", "-c", f'{_kept(job.setup)}\nexec "$@"', "bash", *words]
    return words


def _kept(word: str) -> str:
    """Returns the word escaped for Kubernetes, which expands `$(NAME)` and turns `$$` into `$`."""
    return re.sub(r"\$(?=[$(])", "$$", word)


def _job_set(job: LaunchJob, pod: dict[str, Any], labels: dict[str, str] | None = None) -> dict[str, Any]:
    """Returns a JobSet's spec, with one pod for each node.

    pod     spec of a pod
    labels  of the replicated job's template, given for a TrainJob's runtime (the TrainJob has the time limit); None: a
            JobSet by itself

    If the job has `goes_on`, all pods are started again after a preempted pod or a save (not counted), and `RESTARTS`
    times after other failures; else never.
    """
    rules: list[dict[str, Any]] = [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]
    if job.goes_on:
        codes = {"containerName": NODE, "operator": "In", "values": [Stopped.exit_code]}
        rules.append({"action": "FailJob", "onExitCodes": codes})
    again = {
        "name": "saved",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    policy = {"maxRestarts": RESTARTS, "rules": [again]} if job.goes_on else {"maxRestarts": 0}
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "parallelism": job.nodes,
        "completions": job.nodes,
        "backoffLimit": 0,  # a single pod is never restarted, since ranks need all pods anew
        "podFailurePolicy": {"rules": rules},
        **({} if labels else _deadline(job)),
        "template": {"spec": pod},
    }
    return {
        "network": {"enableDNSHostnames": True, "subdomain": job.name},
        "failurePolicy": policy,
        "replicatedJobs": [
            {
                "name": NODE,
                "replicas": 1,
                "template": {**({"metadata": {"labels": labels}} if labels else {}), "spec": spec},
            }
        ],
    }


def _pod(job: LaunchJob, command: list[str]) -> dict[str, Any]:
    """Returns the spec of one node's pod: its container with this command, the folder of runs, shared memory."""
    secrets = [{"name": name, "valueFrom": {"secretKeyRef": {"name": job.name, "key": name}}} for name in job.passed]
    container = {
        "name": NODE,
        "image": job.image,
        "command": command,
        "env": [*({"name": name, "value": _kept(value)} for name, value in job.written.items()), *secrets],
        "resources": _resources(job),
        "volumeMounts": [{"name": "runs", "mountPath": job.folder}, {"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": job.volume}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _resources(job: LaunchJob) -> dict[str, Any]:
    """Returns the requests and limits of one pod; {} if the job asks for no resources."""
    limits: dict[str, Any] = {}
    if job.accelerated:
        limits[job.accelerator or "nvidia.com/gpu"] = job.per_node
    if job.cpus_per_rank:
        limits["cpu"] = str(job.per_node * job.cpus_per_rank)
    return {"requests": limits, "limits": limits} if limits else {}


def _remarks(job: LaunchJob) -> list[str]:
    if not job.passed:
        return []
    words = " ".join(f'--from-literal={name}="${name}"' for name in job.passed)
    return [f"before it: kubectl create secret generic {job.name} {words}"]


ENGINE = LaunchEngine(
    "k8s",
    _render,
    lambda job, path: ["kubectl", "apply", "-f", path],
    takes=("minutes", "image", "volume", "accelerator"),
    needs=(
        ("image", "containers of which have torch and shardwise, such as --image registry/team/shardwise:1"),
        ("volume", "a claim that all nodes may write, --volume CLAIM: else each pod has a folder of its own, which "
                   "ends with it"),
    ),
    status="kubectl get pods -l jobset.sigs.k8s.io/jobset-name={name}",
    follow="kubectl logs -f -l jobset.sigs.k8s.io/jobset-name={name} --all-containers",
    stop="kubectl delete trainjob {name}",
    remarks=_remarks,
)  # fmt: skip
