"""A process that scores samples: JSON lines in, JSON lines out.

Started by `rewards.pool` as `python -m rlpost.rewards.worker MODULE:NAME ARGUMENTS
LIMIT`. It imports no more than the reward needs, so it starts in a moment, holds no
accelerator, and nothing of the trainer is forked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlpost.rewards.types import Reward, Sample


def resolve(target: str, arguments: Mapping[str, Any] | None = None) -> Reward:
    """The reward at "module:name".

    Args:
        target: where it is; dots in the name reach into classes.
        arguments: if given, `name` is a factory, called with them.

    Raises:
        ValueError: if the target is not of that form, or there is no such name.
        ImportError: if the module cannot be imported.
    """
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ValueError(f"a reward's path reads 'module:name', got {target!r}")
    try:
        found: Any = importlib.import_module(module)
        for key in name.split("."):
            found = getattr(found, key)
    except AttributeError as error:
        raise ValueError(f"module {module!r} has no reward {name!r}") from error
    return found if arguments is None else found(**arguments)


def evaluate(reward: Reward, samples: Sequence[Sample]) -> dict[str, Any]:
    """{"parts": what the reward gave, as lists}, or {"raised": the traceback}."""
    try:
        given = reward(samples)
        if not isinstance(given, Mapping):
            return {"invalid": f"returned {given!r:.200}, expected {{part: f32[B]}}"}
        return {"parts": {str(k): np.asarray(v).tolist() for k, v in given.items()}}
    except (Exception, SystemExit):  # a script's exit() ends its sample, not the run
        return {"raised": traceback.format_exc()}


def main() -> None:
    """Answer requests until their pipe closes."""
    target, arguments, limit = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    # What a reward prints may not mix with the replies, nor may it read the requests.
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    log = sys.stderr

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message, default=str) + "\n")
        replies.flush()

    try:
        reward = resolve(target, arguments)
        # Whatever it imports on first use does not count against a sample's time.
        with contextlib.suppress(Exception):
            reward([])
    except Exception:
        reply({"raised": traceback.format_exc()})
        return
    reply({"ready": True})
    for line in requests:
        samples = [Sample.from_json(values) for values in json.loads(line)]
        # Ends this process even where the interpreter never comes back from C, and
        # even if there is no longer a parent to do it; and it tells where that was.
        faulthandler.dump_traceback_later(limit, exit=True, file=log)
        answer = evaluate(reward, samples)
        faulthandler.cancel_dump_traceback_later()
        reply(answer)


if __name__ == "__main__":
    main()
