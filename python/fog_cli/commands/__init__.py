"""The subcommands of `fog`, one per module: `add` defines the arguments for argparse, `run` executes the command."""
