"""How the modules of the package hang together: no import cycle, one place that imports what may be missing, and few
modules between a call and the library."""

import ast
import json
import os
import pathlib
import subprocess
import sys

import octet
import pytest

PACKAGE = pathlib.Path(octet.__file__).parent
MODULES = {
    ".".join(("octet", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
LAZY = {("octet._api", "load")}  # the functions that import modules of octet


def imports_of(name):
    """The modules of octet that a module imports, each with the function that imports it, None: the module itself."""
    tree = ast.parse(MODULES[name].read_text())
    found = []

    def visit(node, function):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            function = getattr(node, "name", "a lambda")
        if isinstance(node, ast.Import):
            found.extend((x.name, function) for x in node.names)
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: a relative import"
            for x in node.names:
                inner = f"{node.module}.{x.name}"
                found.append((inner if inner in MODULES else node.module, function))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, None)
    return [(module, function) for module, function in found if module in MODULES]


def cycle_in(graph):
    """A cycle of a graph, from each node to those that it points to, as a list of nodes; [] if there is none."""
    done = set()

    def walk(node, path):
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for after in graph[node]:
                if found := walk(after, [*path, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in graph if (found := walk(node, []))), [])


def test_a_cycle_is_found():
    assert cycle_in({"a": ["b"], "b": ["c", "d"], "c": [], "d": ["b"]}) == ["b", "d", "b"]
    assert cycle_in({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_no_module_imports_itself_through_others():
    graph = {name: [x for x, function in imports_of(name) if (name, function) not in LAZY] for name in MODULES}
    assert len(graph) > 30 and sum(map(len, graph.values())) > 100
    assert cycle_in(graph) == []


def test_functions_import_nothing_of_octet_but_in_one_place():
    inside = {(name, function) for name in MODULES for _, function in imports_of(name) if function}
    assert inside == LAZY


# A program that prints the modules that a call of octet.attention is in where it reaches the library, from the outside
# to the inside; helpers that it has left again do not count.
PROGRAM = """
import json, os, sys
import octet
{setup}
from octet._descriptors import Plan
root, most = os.path.dirname(octet.__file__) + os.sep, []
into_library = Plan.run.__code__, Plan.workspace_size.__code__
def note(frame, event, argument):
    global most
    if event != "call" or frame.f_code not in into_library:
        return
    inside = []
    while frame:
        file = frame.f_code.co_filename
        if file.startswith(root) and file not in inside:
            inside.insert(0, file)
        frame = frame.f_back
    most = max(most, inside, key=len)
sys.setprofile(note)
o = octet.attention(q, q, q, **keywords)
sys.setprofile(None)
print(json.dumps([file[len(root):] for file in most]))
"""
TORCH = "import torch, octet.torch; q = torch.rand(1, 2, 8, 16); keywords = {}"
CALLS = {
    "numpy": "import numpy; q = numpy.zeros((1, 2, 8, 16), 'f4'); keywords = {}",
    "torch": TORCH,
    "torch with a gradient": f"{TORCH}; q.requires_grad_()",
    "torch by the ordinary way": f"{TORCH}; octet._api.shortcuts.clear()",
    "torch by the ordinary way, with a gradient": f"{TORCH}; octet._api.shortcuts.clear(); q.requires_grad_()",
    "torch with a mask, sinks and lse": f"{TORCH}; keywords = dict(mask=q[0, 0, :, :8] > 0.5, sinks=q[0, :, 0, 0])",
    "jax": "import jax, octet.jax; q = jax.numpy.ones((1, 2, 8, 16)); keywords = {}",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_cold_call_passes_through_six_modules_at_most(call):
    """The first of a process, once what it needs has been imported."""
    pytest.importorskip(call.split()[0])
    program = PROGRAM.format(setup=CALLS[call])
    paths = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    modules = json.loads(ran.stdout.splitlines()[-1])
    assert modules[0] == "_api.py" and modules[-1] == "_descriptors.py" and len(modules) <= 6, modules
