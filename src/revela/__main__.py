"""The entry point of the command line. Ctrl-C is silent even while it is being imported."""


def main() -> None:
    """``revela.cli.main``."""
    try:
        from revela import cli

        cli.main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
