"""The shape of the package: which module may import which, and what an import costs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import unembed

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "unembed"
# Entry points: they may import anything, and no module may import them.
ENTRY_POINTS = {"__init__", "__main__", "demo"}
HEAVY = ("torch", "transformers", "sentence_transformers", "matplotlib", "sacrebleu", "datasets")


def module_order() -> list[str]:
    """Read the list of modules, left to right, from the page that describes it."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"```\n(.*?)```", page, flags=re.DOTALL)
    assert block, "docs/architecture.md shows the modules in its first code block"
    # Before the bar each line says what its modules are for.
    return [name for line in block[1].splitlines() for name in line.partition("|")[2].split()]


def imported_modules(source: str) -> set[str]:
    """Name the modules of the package that a source imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join(filter(None, ["unembed" if node.level else "", node.module]))
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *inner = name.split(".")
            if package == "unembed" and inner:
                found.add(unembed._HOMES.get(inner[0], inner[0]))
    return found - {"__version__"}


# A module is a file, or a folder of files.
MODULES = {path.stem: [path] for path in sorted(PACKAGE.glob("*.py"))}
MODULES |= {
    path.parent.name: sorted(path.parent.glob("*.py")) for path in sorted(PACKAGE.glob("*/__init__.py"))
}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import unembed.model", {"model"}),
        ("from unembed import metrics, Inverter, __version__", {"metrics", "inverter"}),
        ("from unembed.config import Config", {"config"}),
        ("from . import decode\nfrom .tokens import Encoded", {"decode", "tokens"}),
        ("def f():\n    if True:\n        from unembed.train import train", {"train"}),
        ("import torch\nimport unembedded.model\nimport unembed", set()),
    ],
)
def test_imports_are_found(source: str, expected: set[str]) -> None:
    assert imported_modules(source) == expected


@pytest.mark.parametrize("module", [m for m in MODULES if m not in ENTRY_POINTS])
def test_imports_only_point_left(module: str) -> None:
    order = module_order()
    assert module in order, f"{module} is not in the list of docs/architecture.md"
    allowed = set(order[: order.index(module)])
    if len(MODULES[module]) > 1:
        allowed.add(module)  # its own files
    for path in MODULES[module]:
        wrong = imported_modules(path.read_text(encoding="utf-8")) - allowed
        assert not wrong, f"{path.name} imports {', '.join(sorted(wrong))}, which stand after {module}"


def test_no_module_is_listed_twice() -> None:
    order = module_order()
    assert len(order) == len(set(order))


@pytest.mark.parametrize("module", ["unembed", "unembed.cli"])
def test_import_is_light(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_help_is_quick() -> None:
    def seconds() -> float:
        """Return the processor time of a call, which other work on the machine hardly changes."""
        before = os.times()
        subprocess.run([sys.executable, "-m", "unembed", "--help"], capture_output=True, check=True)
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        assert spent > 0.01  # else the clock is none
        return spent

    assert min(seconds() for _ in range(5)) < 0.3


@pytest.mark.parametrize("name", unembed.__all__)
def test_public_names(name: str) -> None:
    home = unembed._HOMES[name]
    assert name in dir(unembed)
    # Importing the module first must not hide the function of the same name.
    assert getattr(unembed, name) is getattr(import_module(f"unembed.{home}"), name)
    assert getattr(unembed, name) is getattr(import_module(f"unembed.{home}"), name)


def test_public_names_have_homes_and_no_others() -> None:
    assert set(unembed.__all__) == set(unembed._HOMES)
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        unembed.Trainer  # noqa: B018


def test_demo_text() -> None:
    lines = (PACKAGE / "data" / "demo.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines)) == 300
    assert all(5 <= len(line.split()) <= 24 for line in lines)
