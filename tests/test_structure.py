"""The import rule, the three links, and what the wheel holds."""

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("kernels", "linker", "tuning")
APPLICATIONS = ("__init__", "__main__", "demo", "demo_worker", "doctor", "forget")

MAY_IMPORT = {
    "core": {"core"},
    "kernels": {"kernels", "core"},
    "linker": {"linker", "kernels", "core"},
    "tuning": {"tuning", "kernels", "core"},
    "application": {"application", "linker", "kernels", "core"},
}
# Packages that only some files may import: by the start of a file's path.
RESERVED = {
    "mooncake": ("linker/mooncake.py",),
    "sglang": ("linker/sglang.py", "linker/sglang_identity.py"),
    "vllm": ("linker/vllm.py", "linker/vllm_messages.py", "linker/vllm_setup.py"),
    "triton": ("kernels/", "tuning/"),
}


def sources() -> dict[str, str]:
    """Every module of the library: its path from the root, and its text."""
    paths = [
        *ROOT.glob("src/kvferry/*.py"),
        *(p for link in LINKS for p in ROOT.glob(f"{link}/**/*.py")),
    ]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def module_of(path: str) -> str:
    """`linker/store.py` is `kvferry.linker.store`."""
    inner = path.removeprefix("src/kvferry/").removesuffix(".py").replace("/", ".")
    return "kvferry" if inner == "__init__" else f"kvferry.{inner}"


def layer_of(module: str) -> str:
    """The layer of a module of kvferry."""
    first = module.split(".")[1] if "." in module else "__init__"
    if first in LINKS:
        return first
    return "application" if first in APPLICATIONS else "core"


def imported(path: str, text: str, modules: Iterable[str]) -> Iterator[str]:
    """Every module that a file imports, wherever in it, by its full name."""
    known = {*modules, *(f"kvferry.{link}" for link in LINKS)}
    package = (
        module_of(path) if path.endswith("__init__.py") else module_of(path).rpartition(".")[0]
    )
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # `from kvferry import layout` imports kvferry.layout
                inner = f"{module}.{alias.name}"
                yield inner if inner in known else module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def violations(files: Mapping[str, str]) -> list[str]:
    """Every import that the rule forbids, as `file imports module`."""
    modules = {module_of(path) for path in files}
    found = []
    for path, text in files.items():
        allowed = MAY_IMPORT[layer_of(module_of(path))]
        for name in imported(path, text, modules):
            top = name.split(".")[0]
            if top == "kvferry":
                bad = layer_of(name) not in allowed
            else:
                folders = next((to for key, to in RESERVED.items() if top.startswith(key)), ("",))
                bad = not path.startswith(folders)
            if bad:
                found.append(f"{path} imports {name}")
    return found


def test_import_rule() -> None:
    files = sources()
    assert len(files) > 10
    assert violations(files) == []


def test_nobody_but_a_user_turns_checksums_off() -> None:
    """The library passes settings on; no file of it chooses `integrity`."""
    for path, text in sources().items():
        given = [
            keyword
            for call in ast.walk(ast.parse(text, path))
            if isinstance(call, ast.Call)
            for keyword in call.keywords
            if keyword.arg == "integrity"
        ]
        assert not given, path


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("src/kvferry/layout.py", "from kvferry.kernels.pack import pack"),
        ("src/kvferry/layout.py", "from kvferry.kernels import pack"),
        ("src/kvferry/layout.py", "from .linker import store"),
        ("src/kvferry/layout.py", "import kvferry"),
        ("src/kvferry/layout.py", "from kvferry import CacheLayout"),
        ("src/kvferry/layout.py", "def f():\n    import triton"),
        ("kernels/pack.py", "from kvferry.linker.store import ObjectStore"),
        ("kernels/pack.py", "from ..linker import store"),
        ("kernels/pack.py", "from kvferry import tuning"),
        ("linker/transfer.py", "import kvferry.tuning.sweep"),
        ("linker/transfer.py", "from kvferry.doctor import main"),
        ("linker/transfer.py", "from kvferry.demo import main"),
        ("linker/transfer.py", "import triton.language as tl"),
        ("linker/transfer.py", "from mooncake.store import MooncakeDistributedStore"),
        ("linker/transfer.py", "import importlib\nimportlib.import_module('mooncake.store')"),
        ("linker/transfer.py", "from sglang.srt import server_args"),
        ("linker/transfer.py", "import sglang_kernel"),
        ("linker/sglang.py", "import vllm"),
        ("linker/sglang_pools.py", "import sglang"),
        ("tuning/sweep.py", "from kvferry.linker.staging import Staging"),
        ("src/kvferry/demo.py", "from kvferry.tuning import sweep"),
        ("src/kvferry/doctor.py", "import mooncake"),
    ],
)
def test_import_rule_catches(path: str, text: str) -> None:
    files = {"linker/store.py": "", "kernels/pack.py": "", path: text}
    assert len(violations(files)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("linker/mooncake.py", "from mooncake.store import MooncakeDistributedStore"),
        ("linker/sglang.py", "import sglang"),
        ("linker/transfer.py", "from kvferry import errors\nfrom kvferry.kernels import pack"),
        ("tuning/sweep.py", "import triton\nfrom kvferry.launch import LaunchConfig"),
        ("src/kvferry/demo.py", "from kvferry.linker.store import ObjectStore"),
    ],
)
def test_import_rule_allows(path: str, text: str) -> None:
    assert violations({"src/kvferry/errors.py": "", "kernels/pack.py": "", path: text}) == []


def folder_faults(root: Path) -> list[str]:
    """What is wrong with the links, or would hide Hugging Face's `kernels` from SGLang."""
    faults = [
        path.relative_to(root).as_posix()
        for link in LINKS
        for path in root.glob(f"{link}/**/__init__.py")
    ]
    for link in LINKS:
        path = root / "src/kvferry" / link
        if not path.is_symlink() or path.readlink() != Path("../..") / link:
            faults.append(f"src/kvferry/{link} is no link to ../../{link}")
    return faults


def copy_tree(to: Path) -> Path:
    """Copy what a wheel is built from, so that building leaves nothing in the work tree."""
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", *LINKS):
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    return to


def test_links_and_no_init_files() -> None:
    assert folder_faults(ROOT) == []


def test_links_and_init_files_are_caught(tmp_path: Path) -> None:
    root = copy_tree(tmp_path)
    assert folder_faults(root) == []
    (root / "kernels/__init__.py").touch()
    (root / "src/kvferry/linker").unlink()
    (root / "src/kvferry/linker").symlink_to(root / "linker")
    assert folder_faults(root) == [
        "kernels/__init__.py",
        "src/kvferry/linker is no link to ../../linker",
    ]


def build_wheel(root: Path) -> list[str]:
    """The names in the wheel that the tree at `root` gives, built without the network."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--wheel-dir", str(root / "dist"), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = (root / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def strangers(names: Iterable[str]) -> list[str]:
    """What a wheel would put beside `kvferry/` into site-packages."""
    return [name for name in names if not name.startswith(("kvferry/", "kvferry-"))]


def test_wheel_holds_only_kvferry(tmp_path: Path) -> None:
    names = build_wheel(copy_tree(tmp_path))
    assert strangers(names) == []
    modules = {f"{module_of(path).replace('.', '/')}.py" for path in sources()}
    modules.discard("kvferry.py")  # the package itself
    assert modules <= set(names)
    assert "kvferry/py.typed" in names
    tuned = {f"kvferry/tuning/configs/{path.name}" for path in ROOT.glob("tuning/configs/*.json")}
    assert "kvferry/tuning/configs/default.json" in tuned <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_stranger_in_the_wheel_is_caught(tmp_path: Path) -> None:
    root = copy_tree(tmp_path)
    (root / "src/kernels").symlink_to("../kernels")
    assert "kernels/pack.py" in strangers(build_wheel(root))
