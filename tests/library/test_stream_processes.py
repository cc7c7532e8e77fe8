"""Streams in other processes: killed and resumed, joined by jax.distributed, on two devices."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from pipeline import Stream
from pipeline.library import StreamReader
from pipeline.store import Batch
from tests.jobs import ROOT, assert_same_store, free_port, read_until, run_here, run_together, write_text
from tests.token_batches import arrays, tokens_of

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("cached_steps")]
KEYS = ["blocks.0.resid_post", "blocks.1.resid_post"]
SIZE = 100


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    text = write_text(tmp_path_factory.mktemp("text"), files=3, documents=40, max_characters=1500)
    data = ["data=demo", f"data.path={text}", "data.num_streams=2", "model=tiny", "capture.layers=[0,1]"]
    return [*data, "batch.rows=4", "batch.length=128", "store.shard_mib=0.25", "run.progress=false"]


@pytest.fixture(scope="module")
def whole(overrides) -> list[Batch]:
    """All batches, from one process with one device."""
    return list(batches_of(Stream.from_config(overrides)))


def batches_of(stream: Stream, **options) -> StreamReader:
    return stream.batches(SIZE, KEYS, **{"shuffle_buffer_tokens": 8192, "seed": 3} | options)


DIVIDED = """
import sys
import jax
import numpy as np
from tests.library.test_stream_processes import Stream, arrays, batches_of
stream = Stream.from_config(sys.argv[2:])
assert stream._job.plan.mesh.data == jax.device_count() == 2
batches = [arrays(batch) for batch in batches_of(stream, dtype="float32")]
np.savez(sys.argv[1], **{name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]})
"""


def test_two_devices_give_the_batches_of_one(overrides, whole, tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    command = [sys.executable, "-c", DIVIDED, str(tmp_path / "batches.npz"), *overrides]
    subprocess.run(command, cwd=ROOT, env=environment, timeout=120, check=True)
    divided = np.load(tmp_path / "batches.npz")
    expected = {name: np.concatenate([arrays(batch)[name] for batch in whole]) for name in arrays(whole[0])}
    for name, values in expected.items():
        if name in KEYS:
            np.testing.assert_allclose(divided[name], values.astype(np.float32), rtol=2**-7, atol=1e-3)
        else:
            np.testing.assert_array_equal(divided[name], values)


KILLED = """
import json, os, sys
import numpy as np
from pathlib import Path
from tests.library.test_stream_processes import Stream, arrays, batches_of
folder, stop, *overrides = sys.argv[1:]
checkpoint = Path(folder) / "checkpoint.json"
saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"state": None, "done": 0}
batches = batches_of(Stream.from_config(overrides), state=saved["state"], store=f"{folder}/store")
for number, batch in enumerate(batches, saved["done"]):
    np.savez(Path(folder) / f"{number:03}.npz", **{k: v.view(np.uint8) for k, v in arrays(batch).items()})
    (Path(folder) / "new").write_text(json.dumps({"state": batches.state(), "done": number + 1}))
    os.replace(Path(folder) / "new", checkpoint)
    print("batch", number, flush=True)
    if number == int(stop):
        sys.exit()  # with an open reader
"""


@pytest.mark.slow  # seven processes load the model
def test_a_killed_stream_resumes_with_the_same_batches_and_fills_the_store(overrides, whole, tmp_path):
    run_here(*overrides, f"store.path={tmp_path / 'reference'}")
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    for batches in (7, 34, 1, 60, 20):
        process = subprocess.Popen([*command, "1000", *overrides], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(batches):
            read_until("batch", process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    for stop in (140, 1000):
        assert subprocess.run([*command, str(stop), *overrides], cwd=ROOT, timeout=120).returncode == 0
    assert len(list(tmp_path.glob("*.npz"))) == len(whole) > 141
    for number, batch in enumerate(whole):
        saved = np.load(tmp_path / f"{number:03}.npz")
        assert {name: saved[name].tobytes() for name in saved} == {k: v.tobytes() for k, v in arrays(batch).items()}
    assert_same_store(tmp_path / "store", tmp_path / "reference")


JOINED = """
import json, sys
from pathlib import Path
import jax
port, process, folder, *overrides = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(process))
from tests.library.test_stream_processes import Stream, batches_of, tokens_of
batches = batches_of(Stream.from_config(overrides), store=f"{folder}/store")
tokens = [token.hex() for token in tokens_of(batches)]
said = [batches.state()["of"]["rank"], batches.state()["of"]["world"], tokens]
(Path(folder) / f"{process}.json").write_text(json.dumps(said))
"""


@pytest.mark.slow  # two processes that join
def test_joined_processes_compute_their_shares(overrides, whole, tmp_path):
    run_here(*overrides, f"store.path={tmp_path / 'reference'}")
    command = [sys.executable, "-c", JOINED, str(free_port())]
    run_together([[*command, str(n), str(tmp_path), *overrides] for n in range(2)])
    said = [json.loads((tmp_path / f"{n}.json").read_text()) for n in range(2)]
    assert [share[:2] for share in said] == [[0, 2], [1, 2]]
    assert sorted(bytes.fromhex(token) for share in said for token in share[2]) == tokens_of(whole)
    assert_same_store(tmp_path / "store", tmp_path / "reference")
