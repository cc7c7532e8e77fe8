"""The examples work: trainings on a store or a stream really train, and the first ten minutes end with a probe that is
right."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def falls(losses: list[float]) -> bool:
    return np.mean(losses[-10:]) < 0.5 * np.mean(losses[:5])


def test_a_sparse_autoencoder_in_torch(real_store):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # small steps: with more, threads mostly wait for each other
    losses = load("train_sae_torch").train(real_store, "blocks.2.resid_post", 200, batch_size=128)
    assert len(losses) == 200
    assert falls(losses)


def test_a_crosscoder_in_jax(real_store):
    losses = load("train_crosscoder_jax").train(real_store, "resid_post", 200, batch_size=128)
    assert len(losses) == 200
    assert falls(losses)


def test_the_command_line(real_store):
    command = [sys.executable, SCRIPTS / "train_crosscoder_jax.py", real_store, "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1].startswith("step     2 loss ")


def test_the_first_ten_minutes():
    assert load("first_ten_minutes").main("${assets:tiny-qwen2}", 3, 250) > 0.75


def test_a_sparse_autoencoder_on_a_stream():
    assert load("train_sae_on_stream").main(100) > 0.65
