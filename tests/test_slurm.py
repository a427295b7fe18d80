"""The Slurm jobs, with commands of that name that run everything here: what they start, and what they do when stopped.

This proves the scripts' logic. It proves nothing about Slurm.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

STUBS = {
    # options of srun are --name or --name=value
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": 'echo "$@" >>"$CALLS/scontrol"; [ "$1" = requeue ] || printf "%s\\n" ${NODES:-first second}',
    "ssh": 'echo "$@" >>"$CALLS/ssh"; exec /bin/sleep 60',
    "curl": "exit 0",
    "ray": 'echo "$RAY_AUTH_MODE/$RAY_memory_monitor_refresh_ms $RAY_AUTH_TOKEN $*" >>"$CALLS/ray"\n'
    '[ "$1" != start ] || exec /bin/sleep 60',
    "getent": 'echo "$@" >>"$CALLS/getent"; printf "10.0.0.1 STREAM first\\n10.0.0.1 DGRAM\\n"',
    "openssl": "echo 0123456789abcdef0123456789abcdef",
    "sleep": "exec /bin/sleep 0.1",
    # a run whose time is up right after it began, and that ends as `crrl train` and `crrl eval` do
    "crrl": """
echo "$@" >>"$CALLS/crrl"
case "$*" in
*--dry-run*) echo "{\\"run\\": \\"$CALLS/run\\", \\"steps\\": 1}"; exit ;;
*--resume* | *run.steps=0*) exit "${STATUS:-0}" ;;
*" -o "*) run=${*##* } ;;
*) run=$CALLS/run ;;
esac
mkdir -p "$run" && echo began >"$run/log.jsonl"
trap 'exit 130' USR1
kill -USR1 "$PPID"
while :; do /bin/sleep 0.05; done
""",
    # a Python with a vLLM that listens and says nothing
    "python-vllm": f"""
if [ "$1" = -c ]; then echo /extension; exit; fi
echo "$PYTHONPATH $@" >>"$CALLS/vllm"
case "$*" in *--headless*) exec /bin/sleep 60 ;; esac
while [ "$1" != --uds ]; do shift; done
exec {sys.executable} -c 'import socket, sys, time
socket.socket(socket.AF_UNIX).bind(sys.argv[1])
time.sleep(60)' "$2"
""",
}


class Cluster:
    """A folder from which jobs are submitted, and what was called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls = path / "calls"
        self.calls.mkdir()
        (path / "bin").mkdir()
        for name, body in STUBS.items():
            self.stub(name, body)
        shutil.copytree(ROOT / "scripts", path / "scripts")

    def stub(self, name: str, body: str) -> None:
        (self.path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.path / "bin" / name).chmod(0o755)

    def submit(self, script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        spooled = shutil.copy(self.path / "scripts" / "slurm" / script, self.path / "job")  # as Slurm does
        slurm = {"SLURM_SUBMIT_DIR": str(self.path), "SLURM_JOB_ID": f"t{os.getpid()}", "SLURMD_NODENAME": "first"}
        slurm |= {"SLURM_JOB_NODELIST": "nodes[1-2]", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "2"}
        ours = {"CALLS": str(self.calls), "CRRL": "crrl", "PATH": f"{self.path / 'bin'}:{os.environ['PATH']}"}
        env = {**os.environ, **slurm, **ours, **more}
        return subprocess.run(["bash", str(spooled), *arguments], capture_output=True, text=True, env=env, cwd="/")

    def called(self, name: str) -> list[str]:
        file = self.calls / name
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_a_job_that_runs_out_of_time_is_queued_again_and_goes_on(cluster: Cluster) -> None:
    done = cluster.submit("train.sh", "a.toml", "train.lr=1e-5")
    assert done.returncode == 130, done.stderr
    assert cluster.called("scontrol") == [f"requeue t{os.getpid()}"]
    again = cluster.submit("train.sh", "a.toml", "train.lr=1e-5")
    assert again.returncode == 0, again.stderr
    assert len(cluster.called("scontrol")) == 1, "a run that is done is not queued again"
    asked = "train a.toml train.lr=1e-5"
    plan = f"{asked} --dry-run --json"
    assert cluster.called("crrl") == [plan, asked, plan, f"{asked} --resume"]


@pytest.mark.parametrize("status", [1, 2, 4, 130])
def test_a_failed_or_cancelled_job_is_not_queued_again(cluster: Cluster, status: int) -> None:
    (cluster.calls / "run").mkdir()
    (cluster.calls / "run" / "log.jsonl").write_text("began\n")
    assert cluster.submit("train.sh", "a.toml", STATUS=str(status)).returncode == status
    assert not cluster.called("scontrol")


def test_nodes_serve_replicas_of_one_server_behind_a_tunnel(cluster: Cluster) -> None:
    """The server is on the first serving node."""
    more = {"MODEL": "/models/m", "VLLM_PYTHON": "python-vllm", "VLLM_ARGS": "--tensor-parallel-size 4", "PORT": "8123"}
    more |= {"NODES": "first second third", "REPLICAS": "2"}
    done = cluster.submit("nodes.sh", "a.toml", "run.steps=0", **more)
    assert done.returncode == 0, done.stderr
    private = f"/tmp/crrl-t{os.getpid()}/socket"
    one, other = sorted(cluster.called("vllm"), key=lambda call: "--headless" in call)
    assert one.startswith(f"/extension -m vllm.entrypoints.openai.api_server --uds {private} --model /models/m")
    assert "serve --headless --data-parallel-start-rank 2 --model /models/m" in other
    for call in (one, other):
        assert call.endswith(
            " --tensor-parallel-size 4 --data-parallel-size 4 --data-parallel-size-local 2"
            " --data-parallel-address 10.0.0.1 --data-parallel-rpc-port 8123"
        )
    assert [call.split(" -L ")[1] for call in cluster.called("ssh")] == [f"127.0.0.1:8123:{private} second"]
    assert cluster.called("crrl")[-1] == (
        "train a.toml run.steps=0 model.path=/models/m engine=vllm engine.options.url=http://127.0.0.1:8123"
        f" engine.weights_dir={cluster.path}/weights"
    )
    assert not Path(private).parent.exists()


def test_a_single_serving_node_has_no_replicas(cluster: Cluster) -> None:
    more = {"MODEL": "/models/m", "VLLM_PYTHON": "python-vllm", "VLLM_ARGS": "--tensor-parallel-size 4"}
    done = cluster.submit("nodes.sh", "a.toml", "run.steps=0", **more)
    assert done.returncode == 0, done.stderr
    [server] = cluster.called("vllm")
    assert server.endswith(" crrl_worker.Extension --tensor-parallel-size 4")
    assert " engine.options.url=http://127.0.0.1:8000 " in cluster.called("crrl")[-1]


@pytest.mark.parametrize(
    ("script", "program", "log", "more"),
    [
        ("nodes.sh", "python-vllm", "engine", {"MODEL": "/models/m", "VLLM_PYTHON": "python-vllm"}),
        ("ray.sh", "ray", "ray", {"RAY": "ray"}),
    ],
)
def test_a_program_that_does_not_start_ends_the_job(
    cluster: Cluster, script: str, program: str, log: str, more: dict[str, str]
) -> None:
    cluster.stub(program, '[ "$1" = -c ] || { echo no GPU >&2; exit 7; }')
    done = cluster.submit(script, "a.toml", **more)
    assert done.returncode and not cluster.called("crrl")
    assert "no GPU" in (cluster.path / "logs" / f"{log}-t{os.getpid()}.log").read_text()


def test_nodes_that_make_episodes(cluster: Cluster) -> None:
    done = cluster.submit("ray.sh", "a.toml", "run.steps=0", RAY="ray", PORT="6400", HEAD_CPUS="2")
    assert done.returncode == 0, done.stderr
    modes, tokens, commands = zip(*(call.split(" ", 2) for call in cluster.called("ray")), strict=True)
    assert set(modes) == {"token/0"} and len(set(tokens)) == 1 and len(tokens[0]) == 32, "others are kept out"
    common = "--num-gpus=0 --disable-usage-stats --block"
    assert sorted(commands) == [
        "health-check --address first:6400",
        f"start --address=first:6400 {common}",
        f"start --head --port=6400 --num-cpus=2 --include-dashboard=false {common}",
    ]
    asked = "train a.toml run.steps=0 rollout.executor=ray rollout.ray.address=first:6400"
    assert cluster.called("crrl") == [f"{asked} --dry-run --json", asked]


def test_nodes_that_learn_together(cluster: Cluster) -> None:
    """One torchrun fails, then one is killed, and each is started again; all have one secret."""
    cluster.stub(
        "crrl",
        'echo "$@" >>"$CALLS/crrl"\ncase "$*" in\n*--dry-run*) echo "{\\"run\\": \\"$CALLS/run\\"}" ;;\n'
        '*) until [ "$(wc -l <"$CALLS/torchrun")" -ge 5 ]; do /bin/sleep 0.05; done ;;\nesac',
    )
    cluster.stub(
        "torchrun",
        'echo "$CRRL_LEARNER_SECRET $TORCH_DISABLE_SHARE_RDZV_TCP_STORE $@" >>"$CALLS/torchrun"\n'
        'mkdir "$CALLS/again" 2>/dev/null && exit 1\nmkdir "$CALLS/killed" 2>/dev/null && kill -9 $$; exit 0',
    )
    more = {"NODES": "first second third", "PORT": "29600", "GPUS": "2", "TORCHRUN": "torchrun"}
    done = cluster.submit("learners.sh", "a.toml", "run.steps=0", **more)
    assert done.returncode == 0, done.stderr
    assert cluster.called("torchrun") == 5 * [
        f"{'0123456789abcdef' * 2} 1 --nnodes=3 --nproc-per-node=2 --max-restarts=100 --rdzv-backend=c10d"
        f" --rdzv-endpoint=10.0.0.1:29601 --rdzv-id=t{os.getpid()} -m coderepairrl.learn.torchrun 10.0.0.1:29600"
    ]
    asked = "train a.toml run.steps=0 train.processes=6 train.listen=10.0.0.1:29600"
    asked += f" engine.weights_dir={cluster.path}/weights"
    assert cluster.called("crrl") == [f"{asked} --dry-run --json", asked]
    assert cluster.called("getent") == ["ahostsv4 first"]


def test_each_of_an_array_evaluates_its_own_and_goes_on(cluster: Cluster) -> None:
    (cluster.path / "policies.txt").write_text("runs/a/checkpoints/00010\nruns/a/checkpoints/00020\n")
    done = cluster.submit("evaluate.sh", "policies.txt", "a.toml", "eval.attempts=4")
    assert done.returncode == 130, done.stderr
    assert cluster.called("scontrol") == [f"requeue t{os.getpid()}"]
    again = cluster.submit("evaluate.sh", "policies.txt", "a.toml", "eval.attempts=4")
    assert again.returncode == 0, again.stderr
    asked = "eval a.toml eval.attempts=4 --policy runs/a/checkpoints/00020 -o runs/evaluate-9-2"
    assert cluster.called("crrl") == [asked, f"{asked} --resume"]
    missing = cluster.submit("evaluate.sh", "policies.txt", "a.toml", SLURM_ARRAY_TASK_ID="3")
    assert missing.returncode == 2 and "has no line 3" in missing.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None and not os.environ.get("CI"), reason="shellcheck not installed")
def test_the_image_copies_files_that_exist() -> None:
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (ROOT / "scripts" / "crrl.def").read_text().splitlines():
        if line.startswith("%"):
            lines = sections.setdefault(line.split()[0], [])
        else:
            lines.append(line)
    assert {"%files", "%post", "%runscript", "%test"} <= set(sections)
    for line in filter(str.strip, sections["%files"]):
        assert (ROOT / line.split()[0]).exists(), line
    for name in ("%post", "%runscript", "%test"):
        script = "\n".join(["#!/bin/sh", *sections[name]])
        done = subprocess.run(["shellcheck", "-"], input=script, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stdout}"
