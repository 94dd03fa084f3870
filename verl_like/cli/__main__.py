"""`python -m verl_like.cli` is `verl-like`."""

from verl_like.cli.main import main

if __name__ == "__main__":
    main()
