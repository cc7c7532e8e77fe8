"""Activations in memory, for notebooks, scripts and training loops.

    from pipeline import Extractor

    extractor = Extractor("Qwen/Qwen2.5-0.5B", layers=[6, 12], sites=["resid_post"])
    [result] = extractor(["The capital of France is Paris."])
    result.tokens, result.activations["blocks.6.resid_post"]     # [n], [n, d]

`Stream` computes batches of activations during training, without a store.

See `docs/reading.md`. `scripts/examples/first_ten_minutes.py` maps the names of TransformerLens and SAELens to ours.
"""

from pipeline.library.extractor import Extractor
from pipeline.library.results import ExtractedDocument
from pipeline.library.shapes import Shape
from pipeline.library.stream import Stream
from pipeline.library.stream_reader import StreamReader

__all__ = ["ExtractedDocument", "Extractor", "Shape", "Stream", "StreamReader"]
