#!/usr/bin/env python3
"""Runs the job in several processes on this machine's CPU, as on a pod, for development and tests.

    python launch/local.py --processes 2 --devices 2 run.max_tokens=100000 store.path=/tmp/store

Starts `python -m pipeline.run` with these overrides in each process; they join through a free local port. Lines of
output are prefixed with the process's number. SIGTERM and SIGINT are forwarded. The exit code is the worst of all
processes: 2 (invalid configuration or input), 1 (any other failure), 42 (interrupted), 0.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time

GRACE_S = 25  # for the others after a failure, which they notice at their next collective


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=1, help="CPU devices per process")
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
            start_new_session=True,  # so that the terminal's Ctrl-C reaches them only from here
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
    """Prints text. If the reader of stdout is gone, the job continues; otherwise its processes would wait forever for
    their output to be read."""
    try:
        print(text, end="", flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def wait(processes: list[subprocess.Popen]) -> int:
    """Waits for all processes, and returns the worst exit code. GRACE_S after a failure, the others are killed.

    An interrupted process notifies the others only if it has joined them. Otherwise they would wait for it, so all get
    SIGTERM.
    """
    is_notified = False
    failed_at = None
    while any(process.poll() is None for process in processes):
        if not is_notified and any(process.returncode == 42 for process in processes):
            is_notified = True
            send(processes, signal.SIGTERM)
        if failed_at is None and any(process.returncode not in (None, 0, 42) for process in processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            send(processes, signal.SIGKILL)
        time.sleep(0.05)
    codes = [process.returncode for process in processes]
    # A process without a signal handler yet dies of SIGTERM, and counts as interrupted.
    return worst([42 if is_notified and code == -signal.SIGTERM else code for code in codes])


def worst(codes: list[int]) -> int:
    if 2 in codes:
        return 2
    if any(code not in (0, 42) for code in codes):
        return 1
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
