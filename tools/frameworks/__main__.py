"""Run frameworks' real code on a CPU: ``python tools/frameworks [NAME [CASE ...]]``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # The folders above in place of this one, whose modules are named after frameworks.
    tools = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(tools), *(str(tools.parent / of) for of in ("tests/python", "bench"))]
    from frameworks.run import main

    sys.exit(main())
