"""Runs programs in new processes, which are forked from one that has imported torch and nothing of holdfast.

A new interpreter would take seconds to import torch. A program that tests the import of torch, the start of
the interpreter or settings that torch reads when it is imported needs a new interpreter.

    python fresh.py

reads a request per line, forks, and writes the exit status of the process in a line of its own.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


def run(
    program: str,
    *words: str,
    env: Mapping[str, str] | None = None,
    check: bool = False,
    timeout: int = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a program as ``python -c program words`` does. ``env`` is the whole environment.

    After ``timeout`` seconds a signal ends it.
    """
    surroundings = dict(os.environ if env is None else env)
    with tempfile.TemporaryDirectory() as folder:
        out, err = (str(Path(folder) / name) for name in ("out", "err"))
        server = _server()
        request = {"program": program, "words": words, "env": surroundings, "out": out, "err": err}
        request |= {"cwd": os.getcwd(), "timeout": timeout}
        print(json.dumps(request), file=server.stdin, flush=True)
        status = os.waitstatus_to_exitcode(int(server.stdout.readline()))
        texts = [Path(path).read_text() for path in (out, err)]
    done = subprocess.CompletedProcess(["python", "-c", program, *words], status, *texts)
    if check:
        assert done.returncode == 0, done.stderr
    return done


@cache
def _server() -> Any:
    command = [sys.executable, __file__]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(_end, server)
    return server


def _end(server: Any) -> None:
    server.stdin.close()
    server.wait()
    server.stdout.close()


def _forked(request: dict[str, Any]) -> bool:
    """Make this process one that runs the request. False in the process that waits for it."""
    child = os.fork()
    if child:
        print(os.waitpid(child, 0)[1], flush=True)
        return False
    for stream, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, stream)
        os.close(file)
    signal.alarm(request["timeout"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv[:] = ["-c", *request["words"]]
    path = request["env"].get("PYTHONPATH", "")
    sys.path[:] = ["", *filter(None, path.split(os.pathsep)), *sys.path]
    return True


def _serve() -> str | None:
    """The program that a forked process runs. None at the end of the requests."""
    import torch  # noqa: F401

    if "holdfast" in sys.modules:
        raise RuntimeError("a program would not import holdfast again")
    gc.freeze()  # a fork that ends does not look at what it shares
    for line in sys.stdin:
        request = json.loads(line)
        if _forked(request):
            return str(request["program"])
    return None


if __name__ == "__main__":
    own = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    sys.path[:] = [place for place in sys.path if place not in own]
    program = _serve()
    if program is not None:
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            exec(compile(program, "<string>", "exec"), vars(module))
        except Exception:  # as the interpreter does with any error that a program leaves
            traceback.print_exc()
            sys.exit(1)
