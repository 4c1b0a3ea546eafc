"""Real servers by hand: `python -m chaos up [kafka] [postgres] [s3]`, `down`, `status`.

`up` leaves one supervising process behind that holds the servers; they end with it. Addresses are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from chaos.stack import SERVICES, cache, stack

UP_S = 600.0  # the first time, servers are fetched and built
DOWN_S = 60.0


def _state() -> Path:
    return Path(os.environ.get("THALWEG_CHAOS_STATE") or cache() / "up.json")


def _running() -> dict[str, Any] | None:
    """What is up: `pid`, `born`, `endpoints`; None where nothing is. A pid that somebody else has by now is nothing."""
    try:
        found: dict[str, Any] = json.loads(_state().read_text())
        alive = psutil.Process(found["pid"])
        return found if abs(alive.create_time() - found["born"]) < 0.1 and alive.status() != psutil.STATUS_ZOMBIE else None
    except (FileNotFoundError, ValueError, KeyError, psutil.NoSuchProcess):
        return None


def serve(services: list[str]) -> None:
    """Hold the servers until SIGTERM or SIGINT."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        with stack(services) as running:
            me = psutil.Process()
            state = {"pid": me.pid, "born": me.create_time(), "endpoints": asdict(running.endpoints)}
            _state().write_text(json.dumps(state))
            signal.sigwait({signal.SIGTERM, signal.SIGINT})
    finally:
        _state().unlink(missing_ok=True)


def up(services: list[str]) -> int:
    """Start what is not running; print the addresses."""
    found = _running()
    if found is None:
        log = _state().with_suffix(".log")
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "chaos", "serve", *services],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + UP_S
        while (found := _running()) is None:
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                print(f"the servers did not start:\n{log.read_text(errors='replace')[-3_000:]}", file=sys.stderr)
                return 1
            time.sleep(0.1)
    print(json.dumps(found["endpoints"], indent=2))
    return 0


def down() -> int:
    """Stop what is running."""
    found = _running()
    if found is None:
        print("nothing is up")
        return 0
    process = psutil.Process(found["pid"])
    process.terminate()
    try:
        process.wait(DOWN_S)
    except psutil.TimeoutExpired:
        process.kill()
    print("stopped")
    return 0


def status() -> int:
    """Say what runs; 1 where nothing does."""
    found = _running()
    print(json.dumps(found["endpoints"], indent=2) if found else "nothing is up")
    return 0 if found else 1


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("do", choices=("up", "down", "status", "serve"))
    parser.add_argument("services", nargs="*", help="kafka postgres s3; all of them by default")
    options = parser.parse_args()
    services = options.services or list(SERVICES)
    if unknown := sorted(set(services) - set(SERVICES)):
        parser.error(f"no such server: {', '.join(unknown)}; there are {', '.join(SERVICES)}")
    if options.do == "serve":
        serve(services)
        return 0
    return {"up": lambda: up(services), "down": down, "status": status}[options.do]()


if __name__ == "__main__":
    sys.exit(main())
