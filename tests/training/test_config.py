import json
import math

import pytest

from rlpost.training.config import (
    ConfigError,
    check_read,
    comments,
    load,
    plain,
    reload,
    unread_keys,
)

FILE = '''
"""Values of a test."""
import ml_collections
from ml_collections import config_dict

def get_config(variant="small"):
    if variant not in ("small", "pod"):
        raise ValueError(f"no variant {variant}: small, pod")
    config = ml_collections.ConfigDict()
    config.steps = 3 if variant == "small" else 300  # updates in all
    config.rate = 1e-3
    config.clip = [0.2, 0.3]
    config.shuffle = True
    config.name = None
    config.seed = config_dict.placeholder(int)
    config.model = dict(depth=2, width=64, kind="plain")
    config.bound = float("inf")
    config.model.rope = dict(base=1e4)  # of the angles
    return config
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(FILE)
    return str(path)


def test_a_variant_with_changes_each_of_its_own_type(file):
    assert load(file).steps == 3
    assert load(f"{file}:pod").steps == 300
    config = load(
        f"{file}:pod",
        [
            "config.steps=7",
            "--config.rate=2",
            "--noconfig.shuffle",
            "config.seed=5",
            "config.clip=(0.1, 0.4)",
            "config.model.rope.base=5.5",
        ],
    )
    assert plain(config) == {
        "steps": 7,
        "rate": 2.0,
        "clip": (0.1, 0.4),
        "shuffle": False,
        "name": None,
        "seed": 5,
        "model": {"depth": 2, "width": 64, "kind": "plain", "rope": {"base": 5.5}},
        "bound": math.inf,
    }
    assert isinstance(config.rate, float)
    assert load(file).clip == (0.2, 0.3)
    assert load(file).seed is None


@pytest.mark.parametrize(
    "change, message",
    [
        ("config.stepz=7", "config has no 'stepz'; did you mean steps?"),
        ("config.model.widht=7", r"config\.model has no 'widht'; did you mean width"),
        ("config.steps.x=7", r"config\.steps has no 'x'"),
        ("config.steps=1.5", r"config\.steps=1\.5: invalid literal for int"),
        ("config.rate=fast", "could not convert string to float"),
        ("config.shuffle=perhaps", "shuffle"),
        ("config.name=x", r"config\.name is None in the file"),
        ("config.clip=(1,", "clip"),
        ("steps=7", "steps"),
    ],
)
def test_a_change_that_makes_no_sense_is_named(file, change, message):
    with pytest.raises(ConfigError, match=message):
        load(file, [change])


def test_a_file_or_variant_that_is_not_there(file, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no config file .*absent\.py"):
        load(str(tmp_path / "absent.py"))
    with pytest.raises(ConfigError, match="no variant large: small, pod"):
        load(f"{file}:large")


def test_values_that_json_would_not_bring_back_are_refused(file, tmp_path):
    path = tmp_path / "y.py"
    for value in ("print", "{1}", "(1, print)", "float('nan')"):
        path.write_text(FILE.replace('float("inf")', value))
        with pytest.raises(ConfigError, match=r"config\.bound is"):
            load(str(path))


def test_a_key_that_is_never_read_is_an_error(file):
    config = load(file)
    assert config.steps + config["rate"] > 0
    assert config.get("shuffle")
    assert "clip" in config  # to ask is not to read
    dict(**config.model)
    names = [
        "config.clip",
        "config.name",
        "config.seed",
        "config.bound",
        "config.model.rope.base",
    ]
    assert sorted(unread_keys(config)) == sorted(names)
    with pytest.raises(ConfigError, match=r"never read .*config\.model\.rope\.base"):
        check_read(config)
    config.to_dict()
    check_read(config)


def test_a_misspelt_read_fails_with_near_names_and_nothing_can_be_set(file):
    config = load(file)
    with pytest.raises(AttributeError, match="has no 'step'; did you mean steps"):
        _ = config.step
    with pytest.raises(KeyError, match=r"config\.model has no 'dept'"):
        _ = config.model["dept"]
    with pytest.raises(ConfigError, match=r"config\.steps cannot be set"):
        config.steps = 4
    assert not hasattr(config, "absent")
    assert config.get("absent", 1) == 1


def test_what_is_saved_reloads_with_its_types(file, tmp_path):
    config = load(file, ["config.clip=(1, 2.0)"])
    (tmp_path / "config.json").write_text(json.dumps(plain(config)))
    again = reload(tmp_path / "config.json")
    assert repr(again) == repr(config)
    assert repr(again.clip) == "(1, 2.0)"
    assert unread_keys(again)  # and it counts its own reads


def test_help_knows_the_comments(file):
    assert comments(f"{file}:pod") == {
        "steps": "updates in all",
        "model.rope": "of the angles",
    }
