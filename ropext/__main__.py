"""The program `ropext`, also `python -m ropext`."""

import json
import sys

if __name__ == "__main__" and "-m" in sys.orig_argv and not sys.flags.safe_path:
    del sys.path[0]  # the working folder, where anyone's torch.py may lie


def main() -> None:
    """Run the command line; until it is imported it cannot answer a Ctrl-C itself."""
    try:
        from ropext.cli.app import main as run
    except KeyboardInterrupt:
        from ropext.errors import NothingKept

        code = NothingKept.exit_code
        sys.stderr.write("error: interrupted\n")
        if "--json" in sys.argv:
            error = {"error": "interrupted", "exit_code": code, "option": None}
            sys.stdout.write(f"{json.dumps(error, indent=2)}\n")
        sys.exit(code)
    run()


if __name__ == "__main__":
    main()
