"""The Llamas that benchmarks train: hidden size, layers, heads, intermediate size."""

VOCABULARY = 32000
SHAPES = {
    "13m": (128, 4, 4, 352),
    "134m": (768, 12, 12, 2048),
    "374m": (1024, 24, 16, 2816),
    "700m": (1536, 20, 16, 4096),
    "1b": (2048, 18, 16, 5632),
    "2b": (2560, 24, 20, 6912),
}
