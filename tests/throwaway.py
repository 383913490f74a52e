"""An environment with the programs that read our exports, made once on a machine and kept outside the checkout.

The environment of the tests (torch above all) shows through from behind; only what is pinned here is installed, most
of it without dependencies, which ask for other versions of torch and for packages that a DFlash model never imports.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

ALONE = (
    "transformers==5.19.0",
    "speculators==0.9.0",
    "hs-connectors==0.9.0",
    "dflash==0.1.0",
    "specforge==0.2.0",
    "compressed-tensors==0.20.1",
)
WITH_DEPENDENCIES = ("openai==3.57.0", "loguru==0.7.3", "pydantic-settings", "protobuf")
UNREACHABLE = ("Failed to establish a new connection", "No matching distribution found", "Network is unreachable")


def consumer_python() -> Path:
    """The environment's interpreter, made on a machine's first call; skips the test where PyPI is out of reach."""
    site = sysconfig.get_paths()["purelib"]
    key = hashlib.sha256(repr((ALONE, WITH_DEPENDENCIES, site, sys.version)).encode()).hexdigest()[:16]
    base = Path(os.environ.get("DRAFTMILL_TEST_CACHE", tempfile.gettempdir())) / f"draftmill-consumers-{os.getuid()}"
    folder = base / key
    base.mkdir(parents=True, exist_ok=True)
    with (base / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder, site)
            (folder / "made").touch()
    return folder / "bin" / "python"


def _make(folder: Path, site: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    own = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
    )
    (Path(own.strip()) / "behind.pth").write_text(f"{site}\n")
    for options in (["--no-deps", *ALONE], WITH_DEPENDENCIES):
        command = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode and any(text in done.stderr for text in UNREACHABLE):
            pytest.skip("PyPI is out of reach: speculators, dflash and specforge cannot be installed")
        assert done.returncode == 0, done.stderr
