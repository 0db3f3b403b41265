import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("zerojax", "host_offload", "pallas_kernels")
MAY_IMPORT = {"zerojax": {"host_offload", "pallas_kernels"}, "host_offload": set(), "pallas_kernels": set()}


def imported(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


def test_floors_mechanism_never_imports_policy():
    for package in PACKAGES:
        files = list((ROOT / package).rglob("*.py"))
        assert files
        for path in files:
            above = imported(path) & ({*PACKAGES, "examples", "benchmarks", "tests"} - {package} - MAY_IMPORT[package])
            assert not above, f"{path} imports {above}"


def test_floors_modules_do_not_import_in_a_circle():
    graph = {}
    for path in (ROOT / "zerojax").glob("*.py"):
        tree = ast.parse(path.read_text())
        froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        inside = {f"{n.module}" for n in froms if n.module and n.module.startswith("zerojax.")}
        inside |= {f"zerojax.{a.name}" for n in froms if n.module == "zerojax" for a in n.names}
        graph[f"zerojax.{path.stem}"] = inside
    del graph["zerojax.__init__"]
    while graph:
        leaves = [name for name, uses in graph.items() if not uses & graph.keys()]
        assert leaves, f"cycle among {sorted(graph)}"
        for name in leaves:
            del graph[name]
