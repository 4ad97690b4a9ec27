"""Installs a package and what it requires, without some of that: install_without.py PACKAGE==VERSION LEFT_OUT..."""

import subprocess
import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

PIP_INSTALL = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]

package, *left_out = sys.argv[1:]
subprocess.run([*PIP_INSTALL, "--no-deps", package], check=True)
required = requires(Requirement(package).name) or []
subprocess.run([*PIP_INSTALL, *(each for each in required if Requirement(each).name not in left_out)], check=True)
