"""Commands of `python -m kvferry.tuning`, each in a module that is imported only when it is run."""

import importlib
import sys

COMMANDS = {
    "derive": ("kvferry.tuning.derive", "write launch numbers for GPUs that nobody measured on"),
    "inspect": ("kvferry.tuning.inspect", "compile the kernels for other GPUs, and check"),
    "sweep": ("kvferry.tuning.sweep", "measure launch numbers on this GPU"),
}
"""Name to the module whose `main(arguments)` returns an exit status, and a line of help."""


def main(arguments: list[str]) -> int:
    """Run a command; print the commands if there is none."""
    if not arguments or arguments[0] not in COMMANDS:
        lines = [f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()]
        print("usage: python -m kvferry.tuning COMMAND [options]\n\n" + "\n".join(lines))
        return 0 if arguments in ([], ["-h"], ["--help"]) else 2
    module = importlib.import_module(COMMANDS[arguments[0]][0])
    status: int = module.main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
