"""The entry of the command line, which imports it: Ctrl-C is silent meanwhile, too."""


def main() -> None:
    """``revela.cli.main``."""
    try:
        from revela import cli

        cli.main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
