"""`python patched_script.py TEXT SCRIPT ARGS`: runs SCRIPT as Python does, but with what stands in the file TEXT.

Its folder, `__file__`, arguments and working directory are those of SCRIPT, which is not touched. Whoever reads its source, as
torch.jit.script does, reads the text.
"""

import linecache
import os
import sys


def _start() -> None:
    text_file, script = sys.argv[1:3]
    with open(text_file, encoding="utf-8", newline="") as file:
        text = file.read()
    path = os.path.abspath(script)
    sys.argv[:] = sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # no time: it is never read from the disk again
    code = compile(text, path, "exec", dont_inherit=True)
    main = vars(sys.modules["__main__"])
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    main.update(__file__=path, __doc__=None, __annotations__={})
    exec(code, main)  # noqa: S102 - it is the user's own program


if __name__ == "__main__":
    _start()
