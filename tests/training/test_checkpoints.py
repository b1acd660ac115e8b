import contextlib
import json
import os
import shutil
import subprocess
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlpost.training import checkpoints as checkpoints_module
from rlpost.training.checkpoints import CheckpointError, Checkpoints


def some_state(seed=0):
    params = {
        "a/b%": jnp.arange(6.0).reshape(2, 3) + seed,
        "b": jnp.ones(3, jnp.bfloat16),
    }
    return {
        "policy": {"params": params, "opt": optax.adam(0.1).init(params)},
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
        "odd": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45]),
        "empty": jnp.zeros((0, 4)),
        "flags": jnp.array([True, False]),
        "small": jnp.arange(-3, 4, dtype=jnp.int8),
        "host": np.arange(4, dtype=np.int64),
    }


def bits(x):
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return (str(x.dtype), x.shape, np.asarray(x).tobytes())


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert str(a.dtype) == str(b.dtype)
        assert bits(a) == bits(b)


def test_what_comes_back_is_what_was_saved_bit_for_bit(tmp_path):
    state = some_state()
    host = {
        "data": {"next_index": 2**60, "seen": [1, None, 0.1, "é"]},
        "archive": [np.array([[1.5, np.nan]]), np.array(["a", "bc"])],
    }
    Checkpoints(tmp_path).save(7, state, host)
    restored = Checkpoints(tmp_path).restore(some_state(seed=1))
    assert restored.step == 7
    assert restored.notes == []
    assert_same_bits(restored.state, state)
    assert restored.host["data"] == host["data"]
    for was, now in zip(host["archive"], restored.host["archive"], strict=True):
        np.testing.assert_array_equal(was, now)
        assert was.dtype == now.dtype
    # A restored key draws what the saved one would have drawn, rbg ones too.
    for name in ("key", "keys"):
        assert jax.random.key_impl(restored.state[name]) == jax.random.key_impl(
            state[name]
        )
    draws = [jax.random.normal(s["keys"][1], (4,)) for s in (state, restored.state)]
    np.testing.assert_array_equal(*draws)


def test_an_array_bound_to_no_device_comes_back_bound_to_none(tmp_path):
    bound = jax.device_put(jnp.ones(2), jax.devices()[0])
    Checkpoints(tmp_path).save(1, {"bound": bound, "free": jnp.ones(2)})
    state = Checkpoints(tmp_path).restore({"bound": bound, "free": jnp.ones(2)}).state
    assert state["bound"].committed
    assert not state["free"].committed


def test_structs_serve_where_two_states_would_not_fit(tmp_path):
    state = some_state()
    del state["host"]  # a struct has no 64 bits unless jax has
    Checkpoints(tmp_path).save(1, state)
    like = jax.eval_shape(lambda: state)
    assert_same_bits(Checkpoints(tmp_path).restore(like).state, state)


def test_no_checkpoint_is_none(tmp_path):
    assert Checkpoints(tmp_path / "absent").restore(some_state()) is None


def test_retention_keeps_the_newest_and_every_nth(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, every=4)
    for step in range(1, 10):
        checkpoints.save(step, {"x": jnp.array(step)})
    assert checkpoints.steps() == [4, 8, 9]
    assert checkpoints.restore({"x": jnp.array(0)}).state["x"] == 9
    assert {p.name for p in tmp_path.iterdir()} == {"00000004", "00000008", "00000009"}


def test_a_half_written_checkpoint_is_not_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": jnp.array(1)})
    # What a kill during the save of step 2 leaves behind: all but the final name.
    shutil.copytree(tmp_path / "00000001", tmp_path / "00000002.partial")
    assert checkpoints.restore({"x": jnp.array(0)}).step == 1
    checkpoints.save(2, {"x": jnp.array(2)})
    assert checkpoints.restore({"x": jnp.array(0)}).state["x"] == 2


def test_every_single_missing_or_short_file_is_noticed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": jnp.array(1)})
    checkpoints.save(2, {"x": jnp.array(2)}, {"data": np.arange(3)})
    newest, aside = tmp_path / "00000002", tmp_path.with_name("aside")
    files = [p.relative_to(newest) for p in newest.rglob("*") if p.is_file()]
    assert len(files) > 5
    shutil.copytree(newest, aside)
    for name in files:
        for harm in ("missing", "short"):
            if harm == "missing":
                (newest / name).unlink()
            else:
                content = (aside / name).read_bytes()
                (newest / name).write_bytes(content[: len(content) // 2])
            restored = checkpoints.restore({"x": jnp.array(0)})
            assert (restored.step, int(restored.state["x"])) == (1, 1)
            assert "step 2 is damaged" in restored.notes[0]
            assert str(name) in restored.notes[0] or name.name == "files.json"
            shutil.copy(aside / name, newest / name)
    assert checkpoints.restore({"x": jnp.array(0)}).step == 2
    shutil.rmtree(aside)


def test_no_whole_checkpoint_is_an_error_and_never_a_fresh_start(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"x": jnp.array(step)})
        shutil.rmtree(tmp_path / f"{step:08d}" / "state")
    with pytest.raises(CheckpointError, match=r"is whole(.|\n)*step 2 (.|\n)*step 1 "):
        checkpoints.restore({"x": jnp.array(0)})


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"x": jnp.array(step)})
    (tmp_path / "00000002" / "tree.json").unlink()
    assert checkpoints.restore({"x": jnp.array(0)}).step == 1
    # With one to keep, the damaged later one must not be that one.
    Checkpoints(tmp_path, keep=1).save(1, {"x": jnp.array(10)})
    assert checkpoints.restore({"x": jnp.array(0)}).state["x"] == 10
    checkpoints.save(2, {"x": jnp.array(20)})
    assert checkpoints.restore({"x": jnp.array(0)}).state["x"] == 20


def test_a_flipped_bit_in_any_file_is_noticed(tmp_path):
    x = jax.random.normal(jax.random.key(0), (200,))
    Checkpoints(tmp_path).save(1, {"x": x}, {"data": 3})
    folder = tmp_path / "00000001"
    for path in [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size]:
        content = path.read_bytes()
        harmed = bytearray(content)
        harmed[len(content) // 2] ^= 1
        path.write_bytes(bytes(harmed))
        with pytest.raises(CheckpointError, match="step 1 is damaged"):
            Checkpoints(tmp_path).restore({"x": x})
        path.write_bytes(content)
    assert Checkpoints(tmp_path).restore({"x": x}).step == 1


@pytest.mark.parametrize(
    "like, message",
    [
        ({"a": jnp.zeros(3)}, "b/c: not part of this run"),
        (
            {"a": jnp.zeros(3), "b": {"c": jnp.zeros(2), "d": jnp.ones(1)}},
            "b/d: missing",
        ),
        (
            {"a": jnp.zeros(4), "b": {"c": jnp.zeros(2)}},
            r"a: expected float32\[4\], found float32\[3\]",
        ),
        (
            {"a": jnp.zeros(3, jnp.bfloat16), "b": {"c": jnp.zeros(2)}},
            r"a: expected bfloat16\[3\], found float32\[3\]",
        ),
        (
            {"a": jax.random.split(jax.random.key(0), 3), "b": {"c": jnp.zeros(2)}},
            r"a: expected key<fry>\[3\], found float32\[3\]",
        ),
    ],
)
def test_another_tree_is_refused_by_path(tmp_path, like, message):
    Checkpoints(tmp_path).save(1, {"a": jnp.zeros(3), "b": {"c": jnp.zeros(2)}})
    with pytest.raises(CheckpointError, match=message):
        Checkpoints(tmp_path).restore(like)


@pytest.mark.parametrize(
    "state, host, message",
    [
        ({"n": 3}, None, "state/n is a int"),
        ({"a": jnp.zeros(1)}, {"f": {1: 2}}, "host.f: key 1"),
        ({"a": jnp.zeros(1)}, {"f": [(1, 2)]}, r"host\.f\[0\] is a tuple"),
        ({"a": jnp.zeros(1)}, {"f": np.float32(1)}, r"host\.f is a float32"),
        ({"a": jnp.zeros(1)}, np.array([{}]), "host is a ndarray"),
    ],
)
def test_what_would_not_come_back_is_not_saved(tmp_path, state, host, message):
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path).save(1, state, host)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk, leave):
    """Leave so many bytes free, on a file system that has one."""
    with open(disk / "filler", "wb") as file:
        status = os.statvfs(disk)
        file.write(bytes(status.f_bavail * status.f_frsize - leave))


def test_a_full_disk_is_named_and_costs_no_older_checkpoint(small_disk):
    checkpoints = Checkpoints(small_disk / "checkpoints")
    small = {"x": jax.random.normal(jax.random.key(0), (100,))}
    checkpoints.save(1, small)
    large = {"x": jax.random.normal(jax.random.key(1), (1000, 1000))}
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"step 2 .*No space left on device"):
            checkpoints.save(2, large)
    assert checkpoints.steps() == [1]
    assert_same_bits(checkpoints.restore(small).state, small)
    # A disk with nothing left at all, not even for the list of files.
    fill(small_disk, leave=0)
    with pytest.raises(CheckpointError, match="step 2 could not be saved"):
        checkpoints.save(2, small)
    assert_same_bits(checkpoints.restore(small).state, small)
    (small_disk / "filler").unlink()
    checkpoints.save(2, small)
    assert checkpoints.steps() == [1, 2]


def test_sharded_arrays_come_back_where_they_were_or_elsewhere(tmp_path, mesh):
    def over(*axes):
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    values = jax.random.normal(jax.random.key(0), (8, 4))
    keys = jax.random.split(jax.random.key(1), 4)
    state = {
        "w": jax.device_put(values, over("fsdp", "tensor")),
        "all": jax.device_put(values, over()),
        "keys": jax.device_put(keys, over("data")),
        "key": jax.random.key(2),
    }
    Checkpoints(tmp_path).save(1, state)
    back = Checkpoints(tmp_path).restore(state).state
    assert_same_bits(back, state)
    for name in state:
        assert back[name].sharding == state[name].sharding
    jax.jit(lambda s: s["w"] + jax.random.normal(s["key"], (8, 4)))(back)
    # As structs, on another layout.
    like = {name: jax.typeof(x) for name, x in state.items()}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    like["w"] = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=over("tensor"))
    moved = Checkpoints(tmp_path).restore(like).state
    assert_same_bits(moved, state)
    assert moved["w"].sharding.spec == jax.sharding.PartitionSpec("tensor")


def test_a_checkpoint_of_other_devices_says_so(tmp_path):
    Checkpoints(tmp_path).save(1, {"x": jnp.zeros(2)})
    tree = tmp_path / "00000001" / "tree.json"
    tree.write_text(tree.read_text().replace(" x cpu", "0 x cpu"))
    files = json.loads((tmp_path / "00000001" / "files.json").read_text())
    files["tree.json"] = [tree.stat().st_size, zlib.crc32(tree.read_bytes())]
    (tmp_path / "00000001" / "files.json").write_text(json.dumps(files))
    (note,) = Checkpoints(tmp_path).restore({"x": jnp.zeros(2)}).notes
    assert "on 80 x cpu, this is" in note
    assert "not bit for bit" in note


class Killed(BaseException):
    """As final as a kill: nothing that handles errors handles it."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "where",
    [
        "host_state.write",
        "array_store.write",
        "list_files",
        "write_whole",
        "os.rename",
        "remove",
    ],
)
def test_killed_at_any_point_of_a_save_one_of_two_is_whole(
    tmp_path, monkeypatch, where, when
):
    module, _, name = where.rpartition(".")
    owner = getattr(checkpoints_module, module) if module else checkpoints_module
    inner = getattr(owner, name)
    calls = []

    def killed(*args, **options):
        calls.append(name)
        # `remove` clears the way, then the older checkpoint: both are tried.
        if when == "before" and len(calls) == kill_at:
            raise Killed
        result = inner(*args, **options)
        if len(calls) == kill_at:
            raise Killed
        return result

    for kill_at in (1, 2, 3):
        folder = tmp_path / str(kill_at)
        Checkpoints(folder, keep=1).save(1, {"x": jnp.array(1)})
        with monkeypatch.context() as patched, contextlib.suppress(Killed):
            patched.setattr(owner, name, killed)
            Checkpoints(folder, keep=1).save(2, {"x": jnp.array(2)})
        calls.clear()
        restored = Checkpoints(folder, keep=1).restore({"x": jnp.array(0)})
        assert restored.notes == []
        assert restored.step == int(restored.state["x"])
        Checkpoints(folder, keep=1).save(2, {"x": jnp.array(20)})
        assert Checkpoints(folder).restore({"x": jnp.array(0)}).state["x"] == 20
        assert {p.name for p in folder.iterdir()} == {"00000002"}
