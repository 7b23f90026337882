"""Command lines and environments of the ranks (tests/integration/test_launch.py and
test_multi_host.py run them).
"""

import shlex
import socket
import sys
from pathlib import Path

import pytest

from megatron.config import UserError
from megatron.launcher.commands import (
    forwarded_variables,
    job_command,
    local_environment,
    make_nodes,
    node_command,
    pdsh_command,
    rank_command,
    reserved_port,
    split_secrets,
)
from megatron.launcher.node import Node, decode
from megatron.launcher.resources import Resources
from megatron.launcher.script_arguments import decode_config
from tests.support.configs import make_config
from tests.support.errors import assert_rejected

TWO_HOSTS = Resources({"n1": [0, 1], "n2": [0, 1]}, "hostfile", on_cpu=False)


def test_rank_command():
    words = rank_command(make_config(seed=5), ["/kerple_command.py", "train"], ["--lengths", "8"])
    assert words[:5] == [sys.executable, "-u", "/kerple_command.py", "train", "--neox-config"]
    assert decode_config(words[5]).training.seed == 5
    assert words[6:] == ["--lengths", "8"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"launcher": "slurm", "comment": "a run", "account": "lab", "num_gpus": 2},
            "srun --ntasks=4 --nodes=2 --ntasks-per-node=2 --nodelist=n1,n2 --kill-on-bad-exit=1 "
            "--export=ALL --gpus-per-node=2 '--comment=a run' --account=lab",
        ),
        ({"launcher": "openmpi"}, "mpirun -n 4 -host n1:2,n2:2 --bind-to none -x A -x B"),
    ],
)
def test_job_command(keys, expected, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    words = job_command(make_config(**keys), TWO_HOSTS, ["A", "B"], ["python", "train.py"])
    assert words == [*shlex.split(expected), "python", "train.py"]


def test_pdsh_and_node_command(tmp_path, monkeypatch):
    folder = tmp_path / "a b%"
    folder.mkdir()
    monkeypatch.chdir(folder)
    resources = Resources({"n1": [0, 1], "n2": [3]}, "hostfile", on_cpu=False)
    remote = node_command(
        make_nodes(resources, "10.0.0.1", 29500), "/tmp/x.", ["python", "100%"], {"A": "it's %n"}
    )
    assert pdsh_command(["n1", "n2"], remote) == ["pdsh", "-S", "-f", "2", "-w", "n1,n2", remote]
    # What pdsh sends to the second host, and what its shell makes of it.
    sent = remote.replace("%%", "@").replace("%n", "1").replace("@", "%")
    (
        cd,
        directory,
        and_,
        exec_,
        env,
        assignment,
        python,
        unbuffered,
        program,
        index,
        nodes,
        *rest,
    ) = shlex.split(sent)
    assert [cd, directory, and_, exec_, env, assignment] == [
        "cd",
        str(folder),
        "&&",
        "exec",
        "env",
        "A=it's %n",
    ]
    assert [python, unbuffered, Path(program).name, index] == [sys.executable, "-u", "node.py", "1"]
    assert rest == ["/tmp/x.", "python", "100%"]
    expected = [
        Node("n1", [0, 1], 0, 3, "10.0.0.1", 29500),
        Node("n2", [3], 2, 3, "10.0.0.1", 29500),
    ]
    assert [Node(**each) for each in decode(nodes)] == expected


def test_a_thousand_hosts_fit_into_a_command_line():
    resources = Resources(
        {f"gpu-node-{i:04d}": list(range(8)) for i in range(1000)}, "hostfile", on_cpu=False
    )
    remote = node_command(make_nodes(resources, "10.0.0.1", 29500), "/tmp/x.", ["python"], {})
    assert len(remote) < 16 * 1024  # Linux accepts 128 KiB per word


def test_forwarded_variables(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    environment = {
        "NCCL_IB_HCA": "mlx5_0,mlx5_1",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTHONPATH": "/p",
    }
    expected = {"NCCL_IB_HCA": "mlx5_0,mlx5_1", "PYTHONPATH": "/p"}
    assert forwarded_variables(environment) == expected
    (tmp_path / ".deepspeed_env").write_text(
        '# a comment\nMINE = x=y\nexport PYTHONPATH=\'/q\'\nA="b c"\nB="\n\n'
    )
    expected |= {"MINE": "x=y", "PYTHONPATH": "/q", "A": "b c", "B": '"'}
    assert forwarded_variables(environment) == expected
    (tmp_path / ".deepspeed_env").write_text(
        "A=/q:$PYTHONPATH\nB=\"${A}/b $ 1\"\nC='$PATH'\nD=$UNSET1\n"
    )
    assert_rejected(r"deepspeed_env: the value of D (?!.*UNSET1)", forwarded_variables, environment)
    (tmp_path / ".deepspeed_env").write_text(
        "PYTHONPATH=/q:$PYTHONPATH\nB=\"${PYTHONPATH}/b $ 1\"\nC='$PATH'\n"
    )
    values = forwarded_variables(environment)
    assert (values["PYTHONPATH"], values["B"], values["C"]) == ("/q:/p", "/q:/p/b $ 1", "$PATH")
    (tmp_path / ".deepspeed_env").unlink()
    (tmp_path / "other").write_text("A=b\n\n=c\n")
    assert_rejected("other:3: not NAME=VALUE", forwarded_variables, {"DS_ENV_FILE": "other"})
    (tmp_path / "other").write_text("A=b\n0123456789abcdef\n")
    with pytest.raises(UserError, match=r"other:2: not NAME=VALUE") as caught:
        forwarded_variables({"DS_ENV_FILE": str(tmp_path / "other")})
    assert "0123456789abcdef" not in str(caught.value)
    with pytest.raises(UserError, match="DS_ENV_FILE is nowhere, but there is no such file"):
        forwarded_variables({"DS_ENV_FILE": "nowhere"})
    (tmp_path / "other").write_bytes(b"NCCL_X=\xff")
    assert_rejected(
        "other: not UTF-8; it must be a text file", forwarded_variables, {"DS_ENV_FILE": "other"}
    )


def test_secrets_are_recognized():
    variables = {
        "WANDB_API_KEY": "1",
        "HF_TOKEN": "2",
        "WANDB_BASE_URL": "https://me:pw@host",
        "HF_HOME": "/x",
    }
    assert split_secrets(variables) == (
        {"HF_HOME": "/x"},
        ["WANDB_API_KEY", "HF_TOKEN", "WANDB_BASE_URL"],
    )
    names = (
        "MLFLOW_TRACKING_TOKEN HUGGINGFACE_TOKEN AWS_SESSION_TOKEN AZURE_STORAGE_KEY MYSQL_PWD "
        "DB_PASS"
    )
    names += " AZURE_STORAGE_CONNECTION_STRING SSH_PASSPHRASE AWS_CREDENTIALS JWT PGPASSWORD"
    assert split_secrets(dict.fromkeys(names.split(), "1")) == ({}, names.split())
    harmless = dict.fromkeys(
        ["TOKENIZERS_PARALLELISM", "PWD", "AWS_TOKEN_FILE", "NCCL_IB_PKEY", "SSH_ASKPASS"], "1"
    )
    assert split_secrets(harmless) == (harmless, [])


def test_local_environment(monkeypatch, capsys):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    cpu = Resources({"localhost": [0, 1]}, None, on_cpu=True)
    variables = local_environment(cpu, {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "3"})
    assert variables == {
        "HOME": "/h",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "4",
    }
    assert "4 thread(s)" in capsys.readouterr().out
    assert local_environment(cpu, {"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1"
    gpus = Resources({"localhost": [2, 5]}, None, on_cpu=False)
    assert local_environment(gpus, {"CUDA_VISIBLE_DEVICES": "3"}) == {"CUDA_VISIBLE_DEVICES": "2,5"}
    assert capsys.readouterr().out == ""


def test_reserved_port_can_be_listened_on_and_is_given_to_no_other_process():
    with reserved_port() as port, reserved_port() as second, socket.socket() as listener:
        assert port != second
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        listener.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            assert connection.getpeername()[1] == port
