"""The command rlpost, on a run, on weights, and on what is neither."""

import dataclasses
import io
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import grpo
from rlpost import cli
from rlpost.models import merge
from rlpost.models.weights import load
from rlpost.sampling.chat import prompt_ids
from rlpost.sampling.language_model import load_language_model
from rlpost.sampling.sampler import Request, Sampler
from rlpost.sampling.watched import sample_watched
from rlpost.training.checkpoints import Checkpoints
from rlpost.training.config import load as load_config
from rlpost.training.config import plain
from rlpost.training.online import online
from rlpost.training.workdir import Workdir
from tests.tiny_model import write_model

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("weights") / "model")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, weights):
    """A run of adapters as it is after a checkpoint; its pairs are not zero."""
    file = tmp_path_factory.mktemp("config") / "own.py"
    file.write_text(
        "from configs import grpo\n\n"
        "def get_config():\n"
        "    config = grpo.smollm2()\n"
        f"    config.model.weights = {str(weights)!r}\n"
        "    config.evaluation.prompts = 2\n"
        "    return config\n"
    )
    config = load_config(str(file))
    folder = tmp_path_factory.mktemp("runs") / "run"
    program = online(grpo.build(config))
    state = program.state["policy"]
    # As if it had been trained: adapters are zero at first.
    params = jax.tree.map(lambda x: x + 0.3, state.params)
    with Workdir(folder) as workdir:
        workdir.record("config", plain(config))
        workdir.record("choices", {"experiment": "grpo"})
    trained = {"policy": dataclasses.replace(state, params=params)}
    host = {name: kept.get_state() for name, kept in program.host.items()}
    Checkpoints(folder / "checkpoints").save(
        3, trained, {"elapsed": 1.0, "structures": host}
    )
    return folder, program.params(trained)


def call(capsys, *argv):
    code = cli.main([str(a) for a in argv])
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    return code, told.out, told.err


def drawn(model, prompt, count, **options):
    """The texts that the sampler gives when it is asked directly."""
    ids = prompt_ids(model.tokenizer, prompt)
    length = len(ids) + options["max_new_tokens"]
    stop_ids = model.tokenizer.stop_ids
    requests = [
        Request(prompt=ids, seed=row, stop_ids=stop_ids, **options)
        for row in range(count)
    ]
    sampler = Sampler(model.policy, slots=count, length=length)
    rollout = sampler.sample(model.params, requests)
    return [
        model.tokenizer.decode(rollout.tokens[row, len(ids) : rollout.length[row]])
        for row in range(count)
    ]


def test_a_model_is_asked_in_its_template(weights, capsys):
    model = load_language_model(str(weights))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    (expected,) = drawn(model, messages, 1, max_new_tokens=20)
    code, out, err = call(
        capsys,
        *("sample", weights, "--prompt", "Hi", "--system", "Be brief."),
        *("--max_new_tokens", 20),
    )
    assert (code, out, err) == (0, expected + "\n", "")


def test_a_raw_prompt_is_taken_as_it_is(weights, capsys):
    model = load_language_model(str(weights))
    expected = drawn(model, "Hi", 2, max_new_tokens=12, temperature=0.7, top_p=0.9)
    code, out, _ = call(
        capsys,
        *("sample", weights, "--prompt", "Hi", "--raw", "--count", 2),
        *("--max_new_tokens", 12, "--temperature", 0.7, "--top_p", 0.9),
    )
    assert code == 0
    assert expected[0] != expected[1]
    assert f"--- answer 1 of 2\n{expected[0]}\n" in out
    assert f"--- answer 2 of 2\n{expected[1]}\n" in out


def test_prompts_come_from_standard_input_too(weights, capsys, monkeypatch):
    model = load_language_model(str(weights))
    texts = [drawn(model, p, 1, max_new_tokens=4)[0] for p in ("one", "two")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    code, out, _ = call(capsys, "sample", weights, "--raw", "--max_new_tokens", 4)
    assert code == 0
    assert out == "".join(text + "\n" for text in texts)


def test_a_watched_response_is_the_one_that_is_drawn(weights):
    model = load_language_model(str(weights))
    requests = [
        Request(prompt=[5, 6, 7][: 1 + row % 3], max_new_tokens=n, seed=row)
        for row, n in enumerate((1, 5, 8, 9, 30))
    ]
    sampler = Sampler(model.policy, slots=2, length=40)
    expected = sampler.sample(model.params, requests)
    seen = {}

    def show(row, ids, over):
        assert not seen.get(row, (0, False))[1]  # nothing after the end
        seen[row] = (list(ids), over)

    watched = sample_watched(sampler, model.params, requests, show, every=4)
    assert len(watched) == len(requests)
    for row, ids in enumerate(watched):
        start, end = expected.prompt_length[row], expected.length[row]
        assert ids == expected.tokens[row, start:end].tolist()
        assert seen[row] == (ids, True)


def test_what_show_raises_is_raised(weights):
    model = load_language_model(str(weights))
    sampler = Sampler(model.policy, slots=1, length=8)

    def show(row, ids, over):
        raise BrokenPipeError("nobody reads")

    with pytest.raises(BrokenPipeError, match="nobody reads"):
        sample_watched(
            sampler, model.params, [Request(prompt=[1], max_new_tokens=3)], show
        )
    stops = Request(prompt=[1], max_new_tokens=3, stop_texts=("x",))
    with pytest.raises(ValueError, match="cannot have stop_texts"):
        sample_watched(sampler, model.params, [stops], show)


def test_a_run_is_exported_with_its_adapters_merged(
    run_folder, weights, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    folder, params = run_folder
    code, out, _ = call(capsys, "export", folder, tmp_path / "out")
    assert (code, out) == (0, f"written: {tmp_path}/out\n")
    found = load(tmp_path / "out")
    for x, y in zip(
        jax.tree.leaves(found.params), jax.tree.leaves(merge(params)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
    # The merged network is another than that of the weights it began from.
    base = load(weights).params["layers"]["attention"]["q"]
    assert np.abs(found.params["layers"]["attention"]["q"] - base).max() > 0.1
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (weights / name).read_bytes()
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["eos_token_id"] == 256
    # It is a model like any other, and says what the run says.
    again = call(capsys, "sample", tmp_path / "out", "--prompt", "a", "--temperature=0")
    of_run = call(capsys, "sample", folder, "--prompt", "a", "--temperature=0")
    assert again[0] == of_run[0] == 0
    assert again[1][:8] == of_run[1][:8]
    code, _, err = call(capsys, "export", folder, tmp_path / "out")
    assert code == 1
    assert err == f"error: {tmp_path}/out: already there, and not an empty folder\n"


def test_an_export_has_the_type_that_is_asked_for(weights, tmp_path, capsys):
    code, _, _ = call(capsys, "export", weights, tmp_path / "o", "--dtype", "bfloat16")
    assert code == 0
    assert json.loads((tmp_path / "o/config.json").read_text())["torch_dtype"] == (
        "bfloat16"
    )
    found, kept = load(tmp_path / "o").params, load(weights).params
    np.testing.assert_array_equal(
        found["embed"], kept["embed"].astype(jnp.bfloat16).astype(jnp.float32)
    )


def test_the_page_of_a_run_is_written(run_folder, tmp_path, capsys):
    folder, _ = run_folder
    code, out, _ = call(capsys, "report", folder, "--out", tmp_path / "page.html")
    assert (code, out) == (0, f"page: {tmp_path}/page.html\n")
    assert "chain_sum" in (tmp_path / "page.html").read_text()


def choices(folder, value):
    folder.mkdir()
    (folder / "choices.json").write_text(json.dumps(value))
    return folder


def test_what_is_no_model_is_named(tmp_path, weights, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def said(*argv):
        code, out, err = call(capsys, *argv)
        assert (code, out) == (1, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    ask = ("sample", "--prompt", "x", "--max_new_tokens", 2)
    assert "no weights at" in said(*ask, tmp_path / "absent")
    assert "neither a path nor an installed package" in said(*ask, "no_such_package")
    assert "neither a model (config.json, safetensors) nor a run" in said(
        *ask, tmp_path
    )
    assert "is not a folder: give the folder of a run" in said("report", "absent")
    assert "is not the folder of a run: no config.json" in said("report", tmp_path)
    # Only a plain name chooses code, and only in experiments/.
    for number, name in enumerate(("os.path", "../x", "a b", None, ["grpo"], "")):
        folder = choices(tmp_path / f"run{number}", {"experiment": name})
        assert f"it has {name!r}" in said(*ask, folder)
    folder = choices(tmp_path / "other", {"experiment": "sys"})
    assert "there is no experiments/sys.py in" in said(*ask, folder)
    assert "--system needs a model with a chat template" in said(
        *ask, weights, "--raw", "--system", "x"
    )
    long = said("sample", weights, "--prompt", "x" * 5000, "--raw")
    assert "has 5000 tokens, and the model's context of 4096" in long
    assert "top_p must be in (0, 1], got 0.0" in said(*ask, weights, "--top_p", 0)


def test_a_run_without_a_checkpoint_says_so(run_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("config.json", "choices.json"):
        (tmp_path / name).write_bytes((run_folder[0] / name).read_bytes())
    code, _, err = call(capsys, "sample", tmp_path, "--prompt", "x")
    assert code == 1
    assert err == f"error: {tmp_path} has no checkpoint yet\n"


@pytest.mark.parametrize(
    "argv, code, said",
    [
        ((), 2, "sample    print a model's answers"),
        (("--help",), 0, "Exit codes: 0 done"),
        (("sample", "--help"), 0, "the folder of a run: its newest checkpoint"),
        (("export", "--help"), 0, "The folder loads in transformers"),
        (("report", "--help"), 0, "needs no network"),
        (("sampel",), 2, "invalid choice: 'sampel'"),
        (("sample",), 2, "required: MODEL"),
        (("sample", "m", "--count", "0"), 2, "'0' is not a whole number of at least 1"),
        (("export", "m", "o", "--dtype", "int3"), 2, "invalid choice: 'int3'"),
    ],
)
def test_help_and_misuse(capsys, argv, code, said):
    found, out, err = call(capsys, *argv)
    assert found == code
    assert said in out + err


@pytest.mark.slow
def test_the_command_as_a_process_of_its_own(run_folder):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rlpost.cli", "sample", run_folder[0]),
            *("--prompt", "x", "--max_new_tokens", "3"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n")


def test_setup_names_this_command():
    assert '"rlpost = rlpost.cli:main"' in (ROOT / "setup.py").read_text()
