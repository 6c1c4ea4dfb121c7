"""What a machine that has torch lacks for the GPU's benchmarks and tests, said before an import fails."""

import importlib.util

# As Python names them. botocore needs jmespath; data on S3 also need s3fs.
NEEDED = ("numpy", "pyarrow", "tokenizers", "tqdm", "isal", "botocore", "jmespath", "torchao", "pytest", "hypothesis")


def require_packages() -> None:
    """End with one line if packages are missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        what = f"error: this Python lacks {', '.join(missing)}"
        raise SystemExit(f"{what}: install them, or bring their wheels; see docs/speed.md#what-a-bare-machine-needs")
