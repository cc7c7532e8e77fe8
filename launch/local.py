#!/usr/bin/env python3
"""Runs the job in several processes on this machine, as a pod would: for development and tests, on the CPU.

    python launch/local.py --processes 2 --devices 2 run.max_tokens=100000 store.path=/tmp/store

starts as many `python -m pipeline.run` with these overrides, joined through a free local port. Lines of output are
prefixed with the process's number. SIGTERM and SIGINT are forwarded. The exit code is the worst: 2 (wrong configuration
or input), 1 (any other failure), 42 (interrupted), 0.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time

GRACE_S = 25  # for the others, after one has failed: longer than their heartbeats take to notice


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=1, help="CPU devices of each process")
    args, overrides = parser.parse_known_args()

    processes = start_all(args.processes, args.devices, overrides)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: send(processes, number))
    printers = [threading.Thread(target=print_prefixed, args=(i, process)) for i, process in enumerate(processes)]
    for printer in printers:
        printer.start()
    code = wait(processes)
    for printer in printers:
        printer.join()
    return code


def start_all(num_processes: int, devices: int, overrides: list[str]) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONUNBUFFERED": "1",
    }
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "pipeline.run", *overrides),
                f"distributed.coordinator={coordinator}",
                f"distributed.num_processes={num_processes}",
                f"distributed.process_id={i}",
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # the terminal's Ctrl-C reaches them once, from here
        )
        for i in range(num_processes)
    ]


def send(processes: list[subprocess.Popen], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def print_prefixed(i: int, process: subprocess.Popen) -> None:
    for line in process.stdout:
        say(f"[{i}] {line}")
    code = process.wait()
    if code:
        say(f"[{i}] ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}\n")


def say(text: str) -> None:
    """Where nobody reads any more, the job goes on: its processes would wait for ever to say what they have to."""
    try:
        print(text, end="", flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def wait(processes: list[subprocess.Popen]) -> int:
    """The worst exit code, once all have ended; those that outlive a failed one by GRACE_S are killed.

    An interrupted process has told the others, unless it had not joined them yet: then they would wait for it.
    """
    told = False
    failed_at = None
    while any(process.poll() is None for process in processes):
        if not told and any(process.returncode == 42 for process in processes):
            told = True
            send(processes, signal.SIGTERM)
        if failed_at is None and any(process.returncode not in (None, 0, 42) for process in processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            send(processes, signal.SIGKILL)
        time.sleep(0.05)
    codes = [process.returncode for process in processes]
    return worst([42 if told and code == -signal.SIGTERM else code for code in codes])  # told before it could say so


def worst(codes: list[int]) -> int:
    if 2 in codes:
        return 2
    if any(code not in (0, 42) for code in codes):
        return 1
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
