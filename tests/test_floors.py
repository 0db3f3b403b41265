"""Which package, folder and module may import which, and that imports enter folders by their doors.

`python tests/test_floors.py` prints the folders, with files, arrows and floors.
"""

import ast
import functools
import pathlib
import re
import statistics

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PACKAGES = {
    "zerojax": {"host_offload", "pallas_kernels"},
    "host_offload": set(),
    "pallas_kernels": set(),
}
"""The packages that each package may import."""

ROOMS = {
    # files that are low floors under several folders
    "zerojax.elements": ("jaxprs",),
    "zerojax.user_values": (),
    "zerojax.chips": (),
    "zerojax.compat": (),
    "zerojax.precision": ("user_values",),
    "zerojax.arguments": (),
    "zerojax.trees": (),
    "zerojax.vocabulary": (),
    "zerojax.progress": (),
    "zerojax.metrics": ("precision",),
    "zerojax.config": ("user_values", "sharding", "precision", "trees"),
    "zerojax.aot": ("chips", "compat", "sharding"),
    "zerojax.environment": (),
    "zerojax.ordering": (),
    # folders, from the ground up
    "zerojax.sharding": ("user_values", "trees"),
    "zerojax.jaxprs": (),
    "zerojax.context": ("user_values", "chips", "compat", "sharding"),
    "zerojax.gather": ("activations", "jaxprs", "sharding", "trees"),
    "zerojax.tiling": ("user_values", "jaxprs", "sharding", "trees"),
    "zerojax.models": ("user_values", "tiling", "jaxprs", "sharding", "trees"),
    "zerojax.experts": ("user_values", "tiling", "models", "sharding"),
    "zerojax.linen": ("experts", "tiling"),
    "zerojax.activations": ("models", "tiling", "jaxprs", "sharding", "vocabulary", "trees"),
    "zerojax.grads": ("activations", "jaxprs", "sharding", "trees"),
    "zerojax.formulas": ("activations", "sharding", "precision"),
    "zerojax.state": ("user_values", "ordering", "models", "sharding", "config", "precision", "trees"),
    "zerojax.runtime": ("user_values", "state", "trees"),
    "zerojax.optim": ("user_values", "ordering", "elements", "state", "runtime", "sharding", "jaxprs", "config", "precision", "metrics", "trees"),
    "zerojax.resident": (
        "activations", "grads", "optim", "state", "models", "sharding", "jaxprs", "metrics", "trees",
    ),
    "zerojax.streamed": (
        "ordering", "activations", "grads", "optim", "state", "models", "tiling", "sharding", "jaxprs", "config", "compat", "metrics", "trees",
    ),
    "zerojax.pipeline": (
        "user_values", "grads", "optim", "ordering", "state", "models", "sharding", "streamed", "config", "metrics", "trees",
    ),
    "zerojax.memory": (
        "formulas", "pipeline", "streamed", "resident", "state", "models", "activations", "jaxprs", "sharding", "precision", "trees",
    ),
    "zerojax.program": (
        "activations", "memory", "pipeline", "streamed", "resident", "optim", "gather", "runtime", "state", "models", "sharding",
        "aot", "compat", "config", "precision", "hlo", "jaxprs", "progress", "trees",
    ),
    "zerojax.checkpoint": ("user_values", "program", "runtime", "state", "models", "sharding", "precision", "progress"),
    "zerojax.inference": ("user_values", "program", "state", "models", "sharding"),
    "zerojax.weights": ("checkpoint", "program", "state", "models", "jaxprs", "config", "progress", "sharding", "trees"),
    "zerojax.hf": ("user_values", "context", "experts", "weights", "checkpoint", "program", "state", "models", "tiling", "sharding", "trees"),
    "zerojax.machines": ("user_values", "chips", "formulas", "sharding", "precision", "hlo", "trees"),
    "zerojax.choice": (),
    "zerojax.data": ("user_values", "progress"),
    "zerojax.preferences": ("user_values", "data", "program", "state", "models"),
    "zerojax.costs": (
        "user_values", "formulas", "choice", "machines", "program", "memory", "streamed", "optim", "state", "models", "activations", "tiling",
        "sharding", "aot", "config", "precision", "jaxprs", "trees",
    ),
    "zerojax.planner": (
        "user_values", "chips", "costs", "choice", "machines", "program", "memory", "models", "activations", "sharding",
        "aot", "config", "precision", "hlo", "trees",
    ),
    "zerojax.reporting": (
        "user_values", "environment", "planner", "machines", "memory", "program", "runtime", "progress",
    ),
    "zerojax.hlo": ("chips", "compat"),
    "zerojax.options": ("arguments", "hlo", "vocabulary"),
    "zerojax.commands": (
        "options", "environment", "activations", "checkpoint", "weights", "hf", "memory", "planner", "sharding", "precision", "hlo",
    ),
    "zerojax.cli": ("options", "commands"),
    "zerojax.__main__": ("cli",),
    "host_offload.tiers": (),
    "host_offload.fields": (),
    "host_offload.device": (),
    "host_offload.schedule": ("tiers",),
    "host_offload.disk": ("device", "fields"),
    "host_offload.calls": ("device", "disk"),
    "host_offload.engine": ("calls", "device", "disk", "schedule"),
    "host_offload.host_update": ("calls", "device", "disk", "engine"),
    "host_offload.trace": ("engine", "disk", "schedule"),
}  # fmt: skip
"""What each folder or file of a package may import from the same package."""
FEWEST = 20  # minimum number of rooms, so that an empty table does not pass


@functools.cache
def imported(path: pathlib.Path) -> frozenset[tuple[str, str]]:
    """Return (module, name) for each import of a file; for `import a.b` the name is empty."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(a.name, "") for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {(node.module or "", a.name) for a in node.names}
    return frozenset(found)


def module_of(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def files_of(*packages: str) -> list[pathlib.Path]:
    files = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > len(packages)
    return files


def doors() -> dict[str, set[str]]:
    """Return the names that each folder's `__init__` exports."""
    offered = {}
    for package in ("zerojax", "host_offload"):
        for path in sorted((ROOT / package).glob("*/__init__.py")):
            offered[f"{package}.{path.parent.name}"] = {name for _, name in imported(path)}
    return offered


def rooms_used(path: pathlib.Path) -> set[str]:
    """Return the other rooms of its own package that a file imports from."""
    package, own = path.relative_to(ROOT).parts[0], room_of(module_of(path))
    names = {f"{module}.{name}" if module == package else module for module, name in imported(path)}
    return {room_of(name) for name in names if name.startswith(f"{package}.")} - {own}


def arrows(modules: bool = False) -> dict[str, set[str]]:
    """Return the imports of each room; with `modules`, of each module of the two packages."""
    graph: dict[str, set[str]] = {}
    for path in files_of("zerojax", "host_offload"):
        module = module_of(path)
        if module in ("zerojax.__init__", "host_offload.__init__"):
            continue
        if not modules:
            graph.setdefault(room_of(module), set()).update(rooms_used(path))
        elif not module.endswith("__init__"):
            graph[module] = {m for m, _ in imported(path)}
    return graph


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the floor of each node, 0 for a node without imports.

    Raises:
      AssertionError: if there is a cycle.
    """
    graph, floor = {node: set(used) & graph.keys() for node, used in graph.items()}, {}
    while len(floor) < len(graph):
        ready = [node for node, used in graph.items() if node not in floor and used <= floor.keys()]
        assert ready, f"there is an import cycle among {sorted(graph.keys() - floor.keys())}"
        floor |= {node: 1 + max((floor[u] for u in graph[node]), default=-1) for node in ready}
    return floor


def test_floors_mechanism_never_imports_policy():
    for package, may in PACKAGES.items():
        above = {*PACKAGES, "examples", "benchmarks", "tests"} - {package} - may
        for path in files_of(package):
            wrong = {module for module, _ in imported(path) if module.split(".")[0] in above}
            assert not wrong, f"{path} imports {wrong}"


def test_floors_rooms_import_what_the_table_says():
    graph = arrows()
    assert len(graph) >= FEWEST
    assert graph.keys() == ROOMS.keys()
    for room, used in graph.items():
        may = {f"{room.split('.')[0]}.{name}" for name in ROOMS[room]}
        assert used <= may, f"{room} imports {sorted(used - may)}"
        assert may <= used, f"{room} may import {sorted(may - used)}, but does not"
    floors(graph)  # no cycle between rooms


def test_floors_modules_do_not_import_in_a_circle():
    graph = arrows(modules=True)
    assert len(graph) > 100
    floors(graph)


def test_floors_folders_are_entered_by_their_doors():
    offered = doors()
    assert len(offered) >= FEWEST
    for path in files_of("zerojax", "host_offload", "examples", "benchmarks"):
        own = room_of(module_of(path))
        for module, name in imported(path):
            room = room_of(module)
            if room in offered and room != own:
                assert module == room, f"{path} imports {module}, past the door of {room}"
                assert name in offered[room], (
                    f"{path} imports {name!r}, which the door of {room} does not export"
                )
            if path.is_relative_to(ROOT / "zerojax") or path.is_relative_to(ROOT / "host_offload"):
                # A folder's module would give access to its modules as attributes, past the door.
                assert f"{module}.{name}" not in offered, (
                    f"{path} imports the folder {module}.{name}: import from it by name"
                )
                is_door = path.name == "__init__.py"
                assert is_door or module != own or own not in offered, (
                    f"{path} imports its own folder's door: name the module"
                )


def test_floors_doors_name_what_they_offer():
    for path in files_of("zerojax", "host_offload"):
        if path.name == "__init__.py" and len(path.relative_to(ROOT).parts) == 3:
            body = ast.parse(path.read_text()).body
            assert ast.get_docstring(ast.parse(path.read_text())), (
                f"{path} needs a docstring that says what the folder is"
            )
            for node in body[1:]:
                assert isinstance(node, ast.ImportFrom), f"{path} must hold no code"
                assert all(a.asname == a.name for a in node.names), f"{path}: write 'x as x'"


def test_floors_doors_offer_what_others_use():
    """A door's name is imported elsewhere, read as an attribute, or used in the documentation."""
    used, read = set[tuple[str, str]](), set[tuple[str, str]]()
    for path in files_of(*PACKAGES, "tests", "benchmarks", "examples"):
        own = room_of(module_of(path))
        used |= {
            (module, name)
            for module, name in imported(path)
            if module != own and not module.startswith(f"{own}.")
        }
        read |= set(re.findall(r"\b(?=(\w+)\.(\w+)\b)", path.read_text()))
    documents = "\n".join(
        path.read_text() for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    )
    words, tables = (
        set(re.findall(r"\w+", documents)),
        (ROOT / "zerojax" / "__init__.py").read_text(),
    )
    for folder, names in doors().items():
        alias = folder.split(".")[-1]
        idle = {
            n
            for n in names
            if (folder, n) not in used and (alias, n) not in read and n not in words
        }
        idle = {n for n in idle if f'"{n}": "{folder}"' not in tables}  # imported on demand
        assert not idle, f"nothing uses these names of the door of {folder}: {sorted(idle)}"


def test_floors_no_folder_is_too_full():
    for folder in doors():
        files = list((ROOT / folder.replace(".", "/")).glob("*.py"))
        assert 1 <= len(files) - 1 <= 14, f"{folder} has {len(files) - 1} files"


def test_floors_contributors_read_the_same_table():
    documented = {}
    for package, rows in zip(
        ("zerojax", "host_offload"),
        CONTRIBUTING.read_text().split("| folder of `")[1:],
        strict=True,
    ):
        for name, may in re.findall(
            r"^\| `(\w+)(?:/|\.py)` \|[^|]*\| ([^|]*) \|$", rows, re.MULTILINE
        ):
            documented[f"{package}.{name}"] = set() if may == "nothing" else set(may.split(", "))
    assert documented == {
        room: set(may) for room, may in ROOMS.items() if room != "zerojax.__main__"
    }


def table() -> str:
    """Return a table of rooms, and the totals of each package."""
    graph, lines = (
        arrows(),
        {path: len(path.read_text().splitlines()) for path in files_of("zerojax", "host_offload")},
    )
    floor = floors(graph)
    rows = [f"{'room':<26} {'floor':>5} {'files':>5} {'lines':>6} {'arrows':>6}"]
    for room in sorted(graph, key=lambda r: (r.split(".")[0], floor[r], r)):
        files = [path for path in lines if room_of(module_of(path)) == room]
        count = len([path for path in files if path.name != "__init__.py"])
        rows.append(
            f"{room:<26} {floor[room]:>5} {count:>5} {sum(lines[p] for p in files):>6} {len(graph[room]):>6}"
        )
    for package in ("zerojax", "host_offload"):
        own = {room: used for room, used in graph.items() if room.startswith(package)}
        folders = [f for f in doors() if f.startswith(package)]
        sizes = [
            n
            for path, n in lines.items()
            if path.parts[len(ROOT.parts)] == package and path.name != "__init__.py"
        ]
        between = sum(
            len([u for u in used if u in folders]) for room, used in own.items() if room in folders
        )
        most = max(len(list((ROOT / f.replace(".", "/")).glob("*.py"))) - 1 for f in folders)
        rows.append(
            f"{package}: {len(folders)} folders, {len(own)} rooms, {len(sizes)} files, {sum(map(len, own.values()))} arrows "
            f"({between} between folders), {1 + max(floor[r] for r in own)} floors, 0 cycles; largest folder {most} files; "
            f"median file {statistics.median(sizes):.0f} lines, largest {max(sizes)}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
