"""Lists and removes KV directories: what workers keep under TIDEGATE_WORKER__KV__DISK_PATH."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from worker.kv_disk.directories import kv_directories, remove_kv_directory


def main(command: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    listing = actions.add_parser("list", help="one line per directory, the longest unused first")
    listing.add_argument("path", type=Path, help="the KV path")
    removing = actions.add_parser("remove", help="delete directories")
    removing.add_argument("path", type=Path, help="the KV path")
    removing.add_argument("fingerprint", nargs="+", help="names as listed")
    args = parser.parse_args(command)
    try:
        if args.action == "list":
            for directory in kv_directories(args.path):
                print(directory)
        else:
            for fingerprint in args.fingerprint:
                print(f"removed {remove_kv_directory(args.path, fingerprint)}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
