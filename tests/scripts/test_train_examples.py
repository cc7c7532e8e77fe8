"""The examples work: training on a store or a stream lowers the loss, and the probe of the first ten minutes is
right."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.models.sae.loading import open_sae
from pipeline.store import ActivationStore
from tests.jobs import free_port, run_together
from tests.models.sae_files import encode_dense

pytestmark = pytest.mark.heavy
SCRIPTS = Path(__file__).parents[2] / "scripts" / "examples"
# Runs a script of a folder, as Python does.
RUN_SCRIPT = """
import runpy, sys

sys.path.insert(0, sys.argv[1])
sys.argv[:] = sys.argv[2:]
runpy.run_path(f"{sys.path[0]}/{sys.argv[0]}", run_name="__main__")
"""


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def falls(losses: list[float]) -> bool:
    return np.mean(losses[-10:]) < 0.5 * np.mean(losses[:5])


def test_a_sparse_autoencoder_trains_in_torch_and_a_run_can_encode_with_it(real_store, tmp_path):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # small steps: with more, threads mostly wait for each other
    script, store, key = load("train_sae_torch"), ActivationStore.open(real_store), "blocks.2.resid_post"
    autoencoder, losses = script.train(store, key, 200, batch_size=128)
    assert len(losses) == 200
    assert falls(losses)
    script.save(autoencoder, store, key, tmp_path)
    sae, normalisation = open_sae(str(tmp_path)), store.normalisation(key)[key]
    x = store.read(key, rows=0)
    features = encode_dense(sae, x)
    with torch.no_grad():
        expected = autoencoder(torch.from_numpy(normalisation.apply(x))).numpy()
    decoded = features @ sae.read("w_dec") + sae.read("b_out")
    np.testing.assert_allclose(normalisation.apply(decoded), expected, atol=1e-4)


def test_the_crosscoder_script_trains_in_jax(real_store, monkeypatch, capsys):
    script, trained = load("train_crosscoder_jax"), []
    train = script.train

    def train_with_small_batches(*arguments) -> tuple[list[float], dict[str, float]]:
        trained.append(train(*arguments, batch_size=128))
        return trained[-1]

    monkeypatch.setattr(script, "train", train_with_small_batches)
    monkeypatch.setattr(sys, "argv", ["train_crosscoder_jax.py", real_store, "--steps", "200"])
    script.main()
    [(losses, explained)] = trained
    assert len(losses) == 200
    assert falls(losses)
    assert min(explained.values()) > 0.5
    assert capsys.readouterr().out.splitlines()[-1] == f"step   199 loss {losses[-1]:.4f}"


def test_the_first_ten_minutes_end_with_a_good_probe():
    assert load("first_ten_minutes").main("${assets:tiny-qwen2}", 3, 250) > 0.75


@pytest.mark.slow
def test_the_probe_on_arc_works():
    assert load("probe_arc").main(None, "${assets:tiny-qwen2}", 320) > 0.2


@pytest.mark.slow
def test_a_sparse_autoencoder_trains_on_a_stream():
    assert load("train_sae_on_stream").main(60) > 0.65


@pytest.mark.slow
def test_a_sparse_autoencoder_trains_on_two_processes():
    command = [sys.executable, "-c", RUN_SCRIPT, str(SCRIPTS), "train_sae_on_hosts.py", "--steps", "40"]
    command += ["--coordinator", f"localhost:{free_port()}", "--processes", "2"]
    outputs = run_together([[*command, "--process", str(number)] for number in range(2)])
    said = [next(line for line in output.splitlines() if "tokens a step" in line) for output in outputs]
    assert said[0] == said[1]  # both have trained one SAE
    assert said[0].startswith("2 processes, 512 tokens a step: loss 0.8")
