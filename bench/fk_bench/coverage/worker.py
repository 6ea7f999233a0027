"""A process that audits the files named on its standard input, one a line, and answers each with a row as JSON."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print do not disturb the answers
    os.environ["TRANSFORMERS_VERBOSITY"] = "critical"

    import torch

    from fk_bench.coverage.audit import Coverage, Row, audit

    torch.set_num_threads(1)
    for line in sys.stdin:
        file = line.strip()
        try:
            row = audit(file)
        except Exception as error:  # one architecture must not end the audit of the others
            message = str(error).strip().splitlines() or [""]
            row = Row(file, Coverage.FAILED, error=f"{type(error).__name__}: {message[0]}")
        print(json.dumps(row.to_dict()), file=answers)


if __name__ == "__main__":
    main()
