"""The program `ropext`, also `python -m ropext`."""

import sys

if __name__ == "__main__" and "-m" in sys.orig_argv and not sys.flags.safe_path:
    del sys.path[0]  # the working folder, where anyone's torch.py may lie


def main() -> None:
    """Run the command line; until it is imported it cannot answer a Ctrl-C itself."""
    try:
        from ropext.cli.app import main as run
    except KeyboardInterrupt:
        from ropext.errors import NothingKept

        sys.stderr.write("error: interrupted\n")
        sys.exit(NothingKept.exit_code)
    run()


if __name__ == "__main__":
    main()
