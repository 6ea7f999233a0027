"""Install cpu_host_torchvision.pth into site-packages, where Python reads it at start: pyproject.toml cannot."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPth(build_py):
    """build_py that also writes the .pth file at the top of the wheel."""

    def run(self) -> None:
        super().run()
        Path(self.build_lib, "cpu_host_torchvision.pth").write_text("import cpu_host_torchvision\n")


setup(cmdclass={"build_py": BuildWithPth})
