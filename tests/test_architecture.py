"""The documented import map is the real one: no cycles, and no task imported from the core."""

import ast
import graphlib
import pathlib
import re

PACKAGE = pathlib.Path(__file__).parent.parent / "bigbird"
DOCUMENT = PACKAGE.parent / "docs" / "architecture.md"


def _imports(path):
    """Modules of this package that a file imports anywhere, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bigbird"):
            found.add(node.module)
            found.update(
                f"{node.module}.{alias.name}"
                for alias in node.names
                if (PACKAGE.parent / f"{node.module}.{alias.name}".replace(".", "/"))
                .with_suffix(".py")
                .exists()
            )
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.startswith("bigbird"))
    return {name for name in found if (PACKAGE.parent / f"{name.replace('.', '/')}.py").exists()}


def _graph():
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): _imports(path)
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }


def test_imports_have_no_cycles():
    order = list(graphlib.TopologicalSorter(_graph()).static_order())
    assert "bigbird.core.modeling" in order


def test_core_imports_no_task():
    for module, imported in _graph().items():
        if module.startswith("bigbird.core."):
            assert all(name.startswith("bigbird.core.") for name in imported), module


def test_the_documented_import_table_is_true():
    rows = re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|$", DOCUMENT.read_text(), re.MULTILINE)
    documented = {name: set(re.findall(r"`(\w+)`", imports)) for name, imports in rows}
    real = {
        module.split(".")[-1]: {name.split(".")[-1] for name in imported}
        for module, imported in _graph().items()
        if module.startswith("bigbird.core.")
    }
    assert documented == real


def test_every_file_states_its_purpose_in_its_first_line():
    for path in PACKAGE.rglob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring and docstring.splitlines()[0].endswith((".", ":")), path


def test_only_tf_keras_is_used():
    for path in PACKAGE.rglob("*.py"):
        assert not re.search(r"\btf\.keras\b|^import keras\b|from keras\b", path.read_text()), path


def test_every_installed_command_exists():
    table = (PACKAGE.parent / "pyproject.toml").read_text().split("[project.scripts]")[1]
    for module, function in re.findall(r'^[\w-]+ = "([\w.]+):(\w+)"$', table, re.MULTILINE):
        path = (PACKAGE.parent / module.replace(".", "/")).with_suffix(".py")
        functions = {
            node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")
        }
        assert function in functions, module
