"""The program `ropext`, also `python -m ropext`."""

import sys

if __name__ == "__main__" and "-m" in sys.orig_argv and not sys.flags.safe_path:
    del sys.path[0]  # the working folder, which may have anyone's torch.py

# JSON by hand: this file imports only sys, for a module imported above might come from there too.
INTERRUPTED = '{\n  "error": "interrupted",\n  "exit_code": %d,\n  "option": null\n}\n'


def main() -> None:
    """Run the command line; until it is imported it cannot answer a Ctrl-C itself."""
    try:
        from ropext.cli.app import main as run
    except KeyboardInterrupt:
        from ropext.base.errors import NothingKept

        code = NothingKept.exit_code
        sys.stderr.write("error: interrupted\n")
        if "--json" in sys.argv:
            sys.stdout.write(INTERRUPTED % code)
        exec("")  # as in ropext/cli/app.py
        sys.exit(code)
    run()


if __name__ == "__main__":
    main()
