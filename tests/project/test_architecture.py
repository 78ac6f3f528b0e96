"""The rooms: who may import whom, what is public, and what of torch's own is relied on."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from torch import nn

import replication
from replication import _torch as torch_internals
from replication import extending

#: Of the packages that are tested, wherever they are installed.
ROOT = Path(torch_internals.__file__).resolve().parent.parent
TESTS = Path(__file__).parent.parent
PACKAGES = ("replication", "syncbn")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
MODULES = [name for name in FILES if not name.endswith(".__init__")]

#: The packages and modules of `replication`, lowest first. One may import those above it in this
#: list, and its own.
ORDER = [
    ["_torch", "checks", "devices", "errors", "modules", "texts", "version", "warning"],
    ["containers"],
    ["tree"],
    ["sync"],
    ["steps"],
    ["groups"],
    ["callbacks", "functional", "join", "pipes"],
    ["data_parallel"],
    ["criterion"],
    ["verify"],
    ["extending"],
]

#: The doors of `replication.extending`: what layers with their own autograd nodes may import.
FOR_LAYERS = [
    "Phase",
    "Signature",
    "WithDerivative",
    "apply_of",
    "as_process_group",
    "current_stream",
    "current_streams",
    "dispatch_modes",
    "has_kernels",
    "has_other_derivatives",
    "has_other_processes",
    "hidden_from_hooks",
    "is_capturing",
    "is_dtensor",
    "lost_derivatives",
    "name_in_graph",
    "phase",
    "record_stream",
    "sees_saved_tensors",
    "to_device",
    "uncompiled",
    "unseen_by_checkpoints",
    "use_streams",
]
#: And what tools that convert, describe or check networks may import.
FOR_TOOLS = [
    "CALLBACK",
    "HOOKS",
    "check_methods",
    "check_module",
    "default_devices",
    "destroy_group",
    "end",
    "first_of",
    "in_ranks",
    "is_int",
    "join_launched",
    "leaves_of",
    "open_builtin",
    "path_or_root",
    "runs_callbacks",
    "table",
    "warn",
    "with_class",
]


@cache
def syntax(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[str]:
    """What is imported, by full name: of ``from a import b`` it is ``a.b`` if that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FILES else str(node.module)


def foreign(name: str) -> set[str]:
    """The imports of a module that are not in the standard library."""
    return {i for i in imports(syntax(name)) if i.split(".")[0] not in sys.stdlib_module_names}


def of_replication(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith("replication.")]


def assert_none(found: Callable[[str], Collection[str]], names: Iterable[str]) -> None:
    """Asserts that nothing is found in these modules; otherwise says what is found where."""
    assert {name: found(name) for name in names if found(name)} == {}


# -- imports -----------------------------------------------------------------------------------


def test_packages_of_replication_import_only_packages_below_them():
    level = {part: index for index, parts in enumerate(ORDER) for part in parts}

    def too_high(name: str) -> list[str]:
        own = name.split(".")[1]
        imported = {i.split(".")[1] for i in of_replication(imports(syntax(name)))}
        return [part for part in imported - {own} if level[part] > level[own]]

    assert_none(too_high, of_replication(MODULES))


def test_nothing_but_the_doors_of_the_package_imports_verify():
    """What a program runs never depends on what checks it."""
    own = [name for name in FILES if name.startswith("replication.verify")]
    assert len(own) > 10
    doors = {"replication.__init__", "replication.extending"}
    others = {*of_replication(FILES)} - {*own, *doors}
    assert_none(
        lambda name: [i for i in imports(syntax(name)) if i.startswith("replication.verify")],
        others,
    )


def test_replication_does_not_import_syncbn():
    assert_none(
        lambda name: [i for i in imports(syntax(name)) if i.split(".")[0] == "syncbn"],
        of_replication(FILES),
    )


def test_syncbn_comes_in_by_the_doors_only():
    """Through what `replication` exports, and the names of `replication.extending`, all used."""
    assert sorted(FOR_LAYERS + FOR_TOOLS) == sorted(extending.__all__)
    found: dict[str, set[str]] = {}
    for name in FILES:
        if name.startswith("syncbn"):
            for node in ast.walk(syntax(name)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("replication"):
                    found.setdefault(str(node.module), set()).update(a.name for a in node.names)
    assert found.pop("replication") <= {*replication.__all__, "__version__"}
    assert found == {"replication.extending": set(extending.__all__)}


def test_numeric_modules_import_no_replicas():
    numeric = ["syncbn.channels", "syncbn.statistics", "replication.extending"]
    assert_none(
        lambda name: [i for i in foreign(name) if i not in numeric and i.split(".")[0] != "torch"],
        numeric[:2],
    )


def test_the_kit_of_the_tests_imports_no_benchmark():
    kit = [path for path in TESTS.rglob("*.py") if not path.name.startswith("test_")]
    trees = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in kit}
    assert {
        name: found
        for name, tree in trees.items()
        if (found := [i for i in imports(tree) if i.split(".")[0] == "benchmarks"])
    } == {}


def test_nothing_but_torch_is_needed():
    assert_none(
        lambda name: {i.split(".")[0] for i in foreign(name)} - {"torch", *PACKAGES}, MODULES
    )


def test_modules_do_not_import_the_init_of_their_package():
    assert_none(lambda name: {name.split(".")[0]} & set(imports(syntax(name))), MODULES)


def test_nothing_is_imported_inside_a_function():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert_none(
        lambda name: [
            imported
            for node in ast.walk(syntax(name))
            if isinstance(node, functions)
            for imported in imports(node)
        ],
        FILES,
    )


def test_modules_depend_on_each_other_in_one_direction():
    graph = {name: {i for i in imports(syntax(name)) if i in MODULES} for name in MODULES}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert sorted(order) == sorted(MODULES)


def test_private_names_of_torch_are_imported_in_one_place():
    assert_none(
        lambda name: [
            f"{node.module}.{alias.name}"
            for node in ast.walk(syntax(name))
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch"
            for alias in node.names
            if any(part.startswith("_") for part in f"{node.module}.{alias.name}".split("."))
        ],
        set(of_replication(MODULES)) - {"replication._torch"},
    )


# -- public names ------------------------------------------------------------------------------


def test_all_is_sorted_and_exists():
    for name in (*MODULES, *PACKAGES):
        module = importlib.import_module(name)
        exported = getattr(module, "__all__", [])  # internal modules have none
        assert exported == sorted(set(exported)), name
        assert [n for n in exported if not hasattr(module, n)] == [], name


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_names_from_where_they_are_public_and_does_nothing_else(package):
    docstring, *statements, last = syntax(f"{package}.__init__").body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(last, ast.Assign) and ast.unparse(last.targets[0]) == "__all__"
    public = set()
    for node in statements:
        assert isinstance(node, ast.ImportFrom)
        names = {alias.name for alias in node.names}
        public_there = importlib.import_module(str(node.module)).__all__
        assert names <= {*public_there, "__version__"}
        public |= names - {"__version__"}
    assert sorted(public) == importlib.import_module(package).__all__


def test_modules_begin_with_a_sentence():
    first = {name: (ast.get_docstring(syntax(name)) or "-").splitlines()[0] for name in FILES}
    assert [name for name, line in first.items() if not line.endswith(".")] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_marked_as_typed(package):
    assert (ROOT / package / "py.typed").exists()


# -- what of torch's own is relied on ----------------------------------------------------------


def test_shells_are_those_that_torch_makes():
    module = nn.BatchNorm1d(3)
    module.extra = [torch.ones(2)]
    own = vars(torch_internals.make_shell(module))
    theirs = vars(module._replicate_for_data_parallel())
    assert own.keys() == theirs.keys()
    for name, value in theirs.items():
        assert type(own[name]) is type(value)
        assert own[name] is value or (own[name] == value and isinstance(own[name], (dict, int)))


def test_a_class_or_an_object_that_makes_its_shells_in_its_own_way_is_asked():
    class Own(nn.Identity):
        def _replicate_for_data_parallel(self):
            return self.made

    made = nn.Identity()
    own, patched = Own(), nn.ReLU()
    vars(own)["made"] = made
    patched._replicate_for_data_parallel = lambda: made
    assert torch_internals.make_shell(own) is torch_internals.make_shell(patched) is made
