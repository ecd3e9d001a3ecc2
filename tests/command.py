"""The command ``fsdp-compile`` in this process, for what needs no ranks: quicker than a new one."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from fsdp_compile import cli


def command(*arguments: object) -> tuple[int, str, str]:
    """Its exit code, and what it writes to stdout and to stderr."""
    out, err = io.StringIO(), io.StringIO()
    modules, path = dict(sys.modules), list(sys.path)
    called = patch.object(sys, "argv", ["fsdp-compile", *map(str, arguments)])
    try:
        with redirect_stdout(out), redirect_stderr(err), called:
            cli.main()
        raise AssertionError("it ends by sys.exit")
    except SystemExit as exit_:
        assert isinstance(exit_.code, int)
        return exit_.code, out.getvalue(), err.getvalue()
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name not in modules and name.startswith("_parity_")]:
            del sys.modules[name]  # a file of that name in another directory is another one
