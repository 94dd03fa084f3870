"""Tool calls in the text of a response, one file per syntax."""
