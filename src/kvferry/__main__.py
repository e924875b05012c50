"""The command line: `python -m kvferry doctor`, `demo` and `forget`."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code; without one, print the help."""
    parser = argparse.ArgumentParser(
        prog="kvferry", description="Move KV-cache pages as whole objects through Mooncake."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="what this machine has, and what to do")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    # No help of their own: everything after their name, `--help` too, is theirs to read.
    commands.add_parser("demo", help="save and load pages on this machine", add_help=False)
    commands.add_parser("forget", help="delete old generations from a store", add_help=False)

    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "demo":
        from kvferry.demo import main as run_demo

        return run_demo(rest)
    if arguments.command == "forget":
        from kvferry.forget import main as run_forget

        return run_forget(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command == "doctor":
        from kvferry.doctor import main as run_doctor

        return run_doctor(as_json=arguments.json)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
