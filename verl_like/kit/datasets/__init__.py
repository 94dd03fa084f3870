"""Scripts that write parquet files of the row schema: `python -m verl_like.kit.datasets.NAME --help`."""
