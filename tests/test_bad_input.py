"""Bad input, each through the real command: a named error, and nothing is lost."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import gguf
import jax
import numpy as np
import pytest

from experiments import grpo
from rlpost.training.checkpoints import Checkpoints
from rlpost.training.config import reload
from rlpost.training.metrics import read, without_clock
from rlpost.training.online import online
from rlpost.training.whole import damaged
from rlpost.training.workdir import Workdir
from tests.tiny_model import byte_letters, write_model

ROOT = pathlib.Path(__file__).parents[1]
SMOKE = f"--config={ROOT}/configs/grpo.py:smoke"
# Variants as a user writes them: the smoke run with something else in it.
FILE = """
from configs import grpo

def get_config(variant):
    config = grpo.smollm2() if variant == "files" else grpo.smoke()
    if variant == "context":
        config.model.context = 4
    if variant == "files":
        config.steps, config.prompts, config.rows = 1, 2, 16
        config.model.weights = ""
        config.evaluation.prompts = 2
        config.evaluation.answers = 1
        config.sampling.max_new_tokens = 4
    return config
"""


@pytest.fixture
def command(tmp_path, capsys, monkeypatch):
    """The experiment's command on one run folder: (exit code, all that it said)."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "own.py").write_text(FILE)

    def run(*argv, config=SMOKE, workdir=tmp_path / "run"):
        if not config.startswith("--"):
            config = f"--config={tmp_path}/own.py:{config}"
        code = 0
        try:
            grpo.main([config, f"--workdir={workdir}", *argv])
        except SystemExit as leaving:
            code = leaving.code
        told = capsys.readouterr()
        # In one line what is wrong; where it arose is in a file.
        first, *_ = told.err.splitlines() or [""]
        assert first.startswith("error: ") if code in (1, 2) else not told.err
        return code, told.out + told.err

    return run


def lines(path):
    return [without_clock(line) for line in read(path)]


# What makes no sense is said before any work.


@pytest.mark.parametrize(
    "change, said",
    [
        ("--config.stepss=3", "config has no 'stepss'; did you mean steps"),
        ("--config.model.witdh=3", "config.model has no 'witdh'; did you mean width?"),
        ("--config.steps=many", "steps"),
        ("--config.group_size=1", "config.group_size=1: an answer is judged by the"),
        ("--config.group_size=0", "config.group_size=0: an answer is judged by the"),
        ("--config.rows=0", "these must be at least 1: "),
        ("--config.sampling.temperature=0", "a run must sample above temperature 0"),
        (
            "--config.objective.kl=0.1",
            "config.objective.kl=0.1 is the price of leaving",
        ),
        ("--config.evaluation.prompts=0", "the prompt set is empty: 78 tasks to train"),
    ],
)
def test_a_config_that_makes_no_sense(command, tmp_path, change, said):
    code, told = command(change)
    assert code == 2
    assert f"error: {said}" in told or said in told
    assert not (tmp_path / "run/checkpoints").exists()
    assert not (tmp_path / "run/pretrain").exists()


@pytest.mark.parametrize(
    "change, said",
    [
        ("--config.data.held_out=1.0", "with held_out=1.0 the split 'train' is all"),
        ("--config.sampling.max_new_tokens=0", "max_new_tokens must be in [1, inf]"),
        ("--config.model.heads=3", "heads=3 do not divide width=16: set head_size"),
        ("--config.steps=-1", "steps must be at least 0, got -1"),
        ("--config.objective.clip=(3, 3)", "low must be in [0.0, 1.0], got 3"),
    ],
)
def test_a_value_that_a_part_refuses(command, tmp_path, change, said):
    code, told = command(change, "--config.pretrain.steps=0")
    assert code == 1
    assert said in told
    kept = tmp_path / "run/traceback.txt"
    assert f"where: {kept}" in told
    assert said in kept.read_text()


def test_a_prompt_longer_than_the_context(command):
    code, told = command(config="context")
    assert code == 2
    assert "the longest prompt has 5 tokens, which leaves no room for an answer" in told
    assert "the model's context of 4" in told


# Files that are wrong.


@pytest.mark.slow
def test_a_token_outside_the_vocabulary(command, tmp_path):
    folder = write_model(tmp_path / "model", vocab=100)
    code, told = command(f"--config.model.weights={folder}", config="files")
    assert code == 1
    assert "is outside the vocabulary, ids 0 to 99" in told
    assert "request 0: prompt: token id" in told


def test_a_family_with_too_few_tasks_leaves_no_prompts(command, tmp_path):
    folder = write_model(tmp_path / "model")
    code, told = command(
        f"--config.model.weights={folder}",
        "--config.evaluation.prompts=30",
        "--config.data.parameters.min_terms=1",
        "--config.data.parameters.max_terms=1",
        config="files",
    )
    assert code == 2
    assert "the prompt set is empty: 0 tasks to train on, " in told
    assert "ask for fewer config.evaluation.prompts" in told


def write_gguf(path):
    writer = gguf.GGUFWriter(path, "llama")
    letters = [*byte_letters(), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(letters)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {"token_embd": (len(letters), 32), "output_norm": (32,)}
    for name in ("attn_norm", "ffn_norm"):
        shapes[f"blk.0.{name}"] = (32,)
    for name in ("q", "k", "v", "output"):
        shapes[f"blk.0.attn_{name}"] = (32, 32)
    for name in ("gate", "up", "down"):
        shapes[f"blk.0.ffn_{name}"] = (32, 32)
    for name, shape in shapes.items():
        kind = np.float64 if name.endswith("ffn_up") else np.float32
        writer.add_tensor(f"{name}.weight", np.ones(shape, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_of_a_type_that_cannot_be_read(command, tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    code, told = command(f"--config.model.weights={path}", config="files")
    assert code == 1
    assert f"{path}: tensor 'blk.0.ffn_up.weight' is of type F64" in told
    assert "convert the file to another" in told


def test_a_gguf_file_of_a_type_that_is_not_known(command, tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    name = b"blk.0.ffn_up.weight"
    content = bytearray(path.read_bytes())
    # After the name: the number of axes, their sizes, and the type.
    at = content.index(name) + len(name) + 4 + 2 * 8
    assert content[at : at + 4] == int(gguf.GGMLQuantizationType.F64).to_bytes(
        4, "little"
    )
    content[at : at + 4] = (999).to_bytes(4, "little")
    path.write_bytes(content)
    code, told = command(f"--config.model.weights={path}", config="files")
    assert code == 1
    assert f"{path}: a tensor is of a type that the gguf package does not know" in told
    assert "999" in told
    assert "update the package, or convert the file" in told


# Rewards that teach nothing.


def with_reward(monkeypatch, reward):
    """The experiment with another reward, as one who edits it has it."""
    build = grpo.build

    def changed(config, model=None):
        return dataclasses.replace(build(config, model), reward=reward)

    monkeypatch.setattr(grpo, "build", changed)


@pytest.mark.slow
def test_a_reward_that_always_raises(command, tmp_path, monkeypatch):
    def reward(samples):
        raise KeyError("verdict")

    with_reward(monkeypatch, reward)
    code, told = command()
    assert code == 1
    assert "8 of 8 samples could not be scored" in told
    assert "KeyError: 'verdict'" in told
    # The lessons before it are kept.
    assert (tmp_path / "run/pretrain/saved.json").exists()
    recorded = (tmp_path / "run/errors.jsonl").read_text()
    assert "verdict" in recorded
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    assert command()[0] == 0  # the mended one goes on in the same folder


@pytest.mark.slow
def test_rewards_that_are_equal_for_the_whole_run(command, tmp_path, monkeypatch):
    with_reward(monkeypatch, lambda samples: {"exact": np.ones(len(samples))})
    code, told = command("--config.steps=11")
    assert code == 0
    message = "for 10 steps all rewards within a group were equal, all 1: nothing is"
    assert message in told
    folder = tmp_path / "run"
    assert any(x["kind"] == "no signal" for x in read(folder / "errors.jsonl"))
    assert message in (folder / "report.html").read_text()
    config = reload(folder / "config.json")
    with Workdir(folder) as workdir:
        before = grpo.taught(config, workdir).params
    after = grpo.restored(config, folder).params
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(x, y)


# A group may have any size: groups are ids, and microbatches cut where they like.


@pytest.mark.slow
def test_a_group_size_that_fits_nothing_trains_all_the_same(command, tmp_path):
    # The 12 rows of 4 groups in microbatches of 5, 5 and 2: as in one of 12.
    short = ("--config.steps=2", "--config.pretrain.steps=120")
    code, _ = command("--config.group_size=3", "--config.rows=5", *short)
    assert code == 0
    ragged = list(read(tmp_path / "run/metrics.jsonl"))
    code, _ = command(
        *("--config.group_size=3", "--config.rows=12", *short),
        workdir=tmp_path / "other",
    )
    assert code == 0
    whole = list(read(tmp_path / "other/metrics.jsonl"))
    assert max(line.get("gradient/norm", 0) for line in whole) > 0
    for a, b in zip(ragged, whole, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() & {"loss/policy", "reward/mean", "gradient/norm"}:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name


# Folders and disks.


@pytest.mark.slow
def test_checkpoints_half_deleted(command, tmp_path):
    assert command()[0] == 0
    folder = tmp_path / "run"
    expected = lines(folder / "metrics.jsonl")
    data = sorted((folder / "checkpoints/00000003/state/d").iterdir())
    for path in data[::2] or data:
        path.unlink()
    code, told = command()
    assert code == 0
    assert "the checkpoint of step 3 is damaged: " in told
    assert "is missing" in told
    assert "went back to the checkpoint of step 2" in told
    assert lines(folder / "metrics.jsonl") == expected

    for step in (2, 3):
        shutil.rmtree(folder / f"checkpoints/{step:08d}/state")
    code, told = command()
    assert code == 1
    assert "is whole" in told
    assert "put the missing files back, or remove the folder to start anew" in told
    shutil.rmtree(folder / "checkpoints")
    code, told = command()
    assert code == 1
    assert "the checkpoints of" in told
    assert "are gone, the last was of step 3" in told
    # Nothing was thrown away meanwhile.
    assert lines(folder / "metrics.jsonl") == expected


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder, leave):
    """Fill the disk up to `leave` bytes; the file that does it."""
    ballast = folder / "ballast"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with contextlib.suppress(OSError):
        ballast.write_bytes(bytes(max(0, free - leave)))
    return ballast


@pytest.mark.slow
@pytest.mark.parametrize("leave", [0, 24_000, 60_000])
def test_a_disk_that_is_full(command, small_disk, tmp_path, leave):
    expected = tmp_path / "whole"
    assert command("--config.steps=5", workdir=expected)[0] == 0
    run = small_disk / "run"
    assert command("--config.steps=2", workdir=run)[0] == 0
    more = ("--config.steps=5", "--change_config")
    ballast = fill(small_disk, leave)
    code, told = command(*more, workdir=run)
    assert code == 1, told
    assert "No space left on device" in told
    assert "Event loop" not in told
    assert (run / "checkpoints/00000002").is_dir()
    for one in (run / "checkpoints").iterdir():
        assert not one.name.isdecimal() or damaged(one) is None
    ballast.unlink()
    code, told = command(*more, workdir=run)
    assert code == 0, told
    assert "resumed after update" in told
    assert state(run) == state(expected)
    # (What a run of fewer updates says last, one of more does not say.)
    train = [x for x in lines(run / "metrics.jsonl") if x["kind"] == "train"]
    assert train == [
        x for x in lines(expected / "metrics.jsonl") if x["kind"] == "train"
    ]


def state(folder):
    """The arrays of the last checkpoint, as bytes."""
    program = online(grpo.build(reload(folder / "config.json")))
    found = Checkpoints(folder / "checkpoints").restore(program.state)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(found.state)]


def test_a_second_process_on_the_same_folder(tmp_path):
    with Workdir(tmp_path / "run") as first:
        first.write_json("config.json", {"of": "the first"})
        second = subprocess.run(
            [
                *(sys.executable, "-m", "experiments.grpo"),
                *(SMOKE, f"--workdir={tmp_path}/run"),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert second.returncode == 1
    told = second.stderr.strip()
    assert told.startswith(f"error: {tmp_path}/run is in use by process {os.getpid()}")
    assert told.endswith("wait for it, end it, or use another folder")
    kept = json.loads((tmp_path / "run/config.json").read_text())
    assert kept == {"of": "the first"}
