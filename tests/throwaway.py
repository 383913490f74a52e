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
    base = cache_folder() / "consumers"
    folder = base / key
    base.mkdir(parents=True, exist_ok=True)
    with (base / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder, site)
            (folder / "made").touch()
    return folder / "bin" / "python"


def cache_folder() -> Path:
    """What tests keep on a machine between runs: DRAFTMILL_TEST_CACHE, or a folder in the user's cache folder."""
    own = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DRAFTMILL_TEST_CACHE") or Path(own) / "draftmill-tests")


def _make(folder: Path, site: str) -> None:
    """An environment without a pip of its own: that of the environment behind it does, where there is one.

    Asked of the new interpreter: in this process to look for pip is to import setuptools' stand-in for distutils, which
    warns (and a warning fails the tests) wherever an earlier test has imported the real one.
    """
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    where = [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    own = Path(subprocess.check_output(where, text=True).strip())
    (own / "behind.pth").write_text(f"{site}\n")
    if subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        subprocess.run([python, "-m", "ensurepip"], check=True, capture_output=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    for options in (["--no-deps", *ALONE], WITH_DEPENDENCIES):
        done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
        if done.returncode and any(text in done.stderr for text in UNREACHABLE):
            pytest.skip("PyPI is out of reach: speculators, dflash and specforge cannot be installed")
        assert done.returncode == 0, done.stderr
