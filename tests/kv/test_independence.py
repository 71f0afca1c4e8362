"""kv/ knows ids and counts, never tensors: it imports the standard library, NumPy and itself."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import octavo.kv

FILES = sorted(Path(octavo.kv.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kv_imports_no_other_folder(path: Path) -> None:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module or "")
    for module in modules:
        top = module.split(".")[0]
        assert top in sys.stdlib_module_names or top == "numpy" or module.startswith("octavo.kv")


def test_every_file_says_what_it_is_for() -> None:
    assert all(ast.get_docstring(ast.parse(path.read_text())) for path in FILES)
