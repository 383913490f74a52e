"""A stand-in for the `draftmill` command that writes manifests and nothing else: for tests of the Snakefile.

    stub_draftmill.py RECORD COMMAND RUN.yaml [--part P] [--drafter NAME] ...

Each call appends its arguments to the file RECORD. `$STUB_FAIL` names commands that fail, `$STUB_SLEEP` gives the
seconds that each call takes. Run files must be JSON here. The standard library only, so that 2,000 calls stay cheap.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path


def main(record: Path, command: str, run_file: str, *options: str) -> int:
    body = json.loads(Path(run_file).read_text())
    folder = Path(body.get("root", "runs")) / body["name"]
    given = dict(zip(options[::2], options[1::2], strict=False))
    with record.open("a") as file:
        file.write(json.dumps([command, *options]) + "\n")
    time.sleep(float(os.environ.get("STUB_SLEEP", 0)))
    if command in os.environ.get("STUB_FAIL", "").split(","):
        print(f"error: {command} was told to fail", file=sys.stderr)
        return 1
    part = f"part-{int(given.get('--part', 0)):04d}.json"
    drafter = given.get("--drafter", "")
    parts = [f"part-{number:04d}.json" for number in range(body["extract"]["parts"])]
    keep = body["data"].get("responses", "keep") == "keep"
    outputs = {
        "prepare": [f"prompts/{name}" for name in parts] + ([f"tokens/{name}" for name in parts] if keep else []),
        "regenerate": [f"tokens/{part}"],
        "extract": [f"cache/{part}"],
        "train": [f"drafters/{drafter}/train.json"],
        "eval": [f"eval/{drafter}/manifest.json"],
        "export": [f"export/{drafter}/draftmill.json"],
        "report": ["report/report.html"],
    }.get(command, [])
    made = hashlib.sha256(json.dumps(body["data"]).encode()).hexdigest()
    for output in outputs:
        path = folder / output
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"made": made, "by": command}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
