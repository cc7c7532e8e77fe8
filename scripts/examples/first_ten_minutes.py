"""The first ten minutes for users of TransformerLens or SAELens: activations in memory, a probe, a store.

    python scripts/examples/first_ten_minutes.py [--model Qwen/Qwen2.5-0.5B --layer 12]

docs/reading.md maps the names of TransformerLens and SAELens.
"""

import argparse
import pydoc_data.topics
import re
import tempfile
from pathlib import Path

import numpy as np

from pipeline import Extractor

TINY = "${assets:tiny-qwen2}"  # the bundled model: six layers, trained on Python's documentation


def paragraphs() -> tuple[list[str], np.ndarray]:
    """Paragraphs of Python's language reference, and which of them contain code."""
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    chosen = [part for part in re.split(r"\n\s*\n", text) if 40 <= len(part) <= 400]
    is_code = np.array([">>>" in part or "def " in part or " = " in part for part in chosen])
    return [" ".join(part.split()) for part in chosen], is_code


def probe_accuracy(features: np.ndarray, labels: np.ndarray) -> float:
    """The accuracy of a linear probe (difference of means), fitted on even rows and tested on odd rows, averaged over
    both labels."""
    fit, fit_labels, test, test_labels = features[::2], labels[::2], features[1::2], labels[1::2]
    means = fit[fit_labels].mean(axis=0), fit[~fit_labels].mean(axis=0)
    scores = (test - (means[0] + means[1]) / 2) @ (means[0] - means[1])
    return float(np.mean([(scores > 0)[test_labels].mean(), (scores <= 0)[~test_labels].mean()]))


def main(model: str, layer: int, num_paragraphs: int) -> float:
    """The accuracy of a probe that distinguishes code from prose."""
    texts, is_code = paragraphs()
    texts, is_code = texts[:num_paragraphs], is_code[:num_paragraphs]

    extractor = Extractor(
        model, layers=[layer], sites=["resid_post"], dtype="float32", model_dtype="float32", length=256
    )
    key = f"blocks.{layer}.resid_post"
    print(f"{key} is TransformerLens' {extractor.hook_names[key]}")

    results = extractor(texts)
    print(f"{len(results)} paragraphs; the first: {extractor.tokenizer.decode(results[0].tokens)!r:.60}")
    features = np.stack([result.activations[key].mean(axis=0) for result in results])
    accuracy = probe_accuracy(features, is_code)
    print(f"a linear probe distinguishes code from prose: accuracy {accuracy:.3f}, {is_code.mean():.0%} are code")

    with tempfile.TemporaryDirectory() as folder:
        store = extractor.save(Path(folder) / "store", texts)  # on disk, for data that does not fit in memory
        total = sum(batch.activations.sum(axis=0) for batch in store.batches(key, 1024, shuffle=True, seed=0))
        np.testing.assert_allclose(
            total / store.num_tokens, np.concatenate([r.activations[key] for r in results]).mean(axis=0), atol=1e-3
        )
        print(f"a store of {store.num_tokens:,} tokens in batches has the same mean")
    assert accuracy > 0.75, accuracy
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TINY)
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--paragraphs", type=int, default=400)
    options = parser.parse_args()
    main(options.model, options.layer, options.paragraphs)
