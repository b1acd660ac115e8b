"""The command of an experiment: `main = training.main(entry, __doc__, "configs/x.py")`.

Exit codes: 0 done; 1 an error; 2 a command line or config that makes no sense; 75
(EX_TEMPFAIL, "try again") stopped by a signal, with the state saved.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from rlpost.rewards.workers import RewardError
from rlpost.training import config as configs
from rlpost.training import processes
from rlpost.training.array_store import CheckpointError
from rlpost.training.config import Config, ConfigError
from rlpost.training.guards import GuardError
from rlpost.training.loop import Interrupted
from rlpost.training.workdir import Workdir, WorkdirError

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 75
# What says by itself what is wrong, and what a bug may raise as well as bad input.
NAMED = (WorkdirError, CheckpointError, GuardError, RewardError)
PLAIN = (ValueError, OSError)

Entry = Callable[[Config, Workdir], None]


def main(
    entry: Entry, doc: str | None = None, default: str | None = None
) -> Callable[..., None]:
    """The `main` of an experiment.

    Args:
        entry: `(config, workdir) -> None` builds the experiment, calls
            `check_read(config)` and runs it.
        doc: the experiment's docstring, shown by `--help`.
        default: the config taken where the command line names none,
            "configs/x.py:small".

    Returns:
        `run(argv=None)`, which reads the command line, opens and locks the run folder,
        writes the config there, calls `entry`, and leaves by SystemExit with the exit
        code above if that is not 0.
    """

    def run(argv: Sequence[str] | None = None) -> None:
        code = _run(entry, doc, default, sys.argv[1:] if argv is None else list(argv))
        if code != DONE:
            sys.exit(code)

    return run


def _run(
    entry: Entry, doc: str | None, default: str | None, argv: Sequence[str]
) -> int:
    known, changes = _parser(doc, default).parse_known_args(argv)
    try:
        if known.config is None:
            raise ConfigError("which config? give --config=configs/<name>.py:<variant>")
        if known.help:
            print(help_text(doc, known.config))
            return DONE
        config = configs.load(known.config, changes)
        if known.distributed:
            _join(known.distributed)
        folder = known.workdir or _new_folder(known.config)
        with Workdir(folder, change_config=known.change_config) as workdir:
            workdir.record("config", configs.plain(config))
            if processes.is_first():
                print(f"run folder: {workdir.path}", flush=True)
            with _traceback_kept(workdir.path / "traceback.txt"):
                entry(config, workdir)
            configs.check_read(config)
    except ConfigError as error:
        return _say(error, USAGE)
    except Interrupted as message:
        print(message, flush=True)
        return INTERRUPTED
    except (*NAMED, *PLAIN) as error:
        return _say(error, FAILED)
    return DONE


@contextmanager
def _traceback_kept(path: Path) -> Iterator[None]:
    """What wrong input raises is told in a line; where it arose stands in a file."""
    try:
        yield
    except ConfigError:
        raise
    except PLAIN as error:
        with suppress(OSError):
            path.write_text("".join(traceback.format_exception(error)))
            error.add_note(f"where: {path}")
        raise


def help_text(doc: str | None, config: str) -> str:
    """What `--help` prints: the experiment, the flags, and the keys of this config."""
    values = configs.load(config)
    told = configs.comments(config)
    lines = []
    for key, value in _flat(configs.plain(values)):
        note = told.get(key) or told.get(key.rpartition(".")[0], "")
        lines.append(f"  --config.{key}={value!r}" + (f"  # {note}" if note else ""))
    return "\n".join(
        [
            inspect.cleandoc(doc or "A run of rlpost."),
            "",
            _parser(doc, config).format_help().strip(),
            "",
            f"Keys of {config}, with their values:",
            *lines,
        ]
    )


def _parser(doc: str | None, default: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--config=FILE:VARIANT] [--config.KEY=VALUE ...] [flags]",
        epilog=textwrap.dedent(
            """\
            A run that was killed or stopped goes on when the same command is given
            again with its --workdir. Exit codes: 0 done, 1 an error, 2 a config or
            command line that makes no sense, 75 stopped by a signal and saved."""
        ),
    )
    parser.add_argument(
        "--config", default=default, metavar="FILE:VARIANT", help=f"default: {default}"
    )
    parser.add_argument(
        "--workdir", metavar="FOLDER", help="default: a new one under runs/"
    )
    parser.add_argument(
        "--change_config",
        action="store_true",
        help="resume although the config is not the one the run was started with",
    )
    parser.add_argument(
        "--distributed",
        metavar="auto|ADDRESS,COUNT,INDEX",
        help="one process of several: found by jax.distributed, or given by hand",
    )
    parser.add_argument("--help", "-h", action="store_true", help="print this")
    return parser


def _join(how: str) -> None:
    if how == "auto":
        jax.distributed.initialize()
        return
    try:
        address, count, index = how.split(",")
        jax.distributed.initialize(address, int(count), int(index))
    except ValueError as error:
        raise ConfigError(
            f"--distributed={how} must be auto or host:port,count,index: {error}"
        ) from error


def _new_folder(config: str) -> Path:
    if jax.process_count() > 1:
        raise ConfigError("a run of several processes needs a --workdir that all share")
    file, _, variant = config.partition(":")
    name = "-".join(part for part in (Path(file).stem, variant) if part)
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _flat(values: dict, path: str = "") -> list[tuple[str, object]]:
    found = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _flat(value, f"{path}{key}.")
        else:
            found.append((f"{path}{key}", value))
    return found


def _say(error: Exception, code: int) -> int:
    notes = getattr(error, "__notes__", [])
    print("\n".join([f"error: {error}", *notes]), file=sys.stderr, flush=True)
    return code
