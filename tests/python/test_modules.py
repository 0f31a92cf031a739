"""How the modules of the package hang together: no import cycle, two functions that import modules, and few modules
between a call and the library."""

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
# The functions that import modules of octet: frameworks that may be missing, and a command that other commands lack.
LAZY = {("octet._api", "load"), ("octet._command", "main")}


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


def test_functions_import_nothing_of_octet_but_in_two_places():
    inside = {(name, function) for name in MODULES for _, function in imports_of(name) if function}
    assert inside == LAZY


# A program that prints for each of some calls of octet.attention the modules that it is in where it reaches the
# library, from the outside to the inside, and all modules of which it runs a function. Each call is the first of its
# process, which is forked from one that has imported what they need.
PROGRAM = """
import json, os, sys
import octet
{setup}
from octet._descriptors import Plan
root = os.path.dirname(octet.__file__) + os.sep
into_library = Plan.run.__code__, Plan.workspace_size.__code__
def modules_of(frame):
    found = []
    while frame:
        found.insert(0, frame.f_code.co_filename)
        frame = frame.f_back
    return list(dict.fromkeys(file[len(root):] for file in found if file.startswith(root)))
def first_call(q, keywords):
    way, ran = [], set()
    def note(frame, event, argument):
        nonlocal way
        if event == "call" and frame.f_code.co_filename.startswith(root):
            ran.add(frame.f_code.co_filename[len(root):])
            if frame.f_code in into_library:
                way = max(way, modules_of(frame), key=len)
    sys.setprofile(note)
    octet.attention(q, q, q, **keywords)
    sys.setprofile(None)
    return way, sorted(ran)
for name, call in {calls!r}.items():
    if not os.fork():
        keywords = {{}}
        exec(call)
        print(json.dumps([name, *first_call(q, keywords)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""
SETUPS = {
    "numpy": "import numpy; q = numpy.zeros((1, 2, 8, 16), 'f4')",
    "torch": "import torch, octet.torch; torch.set_num_threads(1); q = torch.rand(1, 2, 8, 16)",
    "jax": "import jax, octet.jax",
}
ORDINARY = "octet._api.shortcuts.clear()"
# For each call, beside what it does differently, the modules that it is in where it reaches the library and the helpers
# that it has left again: where it enters, the framework's functions, and between plans and the C ABI nothing else.
FAST = "_api torch/_fast_path _plan _descriptors"
BY_OPERATORS = "_api torch/_attention torch/_ops torch/_passes _plan _descriptors"
HELPERS = "_operands _options _results _views"
CALLS = {
    "numpy": ("", "_api _numpy _plan _descriptors", HELPERS),
    "torch": ("", FAST, f"{HELPERS} torch/_adapter torch/_passes"),
    "torch with a gradient": (
        "q.requires_grad_()",  # _adapter asks for the backward pass before the forward pass runs
        "_api torch/_fast_path torch/_adapter _plan _descriptors",
        f"{HELPERS} torch/_passes",
    ),
    "torch by the ordinary way": (ORDINARY, BY_OPERATORS, f"{HELPERS} torch/_adapter"),
    "torch by the ordinary way, with a gradient": (
        f"{ORDINARY}; q.requires_grad_()",
        BY_OPERATORS,
        f"{HELPERS} torch/_adapter",
    ),
    "torch with a mask, sinks and lse": (
        "keywords = dict(mask=q[0, 0, :, :8] > 0.5, sinks=q[0, :, 0, 0], return_lse=True)",
        BY_OPERATORS,
        f"{HELPERS} torch/_adapter",
    ),
    "jax": (
        "q = jax.numpy.ones((1, 2, 8, 16))",
        "_api jax/_attention jax/_primitives jax/_adapter _descriptors",
        f"{HELPERS} _plan",
    ),
}


@pytest.mark.parametrize("framework", SETUPS)
def test_a_cold_call_passes_through_the_modules_that_it_is_known_to(framework):
    """The first of a process, once what it needs has been imported. A module more on the way fails, or one more that
    helps: whoever follows a call reads them all."""
    pytest.importorskip(framework)
    calls = {name: call for name, (call, *_) in CALLS.items() if name.split()[0] == framework}
    program = PROGRAM.format(setup=SETUPS[framework], calls=calls)
    paths = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {name: (way, ran) for name, way, ran in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == calls.keys()
    for name, (way, ran) in found.items():
        _, on_the_way, helpers = CALLS[name]
        expected = [f"{module}.py" for module in on_the_way.split()]
        assert way == expected and len(way) <= 6, name
        assert ran == sorted([*expected, *(f"{module}.py" for module in helpers.split())]), name
