"""The subcommands of `fog`, one a file: `add` describes it to argparse, `run` does it."""
